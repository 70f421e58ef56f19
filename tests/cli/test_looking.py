"""list, show, history and verify, as processes."""

import fcntl
import json
import os
import pty
import re
import sqlite3
import struct
import subprocess
import sys
import termios

import pytest
from tests.cli.shell import Shell, wait_until
from tests.stores.raw_file import event_cells

LISTED = ["run_id", "agent", "status", "terminal_reason", "park", "events", "started_at", "updated_at"]
RECORDED = ["run_id", "seq", "kind", "recorded_at", "active_ns", "schema_version", "payload", "digest"]
VERIFIED = ["ok", "runs", "events", "head", "first_bad", "projections"]
RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z")


@pytest.mark.slow
def test_list_prints_a_line_a_run(shell: Shell) -> None:
    """C30."""
    shell("run", "adding.toml", "--input", "x", "--run-id", "done", check=0)
    shell("run", "asking.toml", "--input", "x", "--run-id", "waits", check=3)
    shell.killed_in_a_booking("doubtful")
    listed = {line["run_id"]: line for line in shell("list", "--json", check=0).lines}
    assert all(list(line) == LISTED for line in listed.values())
    assert all(RFC3339.fullmatch(line["started_at"]) for line in listed.values())
    ends = {run_id: (line["status"], line["terminal_reason"], line["park"]) for run_id, line in listed.items()}
    assert ends == {
        "done": ("completed", "final", None),
        "waits": ("parked", None, "suspended"),
        "doubtful": ("parked", None, "needs_reconciliation"),
    }
    lines = shell("list", check=0).out.splitlines()
    assert lines[0].split() == ["RUN", "AGENT", "STATUS", "REASON", "EVENTS", "STARTED", "UPDATED"]
    assert [line.split()[:4] for line in lines[1:]] == [
        ["done", "adding", "completed", "final"],
        ["waits", "asking", "parked", "suspended"],
        ["doubtful", "booking", "parked", "needs_reconciliation"],
    ]


def test_a_driven_run_is_seen_running_with_its_open_call(shell: Shell) -> None:
    """O1, S-063."""
    shell.hold()
    process = shell.start("run", "booking.toml", "--input", "go", "--run-id", "R")
    wait_until(lambda: shell.read("effects") == ["one"])
    shown = shell("show", "R", "--json", check=0).record
    assert (shown["status"], shown["lease"]["held"], shown["park"], shown["doubts"]) == ("running", True, None, [])
    assert [(call["call"], call["tool"], call["attempt"]) for call in shown["open_calls"]] == [("1.0", "book", 1)]
    assert shell("list", "--json", check=0).record["status"] == "running"
    assert "1.0 book, attempt 1" in shell("show", "R", check=0).out
    process.kill()
    process.communicate()
    shown = shell("show", "R", "--json", check=0).record
    assert (shown["status"], shown["park"]["kind"]) == ("parked", "needs_reconciliation")
    assert shown["doubts"] == [{"call": "1.0", "tool": "book", "arguments": {"what": "one"}, "key": None}]
    assert "in doubt:\n  1.0 book" in shell("show", "R", check=0).out


def test_history_prints_every_event_with_its_place_in_the_chain(shell: Shell) -> None:
    """S-062."""
    shell("run", "adding.toml", "--input", "x", "--run-id", "R", check=0)
    records = shell("history", "R", "--json", check=0).lines
    assert all(list(record) == RECORDED for record in records)
    assert [record["seq"] for record in records] == list(range(len(records)))
    assert all(RFC3339.fullmatch(record["recorded_at"]) for record in records)
    assert records[-1]["digest"] == shell("verify", "R", "--json", check=0).record["head"]
    lines = shell("history", "R", check=0).out.splitlines()
    assert [line.split()[2] for line in lines] == [record["kind"] for record in records]


@pytest.mark.slow
def test_looking_changes_no_byte_of_the_store(shell: Shell) -> None:
    shell("run", "adding.toml", "--input", "x", "--run-id", "R", check=0)
    store, drivers = shell.folder / "perdure.db", shell.folder / "perdure.db.drivers"
    before = store.read_bytes(), sorted(drivers.iterdir())
    for argv in (("list",), ("show", "R"), ("history", "R"), ("verify",)):
        shell(*argv, check=0)
    assert (store.read_bytes(), sorted(drivers.iterdir())) == before


@pytest.mark.slow
def test_what_a_model_wrote_cannot_steer_a_terminal(shell: Shell) -> None:
    """O7, D-026."""
    argv = ("run", "steering.toml", "--input", "\x1b]0;title\x07 go", "--run-id", "R")
    assert shell(*argv, check=0).out == "\\x1b[31mred\\x1b[0m\\x07 \\x9b2J \\u202eright\nsecond line\n"
    for look in (("show", "R"), ("history", "R"), ("list",)):
        for output_form in ((), ("--json",)):
            out = shell(*look, *output_form, check=0).out
            assert re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out) is None
    record = shell("show", "R", "--json", check=0).record
    assert record["answer"] == "\x1b[31mred\x1b[0m\x07 \x9b2J \u202eright\nsecond line"


def on_a_terminal(shell: Shell, *argv: str) -> str:
    """What a person sees of a command, in a window of 100 columns."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    environment = shell.environment | {"TERM": "xterm-256color"}
    command = [sys.executable, "-m", "perdure.cli", *argv]
    process = subprocess.Popen(command, cwd=shell.folder, env=environment, stdin=child, stdout=child, stderr=child)
    os.close(child)
    seen = b""
    try:
        while piece := os.read(parent, 65536):
            seen += piece
    except OSError:  # how Linux tells that the other end is closed
        assert seen
    finally:
        os.close(parent)
    assert process.wait(30) == 0, seen
    return seen.decode().replace("\r\n", "\n")


def test_a_terminal_gets_progress_and_colour_and_a_pipe_neither(shell: Shell) -> None:
    seen = on_a_terminal(shell, "run", "adding.toml", "--input", "x", "--run-id", "R")
    told = [line.split()[2] for line in seen.splitlines() if re.match(r" +\d+  ", line)]
    assert told == shell.kinds("R")
    assert seen.splitlines()[-1] == "three"
    assert "\x1b[" in on_a_terminal(shell, "list")
    shell.environment["FORCE_COLOR"] = "1"
    assert "\x1b" not in shell("list", check=0).out
    assert "\x1b" not in shell("--help", check=0).out


@pytest.mark.slow
def test_verify_proves_a_sound_store(shell: Shell) -> None:
    """S-073, O11."""
    for run_id in ("one", "two"):
        shell("run", "adding.toml", "--input", "x", "--run-id", run_id, check=0)
    report = shell("verify", "--json", check=0).record
    assert list(report) == VERIFIED
    assert (report["ok"], report["runs"], report["first_bad"], report["projections"]) == (True, 2, None, [])
    assert report["events"] == len(shell.kinds("one")) + len(shell.kinds("two"))
    one = shell("verify", "one", "--json", check=0).record
    assert (one["runs"], one["events"]) == (1, len(shell.kinds("one")))
    assert "proven: 2 runs" in shell("verify", check=0).out


@pytest.mark.slow
def test_a_journal_cut_off_is_found_against_a_head_kept_elsewhere(shell: Shell) -> None:
    """S-073, H06."""
    shell("run", "adding.toml", "--input", "x", "--run-id", "R", check=0)
    head = shell("verify", "R", "--json", check=0).record["head"]
    shell("verify", "R", "--head", head, check=0)
    store = sqlite3.connect(shell.folder / "perdure.db", isolation_level=None)
    store.execute("delete from event where seq = (select max(seq) from event)")
    store.execute("update lease set events = events - 1")  # whoever cut it off also put the counts right
    store.execute("update run set phase = 'open', terminal_reason = null")
    store.close()
    assert shell("verify", "R", "--json", check=0).record["ok"] is True
    cut = shell("verify", "R", "--head", head, "--json", check=4)
    assert cut.record["ok"] is False
    assert "cut off" in cut.record["first_bad"]["problem"]
    assert "cut off" in cut.err


@pytest.mark.slow
def test_a_projection_that_differs_is_named(shell: Shell) -> None:
    """O11, C13."""
    shell("run", "adding.toml", "--input", "x", "--run-id", "R", check=0)
    store = sqlite3.connect(shell.folder / "perdure.db", isolation_level=None)
    store.execute("update run set phase = 'failed'")
    store.close()
    found = shell("verify", "--json", check=4)
    assert (found.record["ok"], found.record["first_bad"]) == (False, None)
    assert "R" in found.record["projections"][0]
    assert "R" in found.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("update run set phase = x'00' where run_id = 'bad'", "its line in the list of runs is damaged"),
        ("update event set payload = x'00' where run_id = 'bad' and seq = 2", "event 2"),
        ("update lease set events = events - 1 where run_no = (select run_no from run where run_id = 'bad')", "events"),
        ("update event set recorded_at = 'x' where run_id = 'bad' and seq = 0", "its line"),
    ],
)
def test_a_damaged_run_is_named_in_the_end_and_the_sound_ones_are_listed(shell: Shell, damage: str, says: str) -> None:
    """H06. Exit 4 all the same: somebody must look."""
    for run_id in ("one", "bad", "two"):
        shell("run", "adding.toml", "--input", "x", "--run-id", run_id, check=0)
    store = sqlite3.connect(shell.folder / "perdure.db", isolation_level=None)
    # An open run's line says no more than its journal, so that is read.
    store.execute("update run set phase = 'open' where run_id = 'bad'")
    store.execute(damage)
    store.close()
    listed = shell("list", "--json", check=4)
    assert [line["run_id"] for line in listed.lines] == ["one", "two"]
    assert listed.error["code"] == "malformed_journal"
    assert "run bad" in listed.error["where"]
    assert says in listed.error["message"]
    listed = shell("list", check=4)
    assert [line.split()[0] for line in listed.out.splitlines()] == ["RUN", "one", "two"]
    assert "run bad" in listed.err
    assert shell("show", "one", "--json", check=0).record["status"] == "completed"


@pytest.mark.slow
def test_a_page_of_the_file_that_is_zeros_keeps_no_other_run_from_being_listed(shell: Shell) -> None:
    """H06."""
    for run_id in ("one", "bad", "two"):
        shell("run", "counting.toml", "--input", "x", "--run-id", run_id, check=0)
    path = shell.folder / "perdure.db"
    data = bytearray(path.read_bytes())
    cells = event_cells(path)
    begin = cells[len(cells) // 3].place[0] // 8192 * 8192  # with the first events of the second run
    data[begin : begin + 8192] = bytes(8192)
    path.write_bytes(data)
    listed = shell("list", "--json", check=4)
    assert {"one", "two"} >= {line["run_id"] for line in listed.lines} >= {"two"}
    assert "run bad" in listed.err


@pytest.mark.slow
def test_the_store_is_named_before_or_behind_the_verb_or_in_the_environment(shell: Shell) -> None:
    shell("--store", "sqlite:a.db", "run", "adding.toml", "--input", "x", "--run-id", "a", check=0)
    shell("run", "adding.toml", "--input", "x", "--run-id", "b", "--store", "sqlite:b.db", check=0)
    assert not (shell.folder / "perdure.db").exists()
    assert shell("list", "--store", "sqlite:a.db", "--json", check=0).record["run_id"] == "a"
    shell.environment["PERDURE_STORE"] = "sqlite:b.db"
    assert shell("list", "--json", check=0).record["run_id"] == "b"
    assert shell("--store", "sqlite:a.db", "list", "--json", check=0).record["run_id"] == "a"


def test_help_loads_nothing_heavy(shell: Shell) -> None:
    program = (
        "import sys\nfrom perdure.cli.entry import run\ncode = run(['--help'])\n"
        "heavy = {'apsw', 'pydantic', 'rich', 'msgspec', 'openai', 'jsonschema', 'perdure.engine'}\n"
        "print(sorted(heavy & set(sys.modules)), code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=shell.environment, cwd=shell.folder, capture_output=True, check=True
    )
    assert done.stdout.decode().splitlines()[-1] == "[] 0"


@pytest.mark.slow
def test_a_store_that_is_not_there_exits_2_naming_it_and_is_not_made(shell: Shell) -> None:
    for argv in (
        ("list",),
        ("show", "R"),
        ("history", "R"),
        ("verify",),
        ("resume", "R"),
        ("recover",),
        ("cancel", "R"),
    ):
        refused = shell(*argv, "--store", "sqlite:nowhere.db", "--json", check=2)
        assert refused.error["code"] == "unknown"
        assert "nowhere.db" in refused.error["where"]
    assert list(shell.folder.glob("nowhere.db*")) == []


def test_json_records_are_one_a_line(shell: Shell) -> None:
    shell("run", "steering.toml", "--input", "a\nb", "--run-id", "R", check=0)
    out = shell("history", "R", "--json", check=0).out
    assert [json.loads(line)["seq"] for line in out.splitlines()] == list(range(len(shell.kinds("R"))))
