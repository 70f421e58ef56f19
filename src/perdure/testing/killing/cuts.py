"""Where a crash test kills: behind every event that becomes durable, at the end of every tool's function, and in its
midst."""

import asyncio
import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from perdure.calls import CallContext
from perdure.journal.envelope import Envelope
from perdure.ports import IndexRow, Lease, Store

_SHORTEST_MIDST_MS = 4.0
"""A function that takes less than that is not killed in its midst: the moment could not be met."""


class Event(msgspec.Struct, frozen=True):
    """One event of the undisturbed run, as far as cuts go by it."""

    kind: str
    call: str | None
    tool: str | None


class Cut(msgspec.Struct, frozen=True):
    """One moment to kill at. Ordered as the run goes."""

    events: int
    """How many events are durable then."""
    moment: str
    """`event`: as soon as the last of them is. `returned`: the function of `call` has ended, its result is not
    recorded. `midst`: the function of `call` has run for half the time it took undisturbed."""
    call: str | None = None
    tool: str | None = None
    after_ms: float = 0.0
    last: str = ""
    """Kind of the last durable event."""

    def __str__(self) -> str:
        if self.moment == "returned":
            return f"killed when {self.tool} (call {self.call}) had returned, before its result was recorded"
        if self.moment == "midst":
            return f"killed inside {self.tool} (call {self.call}), {self.after_ms:.0f} ms after it began"
        where = f" of {self.tool} (call {self.call})" if self.tool else f" of call {self.call}" if self.call else ""
        return f"killed when event {self.events - 1} was recorded: {self.last}{where}"


def cuts_of(events: Sequence[Event], took_ms: dict[str, float]) -> list[Cut]:
    """Every cut of a run with these events, whose functions took so long, by call."""
    cuts = []
    for number, event in enumerate(events[:-1], 1):
        cuts.append(Cut(number, "event", event.call, event.tool, last=event.kind))
        call = event.call
        if event.kind == "tool_call_requested" and call is not None and call in took_ms:
            half = took_ms[call] / 2
            if took_ms[call] >= _SHORTEST_MIDST_MS:
                cuts.append(Cut(number, "midst", call, event.tool, half, event.kind))
            cuts.append(Cut(number, "returned", call, event.tool, last=event.kind))
    return cuts


def die() -> None:
    """Ends this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


class CuttingStore:
    """Passes events on until so many are durable; then the process dies. What the store was handed with them and lies
    behind the cut is not stored."""

    def __init__(self, store: Store, events: int) -> None:
        """`events`: of the run, those of drives before this one included."""
        self._store, self._events = store, events
        self._dying = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def create(self, run_id: str, key: bytes, envelopes: Sequence[Envelope], index: IndexRow) -> Lease:
        """As `Store.create`."""
        lease = await self._store.create(run_id, key, self._take(envelopes), index)
        if self._dying:
            die()
        return lease

    def append(self, lease: Lease, envelopes: Sequence[Envelope], index: IndexRow | None) -> "asyncio.Future[None]":
        """As `Store.append`."""
        if self._dying:  # the last piece is under way, and its death with it
            return asyncio.get_running_loop().create_future()
        kept = self._take(envelopes)
        stored = self._store.append(lease, kept, index if len(kept) == len(envelopes) else None)
        if self._dying:
            stored.add_done_callback(lambda _: die())
        return stored

    def _take(self, envelopes: Sequence[Envelope]) -> Sequence[Envelope]:
        self._dying = envelopes[-1].seq + 1 >= self._events
        return [one for one in envelopes if one.seq < self._events]


class CuttingWatch:
    """Kills at the moment of a cut that a tool's function comes to."""

    def __init__(self, cut: Cut) -> None:
        self._cut = cut

    def began(self, tool: str, call: CallContext) -> None:
        """As `ToolWatch.began`."""
        if self._cut.moment == "midst" and call.call_id == self._cut.call:
            timer = threading.Timer(self._cut.after_ms / 1000, die)
            timer.daemon = True
            timer.start()

    def ended(self, tool: str, call: CallContext, value: object, error: BaseException | None) -> None:
        """As `ToolWatch.ended`."""
        if call.call_id == self._cut.call and self._cut.moment in ("returned", "midst"):
            die()
