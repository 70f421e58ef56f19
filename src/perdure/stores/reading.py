"""Reading a store: rows become envelopes only when they have the right types and stand in the right place."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import NoneType
from typing import Any

import apsw

from perdure.contracts.contract import content_digest
from perdure.errors import MalformedJournalError, PerdureError
from perdure.journal.envelope import Envelope
from perdure.ports import IndexRow, RunSummary, StoredRun
from perdure.stores.faults import translated
from perdure.stores.schema import EVENT_COLUMNS, SEQ_BITS, first_place

_COLUMN_TYPES: tuple[frozenset[type], ...] = (
    *map(frozenset, ((str,), (int,), (str,), (int,), (int,), (int,), (bytes,))),
    *map(frozenset, ((bytes, NoneType), (bytes, NoneType), (bytes,))),
)
DAMAGE = (
    *(apsw.CorruptError, apsw.NotADBError, apsw.FormatError, apsw.TooBigError, UnicodeDecodeError),
    apsw.SQLError,  # our own statements are right, so the tables are not what they were
)
"""What reading raises for a file whose content changed."""

_SUMMARY = f"""
select run.run_id, agent, phase, terminal_reason, park, wake_at, events, first.recorded_at, last.recorded_at,
    driver_id, epoch
from run
left join lease using (run_no)
left join event as first on first.rowid = run_no << {SEQ_BITS}
left join event as last on last.rowid = (run_no << {SEQ_BITS}) + events - 1
"""  # noqa: S608 - a number of ours
_RUNS = f"{_SUMMARY} where ?1 is null or run.run_id = ?1 order by first.recorded_at, run_no"
_RUN = f"{_SUMMARY} where run.run_no = ?2 and (?1 is null or run.run_id = ?1)"
_RUN_TYPES: tuple[tuple[type, ...], ...] = (
    *((str,), (str,), (str,), (str, NoneType), (str, NoneType), (int, NoneType)),
    *((int,), (int,), (int,), (str, NoneType), (int,)),
)

_ROWS_AT_ONCE = 500

EVERY_EVENT = f"select rowid, {EVENT_COLUMNS} from event"  # noqa: S608 - column names of ours
_RUN_EVENTS = f"{EVERY_EVENT} where rowid >= ? and rowid < ? order by rowid"


def row_problem(row: tuple[Any, ...], run_id: str, seq: int, place: int) -> str | None:
    """What is wrong with a row as the event of that run and seq, its chain apart; None when nothing is."""
    if row[0] != place:
        return f"event {seq} is missing"
    names = EVENT_COLUMNS.split(", ")
    wrong = [name for name, types, value in zip(names, _COLUMN_TYPES, row[1:], strict=True) if type(value) not in types]
    if wrong:
        return f"a value of a wrong type in {', '.join(wrong)}"
    if row[1] != run_id:
        return f"an event of run {row[1]} stands in this run"
    if row[2] != seq:
        return f"event {row[2]} stands in the place of event {seq}"
    return None


def kind_of(row: tuple[Any, ...], place: int) -> str | None:
    """The kind of the event in that place, as far as the row tells it."""
    return row[3] if row[0] == place and isinstance(row[3], str) else None


@contextmanager
def damage_named(run_id: str, seq: Callable[[], int | None]) -> Iterator[None]:
    """Damage met while reading becomes MalformedJournalError at the place reached."""
    try:
        yield
    except DAMAGE as error:
        raise MalformedJournalError(run_id, seq(), None, f"the row cannot be read ({error})") from error


@contextmanager
def snapshot(connection: apsw.Connection) -> Iterator[None]:
    """Everything read inside is of one moment."""
    connection.execute("begin")
    try:
        yield
    finally:
        with suppress(apsw.Error):  # of a damaged file; nothing was written that could be lost
            connection.execute("rollback")


def read_run(
    connection: apsw.Connection, path: Path, run_id: str, from_seq: int, most: int | None = None
) -> StoredRun | None:
    """One run's events from a seq on, at most so many; None for an unknown run.

    Raises:
        MalformedJournalError: an event is missing, out of place, unreadable, or has columns of wrong types.
        StoreError: the file cannot be read.
    """
    # In one transaction with the count, so that what others append meanwhile is in both or in neither.
    with translated(path), damage_named(run_id, lambda: None), snapshot(connection):
        found = _find_run(connection, run_id)
        if found is None:
            return None
        run_no, key, count = found
        place = first_place(run_no) + from_seq
        until = first_place(run_no + 1) if most is None else place + most
        try:
            events = _in_pieces(_rows(connection, place, until), run_id, from_seq, place)
        except (*DAMAGE, _NotInOrder):
            events = _row_by_row(connection, place, until, run_id, from_seq)
        expected = max(count, from_seq) if most is None else min(max(count, from_seq), from_seq + most)
        if from_seq + len(events) != expected:
            problem = f"the store counted {count} events, {from_seq + len(events)} are there"
            raise MalformedJournalError(run_id, min(count, from_seq + len(events)), None, problem)
    return StoredRun(run_id, key, events)


class _NotInOrder(Exception):
    """Some row is not what stands in its place; which one is found row by row."""


def _rows(connection: apsw.Connection, place: int, until: int) -> apsw.Cursor:
    return connection.execute(_RUN_EVENTS, (place, until))


def _in_pieces(rows: Iterator[tuple[Any, ...]], run_id: str, from_seq: int, place: int) -> tuple[Envelope, ...]:
    """The rows as envelopes, piece by piece: all at once, a long run would stand in memory twice."""
    events: list[Envelope] = []
    while piece := list(islice(rows, _ROWS_AT_ONCE)):
        events += _as_envelopes(piece, run_id, from_seq + len(events), place + len(events))
    return tuple(events)


def _as_envelopes(rows: list[tuple[Any, ...]], run_id: str, from_seq: int, place: int) -> Iterator[Envelope]:
    """Rows checked column by column: a third of the time of a check row by row."""
    places, *columns = zip(*rows, strict=True)
    in_order = (
        places == tuple(range(place, place + len(rows)))
        and set(columns[0]) == {run_id}
        and columns[1] == tuple(range(from_seq, from_seq + len(rows)))
        and all(types.issuperset(map(type, column)) for types, column in zip(_COLUMN_TYPES, columns, strict=True))
    )
    if not in_order:
        raise _NotInOrder
    return map(Envelope, *columns)


def _row_by_row(
    connection: apsw.Connection, place: int, until: int, run_id: str, from_seq: int
) -> tuple[Envelope, ...]:
    events: list[Envelope] = []
    with damage_named(run_id, lambda: from_seq + len(events)):
        for row in _rows(connection, place, until):
            seq, here = from_seq + len(events), place + len(events)
            problem = row_problem(row, run_id, seq, here)
            if problem is not None:
                raise MalformedJournalError(run_id, seq, kind_of(row, here), problem)
            events.append(Envelope(*row[1:]))
    return tuple(events)


def _find_run(connection: apsw.Connection, run_id: str) -> tuple[int, bytes, int] | None:
    query = "select run_no, key, events from run {how} left join lease using (run_no) where run_id = ?"
    found = connection.execute(query.format(how=""), (run_id,)).get
    if found is None:
        # Through the table itself: a damaged index must not make a run look as if it had never been.
        found = connection.execute(query.format(how="not indexed"), (run_id,)).get
        if found is not None:
            raise MalformedJournalError(run_id, None, None, "the index of run ids does not lead to it")
        return None
    if tuple(map(type, found)) != (int, bytes, int):
        raise MalformedJournalError(run_id, None, None, "the row of the run is damaged")
    return found  # type: ignore[no-any-return]


def list_runs(
    connection: apsw.Connection,
    path: Path,
    is_dead: Callable[[str], bool],
    run_id: str | None,
    problems: dict[str, PerdureError] | None = None,
) -> list[RunSummary]:
    """Every run, by the time it started, or the one run.

    Raises:
        MalformedJournalError: a row of the list is damaged. With `problems` it is put there, and the sound rows are
            listed all the same.
        StoreError: the file cannot be read.
    """
    alive: dict[str, bool] = {}

    def held(driver_id: str | None) -> bool:
        if driver_id is not None and driver_id not in alive:
            alive[driver_id] = not is_dead(driver_id)
        return driver_id is not None and alive[driver_id]

    with translated(path):
        try:
            with damage_named("?", lambda: None):
                # All rows at once: an error in the middle must not leave the connection inside a read.
                return [_summary(row, held) for row in connection.execute(_RUNS, (run_id,)).fetchall()]
        except MalformedJournalError:
            if problems is None:
                raise
        return _one_by_one(connection, run_id, held, problems)


def _summary(row: tuple[Any, ...], held: Callable[[str | None], bool]) -> RunSummary:
    if not all(isinstance(value, types) for value, types in zip(row, _RUN_TYPES, strict=True)):
        raise MalformedJournalError(_name(row), None, None, "its line in the list of runs is damaged")
    id, *index, events, started_at, updated_at, driver_id, epoch = row
    return RunSummary(id, IndexRow(*index), events, started_at, updated_at, held(driver_id), epoch)


def _name(row: Sequence[object]) -> str:
    return row[0] if isinstance(row[0], str) else "?"


def _one_by_one(
    connection: apsw.Connection,
    run_id: str | None,
    held: Callable[[str | None], bool],
    problems: dict[str, PerdureError],
) -> list[RunSummary]:
    """What reading them together stopped at is met again, but for one run alone."""
    summaries: list[RunSummary] = []
    numbers: list[int] = []
    try:
        with damage_named("?", lambda: None):
            numbers += (number for (number,) in connection.execute("select run_no from run not indexed"))
    except MalformedJournalError as error:
        problems["?"] = error
    for number in numbers:
        try:
            with damage_named(_name_of(connection, number), lambda: None):
                summaries += (_summary(row, held) for row in connection.execute(_RUN, (run_id, number)).fetchall())
        except MalformedJournalError as error:
            name = error.run_id if error.run_id != "?" else f"? (number {number})"
            problems[name] = error
    return sorted(summaries, key=lambda summary: summary.started_at)


def _name_of(connection: apsw.Connection, number: int) -> str:
    try:
        return _name((connection.execute("select run_id from run where run_no = ?", (number,)).get,))
    except DAMAGE:
        return "?"


def run_ids(connection: apsw.Connection, prefix: str) -> Iterator[object]:
    """Ids of runs that begin so, the latest first, as they stand there: of a damaged store they may be anything."""
    # Escaped: an underscore and a percent sign match anything in a pattern.
    pattern = "".join(f"\\{sign}" if sign in "%_\\" else sign for sign in prefix) + "%"
    query = "select run_id from run where run_id like ? escape '\\' order by run_no desc"
    return (run_id for (run_id,) in connection.execute(query, (pattern,)))


def read_artifact(connection: apsw.Connection, path: Path, run_id: str, digest: str) -> bytes | None:
    """The artifact's bytes, checked against their digest; None when there are none.

    Raises:
        MalformedJournalError: they do not match.
        StoreError: the file cannot be read.
    """
    with translated(path), damage_named(run_id, lambda: None):
        row = connection.execute(
            "select data, 0 from artifact join run using (run_no) where run_id = ? and digest = ?", (run_id, digest)
        ).get
    if row is None:
        return None
    data = row[0]
    if not isinstance(data, bytes) or content_digest(data) != digest:
        raise MalformedJournalError(run_id, None, None, f"the bytes of artifact {digest} do not match it")
    return data
