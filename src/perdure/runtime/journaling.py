"""The write side of one run: events are sealed in order, gathered, and handed on as pieces that become durable
together.

A completion may be queued without waiting: it reaches the sink at the next tick of the event loop at the latest, or
together with whatever is committed before that. So a turn with one call makes two commits.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from perdure.journal.envelope import SALT_BYTES, Envelope, seal
from perdure.journal.events import Event, payload_bytes
from perdure.journal.fold import RunState
from perdure.ports import Clock, Entropy, IndexRow

_SALTS_AT_ONCE = 64


class Sink(Protocol):
    """Where sealed events go, in order."""

    def append(self, envelopes: Sequence[Envelope], index: IndexRow | None) -> "asyncio.Future[None]":
        """The future is done once the events are durable; it fails when they are not."""


class ListJournal:
    """A sink that is a plain list: for embedding and tests. Nothing outlives the process; the chain is real."""

    def __init__(self) -> None:
        self.envelopes: list[Envelope] = []

    def append(self, envelopes: Sequence[Envelope], index: IndexRow | None) -> "asyncio.Future[None]":
        """Keeps the events."""
        self.envelopes.extend(envelopes)
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


async def until_done(work: "asyncio.Future[Any]") -> None:
    """Returns when the work is done, however it ended. A cancelled waiter leaves it as it is."""
    done = work.get_loop().create_future()
    work.add_done_callback(lambda _: None if done.done() else done.set_result(None))
    await done


def index_row(state: RunState) -> IndexRow:
    """The run's line in a list of runs."""
    return IndexRow(*state.index_row_fields())


class RunJournal:
    """Seals events onto a run's chain and folds them; the only way an event comes into being while a run is driven."""

    def __init__(
        self, state: RunState, head: bytes, sink: Sink, clock: Clock, entropy: Entropy, *, driving: bool = True
    ) -> None:
        self.state = state
        self._previous = head
        self._sink, self._clock, self._entropy = sink, clock, entropy
        self._index = index_row(state) if state.head is not None else None
        self._pending: list[Envelope] = []
        self._last: asyncio.Future[None] | None = None
        self._salts = b""
        self._opened = clock.steady_ns()
        self._driving = driving
        """False for events recorded outside a drive: they take no active time."""
        self._on_first: tuple[Event, ...] = ()
        self._scheduled = False
        self.failure: BaseException | None = None
        """What made the sink refuse; the drive is over then."""
        self.on_failure: Callable[[BaseException], None] | None = None
        self.on_durable: Callable[[], None] | None = None

    def begin_drive(self, *opening: Event) -> None:
        """Sets the events that open this drive; they are recorded with the first thing the drive records, so a drive
        that finds it cannot go on leaves the run as it was."""
        self._on_first = opening

    def active_ns(self) -> int:
        """Steady time since this drive began, in nanoseconds."""
        if not self._driving:
            return self.state.last_active_ns
        return self._clock.steady_ns() - self._opened

    def total_active_ns(self) -> int:
        """Active time of the run over all its drives, up to now, in nanoseconds."""
        if self._on_first:
            return self.state.spent.active_ns + self.active_ns()
        return self.state.active_before_ns + self.active_ns()

    def queue(self, event: Event) -> Envelope:
        """Seals an event and hands it on at the next tick at the latest."""
        if self.failure is not None:
            raise self.failure
        opening, self._on_first = self._on_first, ()
        for first in opening:
            self._seal(first)
        envelope = self._seal(event)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)
        return envelope

    def seal_apart(self, *events: Event) -> list[Envelope]:
        """Seals events that the caller stores itself (the head of a run, say) in place of the sink."""
        sealed = [self._seal(event) for event in events]
        self._pending.clear()
        self._index = index_row(self.state)
        return sealed

    async def commit(self) -> None:
        """Returns when everything queued is durable.

        Raises:
            LeaseLostError, StoreError: it is not, and this drive is over.
        """
        self._flush()
        last = self._last
        if last is not None and not last.done():
            try:
                await until_done(last)
            except asyncio.CancelledError:
                # Told to stop because the sink refused: say what it refused with.
                if self.failure is None:
                    raise
        if self.failure is not None:
            raise self.failure
        if last is not None:
            last.result()

    def _seal(self, event: Event) -> Envelope:
        envelope = seal(
            self._previous,
            self.state.run_id,
            self.state.events,
            event.event_kind,
            self._clock.now_ns(),
            self.active_ns(),
            self._salt(),
            payload_bytes(event),
        )
        self.state.advance(envelope, event)
        self._previous = envelope.digest
        self._pending.append(envelope)
        return envelope

    def _salt(self) -> bytes:
        if not self._salts:
            self._salts = self._entropy.draw(SALT_BYTES * _SALTS_AT_ONCE)
        salt, self._salts = self._salts[:SALT_BYTES], self._salts[SALT_BYTES:]
        return salt

    def _flush(self) -> None:
        self._scheduled = False
        if not self._pending:
            return
        piece, self._pending = self._pending, []
        row = index_row(self.state)
        changed = None if row == self._index else row
        self._index = row
        try:
            self._last = self._sink.append(piece, changed)
        except Exception as error:  # noqa: BLE001 - whatever a sink raises ends the drive
            self._failed(error)
            return
        self._last.add_done_callback(self._settled)

    def _settled(self, piece: "asyncio.Future[None]") -> None:
        error = None if piece.cancelled() else piece.exception()
        if error is not None:
            self._failed(error)
        elif self.on_durable is not None:
            self.on_durable()

    def _failed(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
            if self.on_failure is not None:
                self.on_failure(error)
