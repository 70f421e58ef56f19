"""One process's stretch of driving a run: what every room of the runtime shares, and the latch that ends it.

Once latched, every further call on the context raises the same signal, whatever the loop does with it; the engine
goes by the latch.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from perdure.contracts.agents import AgentSpec
from perdure.contracts.contract import JsonObject, JsonValue
from perdure.errors import DivergedError, Parked, RefusedError
from perdure.journal import events as ev
from perdure.journal.cursor import Cursor, Permit
from perdure.journal.fold import RunState
from perdure.journal.transcript import Transcript
from perdure.ports import Clock, Entropy, ModelClient, ModelEvent, Tool
from perdure.runtime.guards import Guards
from perdure.runtime.journaling import RunJournal
from perdure.runtime.left_behind import LeftBehind

ENDED = "ended"
INTERRUPTED = "interrupted"
CANCELLED = "cancelled"


class AnswerProblem(Protocol):
    """Checks a structured answer."""

    def problem(self, value: JsonValue) -> str | None:
        """What is wrong with it, for the model; None when it fits."""


@dataclass
class Bindings:
    """What stands outside the journal and is bound anew by each drive."""

    model: ModelClient
    tools: Mapping[str, Tool]
    clock: Clock
    entropy: Entropy
    answer_check: AnswerProblem | None = None
    check_schema: Callable[[JsonObject, str], JsonObject] | None = None
    """Raises ConfigurationError for a schema that no answer could be checked by."""
    confirm: Callable[[], Awaitable[None]] | None = None
    """Called directly before each dispatch; raises when the lease is gone. None where nobody else can drive."""
    put_artifact: Callable[[bytes], Awaitable[str]] | None = None
    on_delta: Callable[[str, ModelEvent], None] | None = None
    """Told of what streams, with the call's id; never journaled."""


@dataclass
class Drive:
    """The state of one drive. `latch` is None while it may go on."""

    run_id: str
    key: bytes
    epoch: int
    spec: AgentSpec
    cursor: Cursor
    journal: RunJournal
    bindings: Bindings
    transcript: Transcript = field(default_factory=Transcript)
    guards: Guards = field(default_factory=Guards)
    latch: BaseException | None = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the process was asked to stop: park at the next safe point."""
    cancel_requested: ev.CancelRequested | None = None
    unresolved: list[str] = field(default_factory=list)
    """Calls that a cancel cut off and whose effect may have happened."""
    left_behind: LeftBehind = field(default_factory=LeftBehind)
    """Attempts past their time limit that still go on in this process, of this drive or one before."""
    over: bool = False
    """The loop is done: what an attempt left behind comes to from here on is not recorded."""

    @property
    def state(self) -> RunState:
        """The fold of everything recorded, this drive's events included."""
        return self.journal.state

    def park(self, kind: str, /, **detail: Any) -> NoReturn:
        """Latches the drive and stops it there."""
        self._latch(Parked(kind, detail))

    def finish(self, outcome: str, terminal_reason: str, answer: str) -> NoReturn:
        """Latches the drive with an end that is not the loop's to decide: a guard, or a limit under `finish`."""
        self.park(ENDED, outcome=outcome, terminal_reason=terminal_reason, answer=answer)

    def refuse(self, error: RefusedError) -> NoReturn:
        """Latches the drive with a refusal: nothing more is recorded."""
        self._latch(error)

    def _latch(self, signal: BaseException) -> NoReturn:
        if self.latch is None:
            self.latch = signal
        raise self.latch

    def check_latch(self) -> None:
        """Raises the latched signal, if any."""
        if self.latch is not None:
            raise self.latch

    @property
    def cancelling(self) -> bool:
        """Whether the run is being cancelled and this driver may still record so."""
        return self.cancel_requested is not None and not isinstance(self.latch, RefusedError)

    def safe_point(self) -> None:
        """Where a drive may stop in good order: directly before something new is begun."""
        if self.cancel_requested is not None:
            self.park(CANCELLED)
        if self.stopping.is_set():
            self.park(INTERRUPTED)

    async def pause(self, seconds: float) -> None:
        """Waits on the steady clock, but no longer than until the process is asked to stop."""
        waits = {asyncio.ensure_future(self.bindings.clock.sleep(seconds)), asyncio.ensure_future(self.stopping.wait())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()

    async def durable(self) -> None:
        """Returns when everything recorded is durable."""
        try:
            await self.journal.commit()
        except RefusedError as error:
            self.refuse(error)

    async def dispatchable(self) -> None:
        """Makes everything recorded durable, then makes sure that this driver still holds the run."""
        await self.durable()
        if self.bindings.confirm is not None:
            try:
                await self.bindings.confirm()
            except RefusedError as error:
                self.refuse(error)

    def record(self, permit: Permit, event: ev.Event) -> None:
        """Queues what a request of the loop's comes to; it is durable before anything that depends on it."""
        assert getattr(event, "call", permit.call) == permit.call  # a permit is for one request
        self.note(event)

    def note(self, event: ev.Event) -> None:
        """Queues an event that follows from no request: the end of the run."""
        try:
            self.journal.queue(event)
        except RefusedError as error:
            self.refuse(error)

    def must_not_have_ended(self, asked: str) -> None:
        """Nothing can be asked of a run that ended."""
        if self.cursor.live and self.state.end is not None:
            self.refuse(
                DivergedError(asked, f"the end of the run ({self.state.end.terminal_reason})", asked, "request")
            )
