"""A store that was damaged while nobody drove: `resume` and `recover` do nothing, and say where the damage is."""

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.shell import Shell, ended
from tests.stores.raw_file import event_cells

pytestmark = pytest.mark.slow

TICKS = '''
import os
import signal
from pathlib import Path

from my_models import scripted

from perdure import tool
from perdure.testing.scripted import calls, text

HERE = Path(__file__).parent


@tool(effect="idempotent")
def tick(number: int) -> str:
    """Notes a number, and dies once."""
    with (HERE / "ticks").open("a") as log:
        log.write(f"{number}\\n")
    if number == 8 and (HERE / "die").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return f"tick {number} für dich"


ticking = scripted(*[calls(("tick", {"number": number})) for number in range(12)], text("ticked"))
'''
AGENT = 'name = "ticking"\nmodel = "ticks:ticking"\ntools = ["ticks:tick"]\n'
HEADER, FRAME_HEADER, PAGE = 32, 24, 8192
FRAME = FRAME_HEADER + PAGE


class Killed:
    """A run that was killed in its ninth call, as its store's files tell, and damaged copies of them."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.main, self.log = shell.folder / "perdure.db", shell.folder / "perdure.db-wal"
        shell.write("ticks.py", TICKS)
        shell.write("ticking.toml", AGENT)
        shell.write("die", "")
        ended(shell.start("run", "ticking.toml", "--input", "go", "--run-id", "R"))
        (shell.folder / "die").unlink()
        self.keep()
        assert len(self.done()) == 2 * 9

    def keep(self) -> None:
        self.kept = {file: file.read_bytes() for file in (self.main, self.log) if file.exists()}

    def restore(self) -> None:
        for file in self.shell.folder.glob("perdure.db*"):
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        for file, data in self.kept.items():
            file.write_bytes(data)

    def write(self, file: Path, offset: int, data: bytes | None) -> None:
        """The files as they were but for these bytes, or for one bit."""
        self.restore()
        kept = self.kept[file]
        data = bytes([kept[offset] ^ 4]) if data is None else data
        assert kept[offset : offset + len(data)] != data
        file.write_bytes(kept[:offset] + data + kept[offset + len(data) :])

    def done(self) -> list[str]:
        """What the model and the tool did so far."""
        return self.shell.read("asked") + self.shell.read("ticks")

    def must_be_refused(self, says: str, *codes: str) -> None:
        done, files = self.done(), {file: file.read_bytes() for file in self.kept}
        for argv in (("resume", "R"), ("recover",)):
            refused = self.shell(*argv, "--json", check=4)
            assert refused.error["code"] in codes, refused
            assert says in refused.error["message"], refused
            assert refused.error["where"]
            assert "restore" in refused.error["next"]
            assert refused.out == ""
        assert self.shell("verify", "--json", check=4).record["ok"] is False
        assert self.done() == done
        assert {file: file.read_bytes() for file in self.kept if file.exists()} == files

    def must_go_on(self) -> None:
        before = len(self.shell.read("asked"))
        assert self.shell("resume", "R", check=0).out == "ticked\n"
        assert self.shell.read("ticks") == [str(n) for n in (*range(9), *range(8, 12))]
        assert len(self.shell.read("asked")) == before + 4
        self.shell("verify", check=0)


@pytest.fixture
def killed(shell: Shell) -> Killed:
    return Killed(shell)


def test_a_log_damaged_in_the_middle_is_refused_until_the_copy_is_back(killed: Killed) -> None:
    """H06. A flipped bit and zeros in a page, in a frame's header and in the log's header."""
    frames = (len(killed.kept[killed.log]) - HEADER) // FRAME
    middle = HEADER + frames // 2 * FRAME
    for offset, data in (
        (middle + 4000, None),
        (middle + FRAME_HEADER, bytes(PAGE)),
        (middle + 9, None),
        (middle, bytes(FRAME_HEADER)),
        (10, None),
        (0, bytes(HEADER)),
    ):
        killed.write(killed.log, offset, data)
        killed.must_be_refused(
            "write-ahead log" if offset < HEADER else f"(byte {middle} of the -wal file)", "store_error"
        )
    for argv in (("list",), ("show", "R"), ("history", "R"), ("cancel", "R")):
        assert killed.shell(*argv, "--json", check=4).error["code"] == "store_error"
    killed.restore()
    killed.must_go_on()


def test_a_log_whose_end_was_torn_is_told_and_the_run_goes_on(killed: Killed) -> None:
    """H06. The intent of the call in which the process died is lost, so the call is made as if for the first time."""
    killed.restore()
    killed.log.write_bytes(killed.kept[killed.log][:-100])
    assert "frames at the end" in killed.shell("verify", check=0).err
    resumed = killed.shell("resume", "R", check=0)
    assert resumed.out == "ticked\n"
    assert "at the end of the write-ahead log belong to no finished transaction" in resumed.err
    assert killed.shell("verify", "--json", check=0).record["ok"] is True


def middle_event(killed: Killed) -> Iterator[tuple[int, bytes | None]]:
    cells = event_cells(killed.main)
    cell = cells[len(cells) // 2]
    for name in ("payload", "digest", "salt"):
        column = cell.columns[name]
        yield column[len(column) // 2], None
    payload = cell.columns["payload"]
    yield payload[0], bytes(len(payload))


@pytest.fixture
def settled(killed: Killed) -> Killed:
    """Everything moved from the log into the store's file."""
    killed.restore()
    store = sqlite3.connect(killed.main)
    store.execute("pragma wal_checkpoint(truncate)")
    store.close()
    assert not killed.log.exists()
    killed.keep()
    return killed


def test_a_damaged_event_in_the_middle_of_the_file_is_refused_and_named(settled: Killed) -> None:
    """H06."""
    middle = len(event_cells(settled.main)) // 2
    for offset, data in list(middle_event(settled)):
        settled.write(settled.main, offset, data)
        settled.must_be_refused(f"run R, event {middle} (", "malformed_journal")
    settled.restore()
    settled.must_go_on()


def test_a_page_of_events_that_is_all_zeros_is_refused(settled: Killed) -> None:
    """H06."""
    middle = event_cells(settled.main)[len(event_cells(settled.main)) // 2]
    settled.write(settled.main, middle.place[0] // PAGE * PAGE, bytes(PAGE))
    settled.must_be_refused("", "malformed_journal", "store_error")
