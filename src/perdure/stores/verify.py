"""Proves what a store holds: every event of every run, the file around them, and what is derived from them.

The file is walked from end to end, never searched: a search would believe the very structure that is to be proven. What it
cannot prove is that nothing was cut off by someone who also put the counts right; that takes a head kept elsewhere.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import apsw
import msgspec

from perdure.contracts.contract import canonical
from perdure.errors import MalformedJournalError, UnknownError
from perdure.journal.envelope import FIRST_PREVIOUS, Envelope, chain_problem
from perdure.ports import IndexRow
from perdure.stores import schema
from perdure.stores.faults import translated
from perdure.stores.leases import unknown_run
from perdure.stores.reading import EVERY_EVENT, DAMAGE, kind_of, row_problem
from perdure.stores.schema import SEQ_BITS, first_place
from perdure.stores.threads import in_thread

FoldProblem = Callable[[Sequence[Envelope]], tuple[str | None, IndexRow]]
"""Folds a whole journal: what is wrong with it (None when nothing is), and the line it has in a list of runs."""


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


class _Run(msgspec.Struct):
    """A run as its own rows tell, and what is known of it while the events are walked."""

    run_id: str
    index: IndexRow | None
    """None when its columns are damaged."""
    counted: int | None
    """Events the store counted while it appended; None when the count is damaged."""
    head: bytes = FIRST_PREVIOUS
    events: int = 0
    digests: frozenset[bytes] = frozenset()


class _Bad(Exception):
    def __init__(self, run_id: str | None, seq: int | None, kind: str | None, problem: str) -> None:
        self.first_bad = FirstBad(run_id, seq, kind, problem)
        super().__init__(problem)


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
        UnknownError: no such file, or no such run.
        StoreError: the file is another program's or a later release's, or cannot be read.
    """
    path = Path(path).resolve()  # noqa: ASYNC240 - of the file's own name; the file itself is read in a thread
    return await in_thread(lambda: _Verification(path, fold_problem, run_id, head).report())
