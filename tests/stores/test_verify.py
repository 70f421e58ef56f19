"""What `verify` and `read` say of a damaged file: never that all is well over an event that changed."""

import random
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.stores.raw_file import event_cells
from tests.stores.shapes import OpenStore

from perdure.clock import SystemClock, SystemEntropy
from perdure.errors import MalformedJournalError, PerdureError, StoreError, UnknownError
from perdure.journal.envelope import Envelope, check_chain
from perdure.ports import IndexRow
from perdure.stores.schema import EVENT_COLUMNS
from perdure.stores.sqlite import SqliteStore
from perdure.stores.verify import VerifyReport, verify
from perdure.testing.conformance import KEY, OPEN, PARKED, Chain, begun

RUNS = ("run-a", "run-b", "run-c")
TARGET = "run-b"
EVENTS = 36
NAMED = (0, 10, EVENTS - 1)
"""Seqs of the three events whose bytes are flipped: the first, one in the middle, the last."""


def fold(journal: Sequence[Envelope]) -> tuple[str | None, IndexRow]:
    """Stands in for the fold of the journal: every run of these tests has this line in the list."""
    return (None if journal[0].kind == "kind_0" else "the journal does not begin as it must"), OPEN


@pytest.fixture
async def sound(tmp_path: Path) -> Path:
    """A closed store with three runs and an artifact of each."""
    path = tmp_path / "sound.db"
    store = await SqliteStore.open(path, clock=SystemClock(), entropy=SystemEntropy())
    for run_id in RUNS:
        chain = Chain(run_id)
        lease = await store.create(run_id, KEY, chain.next(3), OPEN)
        await store.append(lease, chain.next(EVENTS - 3), None)
        await store.put_artifact(run_id, b"an artifact of " + run_id.encode())
    await store.close()
    return path


class Copies:
    """Damaged copies of a sound store, one at a time."""

    def __init__(self, sound: Path) -> None:
        self.sound, self.path = sound, sound.with_name("copy.db")
        self._data = sound.read_bytes()

    def size(self) -> int:
        return len(self._data)

    def flip(self, offset: int, bits: int) -> Path:
        data = bytearray(self._data)
        data[offset] ^= bits
        self._clear()
        self.path.write_bytes(data)
        return self.path

    def change(self, *statements: str, **values: Any) -> Path:
        self._clear()
        shutil.copy(self.sound, self.path)
        connection = sqlite3.connect(self.path)
        for statement in statements:
            connection.execute(statement, values)
        connection.commit()
        connection.close()
        return self.path

    def _clear(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)


@pytest.fixture
def copies(sound: Path) -> Copies:
    return Copies(sound)


async def report_of(path: Path) -> VerifyReport:
    return await verify(path, fold_problem=fold)


async def read_target(path: Path) -> str:
    """What reading the damaged run comes to: the head that its chain proves, or the refusal."""
    try:
        store = await SqliteStore.open(path, clock=SystemClock(), entropy=SystemEntropy(), read_only=True)
    except StoreError:
        return "the store is refused"
    try:
        stored = await store.read(TARGET)
        if stored is None:
            return "the run is unknown"
        return check_chain(TARGET, stored.envelopes).hex()
    except PerdureError as error:
        return type(error).__name__
    finally:
        await store.close()


async def test_a_sound_store_is_proven(sound: Path) -> None:
    """S-073."""
    report = await report_of(sound)
    assert (report.ok, report.runs, report.events) == (True, 3, 3 * EVENTS)
    assert (report.first_bad, report.projections) == (None, [])
    one = await verify(sound, fold_problem=fold, run_id=TARGET)
    assert (one.ok, one.runs, one.events, one.head) == (True, 1, EVENTS, await read_target(sound))


@pytest.mark.slow
async def test_each_flipped_byte_of_each_column_is_found_and_its_event_named(copies: Copies) -> None:
    """S-073, H06. A column that takes no bytes (0 and 1) lives in the record's header, which is flipped too."""
    cells = event_cells(copies.sound)[EVENTS : 2 * EVENTS]
    for seq in NAMED:
        for name, column in cells[seq].columns.items():
            for offset in column:
                report = await report_of(copies.flip(offset, 0xFF if offset % 2 else 0x01))
                assert not report.ok, (name, offset)
                assert report.first_bad is not None
                assert (report.first_bad.run_id, report.first_bad.seq) == (TARGET, seq), (name, offset)
                if offset == column[0]:
                    one = await verify(copies.path, run_id=TARGET)
                    assert (one.ok, one.first_bad and one.first_bad.seq) == (False, seq), (name, offset)
        for offset in (*cells[seq].header, *cells[seq].place):
            for bits in (0x01, 0x02, 0x80):
                assert not (await report_of(copies.flip(offset, bits))).ok, offset


@pytest.mark.slow
async def test_reading_refuses_each_flipped_byte_of_an_event_in_the_middle(copies: Copies) -> None:
    """H06."""
    cell = event_cells(copies.sound)[EVENTS + NAMED[1]]
    spots = [offset for column in (cell.place, cell.header, *cell.columns.values()) for offset in column]
    for offset in spots:
        assert await read_target(copies.flip(offset, 0x10)) == "MalformedJournalError", offset


async def any_other_byte(copies: Copies, offsets: Iterator[int]) -> None:
    sound = await report_of(copies.sound)
    head = await read_target(copies.sound)
    for offset in offsets:
        report = await report_of(copies.flip(offset, 0xFF if offset % 2 else 1 << offset // 2 % 8))
        if report.ok:
            assert (report.head, report.runs, report.events) == (sound.head, sound.runs, sound.events), offset
            assert await read_target(copies.path) == head, offset
        else:
            assert report.first_bad or report.projections, offset


def others(copies: Copies) -> list[int]:
    events = set()
    for cell in event_cells(copies.sound):
        for part in (cell.place, cell.header, *cell.columns.values()):
            events.update(part)
    return [offset for offset in range(copies.size()) if offset not in events]


@pytest.mark.slow
async def test_a_flipped_byte_elsewhere_is_damage_or_a_projection_or_changes_nothing(copies: Copies) -> None:
    """H06. All of the file's header, and a sample of the rest that leaves the empty space out for the most part."""
    data = copies.sound.read_bytes()
    chosen = random.Random(7)
    rest = [offset for offset in others(copies) if offset >= 100]
    filled = [offset for offset in rest if data[offset]]
    await any_other_byte(copies, iter([*range(100), *chosen.sample(filled, 250), *chosen.sample(rest, 50)]))


async def test_a_run_id_that_is_damaged_in_the_list_of_runs_or_its_index_is_found(copies: Copies) -> None:
    """H06. The index is not read by the walk over the events: the check of the file's structure finds it."""
    data, free = copies.sound.read_bytes(), set(others(copies))
    name = TARGET.encode()
    places = [at for at in range(len(data)) if at in free and data[at : at + len(name)] == name]
    head, found = await read_target(copies.sound), 0
    for at in places:
        if (await report_of(copies.flip(at, 0x01))).ok:
            assert await read_target(copies.path) == head  # a copy that an earlier split of the page left behind
        else:
            found += 1
    assert found >= 2


@pytest.mark.soak
async def test_every_flipped_byte_elsewhere_is_damage_or_a_projection_or_changes_nothing(copies: Copies) -> None:
    """H06. Every byte that is not zero, and each hundredth of the empty space."""
    data = copies.sound.read_bytes()
    await any_other_byte(copies, (at for at in others(copies) if data[at] or at % 100 == 0))


PLACE = "run_id = :run and seq = :seq"


@pytest.mark.parametrize(
    ("statements", "first"),
    [
        ([f"delete from event where {PLACE}"], 10),
        (["update event set seq = -1 - seq where run_id = :run and seq in (10, 11)"], 10),
        (["update event set seq = 21 - seq where run_id = :run and seq in (10, 11)"], 10),
        (["update event set run_id = 'run-a' where run_id = :run and seq = :seq"], 10),
        ([f"update event set payload = null where {PLACE}"], 10),
        ([f"update event set salt = payload where {PLACE}"], 10),
        ([f"update event set payload = cast(payload as text) where {PLACE}"], 10),
        ([f"update event set recorded_at = recorded_at + 0.5 where {PLACE}"], 10),
        ([f"update event set schema_version = 2 where {PLACE}"], 10),
        ([f"update event set kind = cast(x'ff' as text) where {PLACE}"], 10),
        ([f"update event set rowid = rowid + 1000000 where {PLACE}"], 10),
        (["delete from event where run_id = :run and seq >= 10"], 10),
        (["delete from event where run_id = :run"], 0),
    ],
)
async def test_a_row_that_was_tampered_with_is_named(copies: Copies, statements: list[str], first: int) -> None:
    """S-073, H06."""
    path = copies.change(*statements, run=TARGET, seq=10)
    report = await report_of(path)
    assert report.first_bad is not None
    assert (report.first_bad.run_id, report.first_bad.seq) == (TARGET, first)
    assert await read_target(path) == "MalformedJournalError"


async def test_two_swapped_rows_are_found(copies: Copies) -> None:
    path = copies.change(
        "update event set rowid = -rowid where run_id = :run and seq in (10, 11)",
        "update event set rowid = -rowid + 21 - 2 * seq where run_id = :run and seq in (10, 11)",
        run=TARGET,
    )
    report = await report_of(path)
    assert report.first_bad is not None
    assert (report.first_bad.run_id, report.first_bad.seq) == (TARGET, 10)


async def test_a_duplicated_row_is_found(copies: Copies) -> None:
    report = await report_of(copies.change(f"insert into event select * from event where {PLACE}", run=TARGET, seq=10))
    assert not report.ok
    assert report.first_bad is not None
    assert report.first_bad.seq is not None
    columns = EVENT_COLUMNS
    behind = copies.change(
        f"insert into event(rowid, {columns}) select max(rowid) + 1, {columns} from event where run_id = :run",
        run=TARGET,
    )
    report = await report_of(behind)
    assert report.first_bad is not None
    assert (report.first_bad.run_id, report.first_bad.seq) == (TARGET, EVENTS)


async def test_an_index_row_that_differs_from_the_fold_is_named(copies: Copies) -> None:
    report = await report_of(copies.change("update run set phase = 'completed' where run_id = :run", run=TARGET))
    assert (report.ok, report.first_bad, report.projections) == (False, None, [f"run {TARGET}"])
    assert report.head == (await report_of(copies.sound)).head


async def test_a_journal_that_the_fold_refuses_is_named(copies: Copies) -> None:
    def refusing(journal: Sequence[Envelope]) -> tuple[str | None, IndexRow]:
        if journal[0].run_id == TARGET:
            raise MalformedJournalError(TARGET, 4, "kind_1", "an event after the end")
        return None, OPEN

    report = await verify(copies.sound, fold_problem=refusing)
    assert report.first_bad is not None
    assert (report.first_bad.run_id, report.first_bad.seq) == (TARGET, 4)
    assert report.first_bad.problem == "an event after the end"


async def test_a_changed_table_definition_is_found(copies: Copies) -> None:
    """H06."""
    data = copies.sound.read_bytes()
    report = await report_of(copies.flip(data.index(b"run_no integer primary key") + 4, 0x01))
    assert not report.ok
    assert report.first_bad is not None


async def test_a_changed_artifact_is_found(copies: Copies) -> None:
    path = copies.change("update artifact set data = x'00' where run_no = 2")
    report = await report_of(path)
    assert report.first_bad is not None
    assert (report.first_bad.run_id, report.first_bad.seq) == (TARGET, None)
    store = await SqliteStore.open(path, clock=SystemClock(), entropy=SystemEntropy(), read_only=True)
    digest = await store._reader.read(lambda c: c.execute("select digest from artifact where run_no = 2").get)
    with pytest.raises(MalformedJournalError, match="artifact"):
        await store.get_artifact(TARGET, digest)
    await store.close()


async def test_a_head_kept_elsewhere_proves_that_nothing_was_cut_off(copies: Copies) -> None:
    whole = await verify(copies.sound, run_id=TARGET)
    everything = await verify(copies.sound)
    cut = copies.change(
        "delete from event where run_id = :run and seq >= 30",
        "update lease set events = 30 where run_no = 2",
        run=TARGET,
    )
    assert (await verify(cut)).ok
    for head in (whole.head, {TARGET: whole.head}):
        report = await verify(cut, run_id=TARGET, head=head)
        assert not report.ok
        assert report.first_bad is not None
        assert "cut off" in report.first_bad.problem
    assert not (await verify(cut, head=everything.head)).ok
    assert not (await verify(cut, head={TARGET: whole.head})).ok
    assert (await verify(copies.sound, head=everything.head)).ok


async def test_a_head_of_an_earlier_moment_still_proves_what_lies_before_it(open_store: OpenStore, path: Path) -> None:
    store = await open_store()
    chain, lease = await begun(store)
    earlier = (await verify(path, run_id="run-1")).head
    await store.append(lease, chain.next(3), None)
    assert (await verify(path, run_id="run-1", head=earlier)).ok


async def test_a_store_is_verified_while_it_is_written(open_store: OpenStore, path: Path) -> None:
    store = await open_store()
    chain, lease = await begun(store)
    writing = [store.append(lease, chain.next(2), None) for _ in range(40)]
    for _ in range(5):
        assert (await verify(path)).ok
    for piece in writing:
        await piece
    report = await verify(path)
    assert (report.ok, report.events) == (True, 82)


async def test_an_erased_payload_is_no_damage_and_the_rest_stays_proven(sound: Path) -> None:
    """S-073."""
    store = await SqliteStore.open(sound, clock=SystemClock(), entropy=SystemEntropy())
    erase = f"update event set salt = null, payload = null where {PLACE}"
    await store._submit(lambda c: c.execute(erase, {"run": TARGET, "seq": 10}).close())
    await store.close()
    report = await report_of(sound)
    assert (report.ok, report.events) == (True, 3 * EVENTS)


async def test_what_is_not_there_is_said_to_be_unknown(sound: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownError, match="there is no store"):
        await verify(tmp_path / "none.db")
    with pytest.raises(UnknownError, match="there is no such run"):
        await verify(sound, run_id="nobody")
    (tmp_path / "notes.txt").write_text("my notes\n" * 1_000)
    with pytest.raises(StoreError, match="not a Perdure store"):
        await verify(tmp_path / "notes.txt")


async def test_a_damaged_list_of_runs_is_an_error_that_names_the_run(copies: Copies) -> None:
    path = copies.change("update run set phase = x'00' where run_id = :run", run=TARGET)
    store = await SqliteStore.open(path, clock=SystemClock(), entropy=SystemEntropy(), read_only=True)
    with pytest.raises(MalformedJournalError, match=f"run {TARGET}: its line"):
        await store.runs()
    await store.close()


async def test_the_parked_line_is_compared_field_by_field(copies: Copies) -> None:
    report = await verify(copies.sound, fold_problem=lambda journal: (None, PARKED))
    assert report.projections == [f"run {run_id}" for run_id in RUNS]
