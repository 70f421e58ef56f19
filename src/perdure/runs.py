"""A run as its users hold it, and the driving of it by this process."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from perdure.contracts.outcomes import Outcome
from perdure.errors import MalformedJournalError
from perdure.journal import events as ev
from perdure.journal.envelope import FIRST_PREVIOUS, Envelope, check_chain
from perdure.journal.fold import RunState, fold, fold_on
from perdure.journal.render import outcome_of
from perdure.ports import IndexRow, Lease, Store, StoredRun
from perdure.runtime.drive import Drive
from perdure.runtime.journaling import index_row

_PIECE = 2000
"""Events read at a time: what is proven and decoded while the processor still has it at hand."""


def indexed(envelopes: Sequence[Envelope]) -> tuple[str | None, IndexRow]:
    """What the list of runs must say of a whole journal, for `verify`. One that cannot be folded raises, and is named
    by the proof."""
    state, _ = fold(envelopes[0].run_id, envelopes)
    return None, index_row(state)


class Following:
    """A run read while it grows: each piece is proven to follow the one before, and folded."""

    def __init__(self, run_id: str) -> None:
        self.state = RunState(run_id)
        self.head = FIRST_PREVIOUS

    def take(self, envelopes: Sequence[Envelope]) -> list[ev.Event]:
        """Takes the next events; returns them decoded.

        Raises:
            MalformedJournalError: they do not follow.
        """
        self.head = check_chain(self.state.run_id, envelopes, previous=self.head, first=self.state.events)
        return fold_on(self.state, envelopes)


class RunHost(Protocol):
    """What a handle asks of the engine that gave it."""

    async def read(self, run_id: str, from_seq: int = 0, most: int | None = None) -> StoredRun:
        """The stored events from a seq on, at most so many."""

    async def outcome(self, run_id: str) -> Outcome:
        """How a run ended, or where it stands."""

    async def cancel(self, run_id: str, reason: str | None = None, *, by: str | None = None) -> None:
        """Ends the run as cancelled."""

    def driving(self, run_id: str) -> "Driving | None":
        """The driving of the run by this process, while it lasts."""


class LeasedSink:
    """The store, for the one run a lease is for."""

    def __init__(self, store: Store, lease: Lease) -> None:
        self._store, self.lease = store, lease

    def append(self, envelopes: Sequence[Envelope], index: IndexRow | None) -> "asyncio.Future[None]":
        """Hands the piece on under the lease."""
        return self._store.append(self.lease, envelopes, index)


class Run:
    """A handle on one run: leave it and rejoin it at will."""

    def __init__(self, host: RunHost, run_id: str, driving: "Driving | None") -> None:
        self._host, self._driving = host, driving
        self.id = run_id

    async def wait(self) -> Outcome:
        """The outcome once this process stops driving the run: ended, or parked.

        Raises:
            RefusedError: the drive was refused, or its loop stopped inside a call (`LoopStoppedError`); the run is
                as it was.
        """
        driving = self._present()
        if driving is None:
            return await self._host.outcome(self.id)
        await asyncio.shield(driving.task)
        if driving.drive.state.end is not None:
            return outcome_of(driving.drive.state)
        # It stopped short of its end, and may have been settled since.
        return await self._host.outcome(self.id)

    def _present(self) -> "Driving | None":
        """The driving that is under way now, else the one this handle came from."""
        present = self._host.driving(self.id)
        if present is not None:
            self._driving = present
        return self._driving

    async def events(self, from_seq: int = 0) -> AsyncIterator[Envelope]:
        """History from a seq on, then live, until this process stops driving the run. Only what is durable is shown."""
        while True:
            driving = self._present()
            finished = driving is None or driving.task.done()
            news = None if driving is None else driving.news
            stored = await self._host.read(self.id, from_seq)
            for envelope in stored.envelopes:
                yield envelope
            from_seq += len(stored.envelopes)
            if finished or driving is None or news is None:
                return
            if not stored.envelopes:
                await driving.until(news)

    async def cancel(self, reason: str | None = None, *, by: str | None = None) -> None:
        """Ends the run: what is in flight is told to stop, and every call gets one observation."""
        await self._host.cancel(self.id, reason, by=by)


class Driving:
    """One run this process drives."""

    def __init__(self, drive: Drive, own_model: bool) -> None:
        self.drive = drive
        self.own_model = own_model
        """Whether the client was made for this drive, and so is closed with it."""
        self.task: asyncio.Task[None]
        self.begun = False
        """Whether the task has taken its first step."""
        self._news: asyncio.Event | None = None

    @property
    def news(self) -> asyncio.Event:
        """Set, and replaced by a new one, when something becomes durable: each reader waits for the one it saw."""
        if self._news is None:
            self._news = asyncio.Event()
        return self._news

    def durable(self) -> None:
        """Something became durable."""
        news, self._news = self._news, None
        if news is not None:
            news.set()

    async def until(self, news: asyncio.Event) -> None:
        """Returns when something has become durable since `news` was taken, or the drive is over."""
        waiting = asyncio.ensure_future(news.wait())
        try:
            await asyncio.wait({waiting, self.task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()

    def cancel(self, request: ev.CancelRequested) -> None:
        """Tells the drive to end the run as cancelled, and stops what runs. Said twice, the first time counts."""
        if self.drive.cancel_requested is None:
            self.drive.cancel_requested = request
            # What is latched or has ended is unwinding already: cut off now, it could not even say how it ended.
            if self.drive.latch is None and self.drive.state.end is None:
                self._stop()

    def fail(self, error: BaseException) -> None:
        """Nothing of this drive counts any more: stop what runs."""
        if self.drive.latch is None:
            self.drive.latch = error
        self._stop()

    def _stop(self) -> None:
        # A task that is cancelled before its first step never runs, and would neither record the end nor give the lease
        # back; one that has not begun meets the request at its first safe point.
        if self.begun and not self.task.done():
            self.task.cancel()


@dataclass(frozen=True)
class Proven:
    """A stored run whose chain holds, folded."""

    state: RunState
    events: list[ev.Event]
    head: bytes
    key: bytes


async def prove(host: RunHost, run_id: str) -> Proven:
    """The run, once its chain holds and its events follow each other.

    Read piece by piece: at once, a long run would stand in memory twice, and everything else that this process drives
    would wait for it.

    Raises:
        UnknownError: no such run.
        MalformedJournalError: they do not, or there are none.
    """
    following, events = Following(run_id), list[ev.Event]()
    while True:
        stored = await host.read(run_id, len(events), _PIECE)
        events += following.take(stored.envelopes)
        if len(stored.envelopes) < _PIECE:
            break
    if not events:
        raise MalformedJournalError(run_id, None, None, "the journal has no head")
    return Proven(following.state, events, following.head, stored.key)
