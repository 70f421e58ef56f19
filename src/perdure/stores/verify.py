"""Proves what a store holds: every event of every run, the file around them, and what is derived from them.

The file is walked from end to end, never searched: a search would believe the very structure that is to be proven.
What it cannot prove is that nothing was cut off by someone who also put the counts right; that takes a head kept
elsewhere.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import apsw
import msgspec

from perdure.contracts.contract import content_digest, value_digest
from perdure.errors import MalformedJournalError, StoreError
from perdure.journal.envelope import FIRST_PREVIOUS, Envelope, chain_problem
from perdure.ports import IndexRow
from perdure.stores import schema, wal
from perdure.stores.faults import translated
from perdure.stores.leases import unknown_run
from perdure.stores.reading import DAMAGE, EVERY_EVENT, kind_of, row_problem, snapshot
from perdure.stores.schema import SEQ_BITS, first_place
from perdure.stores.threads import in_thread

FoldProblem = Callable[[Sequence[Envelope]], tuple[str | None, IndexRow]]
"""Folds a whole journal: what is wrong with it (None when nothing is), and the line it has in a list of runs."""


_SEQ_MASK = (1 << SEQ_BITS) - 1


class FirstBad(msgspec.Struct, frozen=True):
    """The first thing that is wrong. What cannot be told is None."""

    run_id: str | None
    seq: int | None
    kind: str | None
    problem: str


class VerifyReport(msgspec.Struct, frozen=True):
    """What a verification found."""

    ok: bool
    """Whether everything looked at is proven, projections included."""
    runs: int
    events: int
    head: str
    """In hex. For one run the digest of its last event; for all runs the SHA-256 of the canonical JSON of all pairs of
    run id and head, sorted."""
    first_bad: FirstBad | None
    projections: list[str]
    """What is derived and differs from what it is derived from, as `run RUN_ID`."""
    torn: int = 0
    """Frames at the end of the write-ahead log that belong to no finished transaction. No damage: what was confirmed
    is not among them. While others write, they may be of the transaction under way."""


class _Run(msgspec.Struct):
    """A run as its own rows tell, and what the walk found of it."""

    run_id: str
    index: tuple[Any, ...]
    """The columns of its line in the list of runs."""
    counted: object
    """How many events the store counted while it appended."""
    events: int = 0
    head: bytes = FIRST_PREVIOUS
    digests: set[str] = set()
    """Of its events, in hex; kept only when a head is to be looked for."""


async def verify(
    path: str | Path,
    *,
    fold_problem: FoldProblem | None = None,
    run_id: str | None = None,
    head: str | Mapping[str, str] | None = None,
) -> VerifyReport:
    """Verifies all runs of the store in `path`, or one. Others may write meanwhile; one moment is looked at.

    `head` is what was kept elsewhere. For one run it is proven to be the digest of one of its events, so nothing up to
    that event was cut off or changed; for all runs it must be the report's `head`. A mapping gives heads by run id.

    Raises:
        ConfigurationError: the path names no file, or its symbolic links lead in a circle.
        UnknownError: no such file, or no such run.
        StoreError: the file is another program's or a later release's, or cannot be read.
    """
    file = schema.store_file(path)
    return await in_thread(lambda: _verify(file, fold_problem, run_id, head))


def _verify(
    path: Path, fold_problem: FoldProblem | None, run_id: str | None, head: str | Mapping[str, str] | None
) -> VerifyReport:
    schema.must_be_a_file(path)
    try:
        connection = schema.open_for_reading(path)
    except StoreError as error:
        if isinstance(error.__cause__, apsw.ReadOnlyError):  # nothing was read, so nothing is known of the file
            raise
        problem = schema.header_damage(path)
        if problem is None:
            raise
        return VerifyReport(False, 0, 0, _head_of_all([]), FirstBad(None, None, None, problem), [])
    try:
        log = wal.inspect(connection, path)
        with translated(path), snapshot(connection):
            report = _Walk(connection, path, fold_problem, run_id, head, log).report()
    finally:
        connection.close()
    return report


class _Walk:
    """One walk over the file; keeps the first thing that is wrong and goes on as far as the file can be read."""

    def __init__(
        self,
        connection: apsw.Connection,
        path: Path,
        fold_problem: FoldProblem | None,
        run_id: str | None,
        head: str | Mapping[str, str] | None,
        log: wal.LogReport,
    ) -> None:
        self._connection, self._path, self._fold, self._only, self._expected = (
            connection,
            path,
            fold_problem,
            run_id,
            head,
        )
        self._torn = log.torn
        # First, because what is read after it may be an older state that is whole in itself.
        self._first_bad = None if log.damage is None else FirstBad(None, None, None, log.damage)
        self._projections: list[str] = []
        self._events = 0
        self._last_place: int | None = None
        self._runs: dict[int, _Run] = {}

    def report(self) -> VerifyReport:
        try:
            self._runs = self._read_runs()
            self._walk_events()
            self._check_counts()
            self._walk_artifacts()
        except DAMAGE as error:
            self._bad(*self._reached(), None, f"the file cannot be read on from here ({error})")
        self._check_structure()
        runs = list(self._runs.values())
        head = runs[0].head.hex() if self._only is not None and runs else _head_of_all(runs)
        self._check_heads(head)
        ok = self._first_bad is None and not self._projections
        return VerifyReport(ok, len(runs), self._events, head, self._first_bad, self._projections, self._torn)

    def _bad(self, run_id: str | None, seq: int | None, kind: str | None, problem: str) -> None:
        if self._first_bad is None:
            self._first_bad = FirstBad(run_id, seq, kind, problem)

    def _read_runs(self) -> dict[int, _Run]:
        counted = dict(self._connection.execute("select rowid, events from lease"))
        query = "select rowid, run_id, agent, phase, terminal_reason, park, wake_at from run not indexed"
        runs = {}
        for run_no, run_id, *index in self._connection.execute(query):
            if self._only is None or run_id == self._only:
                runs[run_no] = _Run(str(run_id), tuple(index), counted.get(run_no))
        if self._only is not None and not runs:
            raise unknown_run(self._only, self._path)
        return runs

    def _walk_events(self) -> None:
        if self._only is None:
            rows = self._connection.execute(f"{EVERY_EVENT} not indexed")
        else:
            # The count proves that the search for the run's place missed nothing.
            (run_no,) = self._runs
            places = (first_place(run_no), first_place(run_no + 1))
            rows = self._connection.execute(f"{EVERY_EVENT} where rowid >= ? and rowid < ? order by rowid", places)
        self._last_place = first_place(min(self._runs, default=0)) - 1
        for run_no, group in groupby(self._noted(rows), key=lambda row: row[0] >> SEQ_BITS):
            run = self._runs.get(run_no)
            if run is None or run.events:
                self._walk_strays(group)
            else:
                self._walk_run(run_no, run, group)

    def _noted(self, rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        for row in rows:
            self._last_place = row[0]
            yield row

    def _reached(self) -> tuple[str | None, int | None]:
        """Run and seq of the event that should follow the last one read."""
        if self._last_place is None:
            return None, None
        run_no, seq = (self._last_place + 1) >> SEQ_BITS, (self._last_place + 1) & _SEQ_MASK
        run = self._runs.get(run_no)
        if run is None or seq == run.counted:
            run, seq = next(((self._runs[no], 0) for no in sorted(self._runs) if no > run_no), (None, 0))
        return (None, None) if run is None else (run.run_id, seq)

    def _walk_strays(self, group: Iterable[tuple[Any, ...]]) -> None:
        for row in group:
            self._events += 1
            run_id, seq = str(row[1]), row[0] & _SEQ_MASK
            self._bad(run_id, seq, kind_of(row, row[0]), "the event stands where no run's events belong")

    def _walk_run(self, run_no: int, run: _Run, group: Iterable[tuple[Any, ...]]) -> None:
        journal: list[Envelope] = []
        sound = True
        for row in group:
            self._events += 1
            run.events += 1
            if sound:
                seq, place = len(journal), first_place(run_no) + len(journal)
                problem = row_problem(row, run.run_id, seq, place) or _content_problem(run, Envelope(*row[1:]))
                if problem is not None:
                    sound = False
                    self._bad(run.run_id, seq, kind_of(row, place), problem)
                    continue
                journal.append(Envelope(*row[1:]))
                run.head = journal[-1].digest
                if self._expected is not None:
                    run.digests.add(run.head.hex())
        if sound:
            self._check_fold(run, journal)

    def _check_fold(self, run: _Run, journal: list[Envelope]) -> None:
        if self._fold is None:
            return
        last = journal[-1]
        try:
            problem, index = self._fold(journal)
        except MalformedJournalError as error:
            self._bad(run.run_id, error.seq, error.kind, error.problem)
            return
        if problem is not None:
            self._bad(run.run_id, last.seq, last.kind, problem)
        elif run.index != msgspec.structs.astuple(index):
            self._projections.append(f"run {run.run_id}")

    def _check_counts(self) -> None:
        for run in self._runs.values():
            if run.counted != run.events:
                seq = min(run.counted, run.events) if isinstance(run.counted, int) else run.events
                problem = f"the store counted {run.counted} events, {run.events} are there"
                self._bad(run.run_id, max(seq, 0), None, problem)

    def _walk_artifacts(self) -> None:
        self._last_place = None
        for run_no, digest, data in self._connection.execute("select run_no, digest, data from artifact not indexed"):
            if self._only is not None and run_no not in self._runs:
                continue
            run = self._runs.get(run_no)
            if run is None or not isinstance(data, bytes) or content_digest(data) != digest:
                owner = None if run is None else run.run_id
                self._bad(owner, None, None, f"the bytes of artifact {digest} do not match it")

    def _check_structure(self) -> None:
        try:
            problem = schema.definition_damage(self._connection)
            if problem is None and self._only is None:
                lines = [str(line) for (line,) in self._connection.execute("pragma integrity_check(3)")]
                problem = None if lines == ["ok"] else "; ".join(lines)
        except DAMAGE as error:
            problem = str(error)
        if problem is not None:
            self._bad(None, None, None, f"the file's structure is damaged ({problem})")

    def _check_heads(self, head: str) -> None:
        expected = self._expected
        if expected is None:
            return
        if isinstance(expected, str):
            if self._only is None:
                if expected != head:
                    self._bad(None, None, None, f"the head is not {expected}")
                return
            expected = {self._only: expected}
        digests = {run.run_id: run.digests for run in self._runs.values()}
        for run_id, wanted in expected.items():
            if wanted not in digests.get(run_id, ()):
                self._bad(run_id, None, None, f"no event has the digest {wanted}: events were cut off or replaced")


def _content_problem(run: _Run, event: Envelope) -> str | None:
    problem = chain_problem(run.head, run.run_id, event.seq, event)
    if problem is None and event.payload is not None:
        try:
            msgspec.json.decode(event.payload)
        except msgspec.DecodeError as error:
            return f"the payload is not JSON ({error})"
    return problem


def _head_of_all(runs: Iterable[_Run]) -> str:
    return value_digest(sorted((run.run_id, run.head.hex()) for run in runs))
