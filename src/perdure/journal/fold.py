"""The state of a run as a fold over its events, and the index row drawn from it. Nothing else is state.

`RunState.advance` is deterministic and does no IO; it changes the state in place, since a copy an event would make n
events cost O(n^2). It refuses an event that cannot follow.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from perdure.contracts.contract import JsonObject, JsonValue
from perdure.contracts.limits import LIMIT_NAMES, add_known, cost_of
from perdure.contracts.messages import Effect, Usage
from perdure.errors import MalformedJournalError
from perdure.journal import events as ev
from perdure.journal.envelope import Envelope

CRASH_LOOP_DRIVES = 5
"""Drives in a row without anything new after which a run is not picked up by itself any more."""


class OpenCall(msgspec.Struct):
    """A call with an intent and no completion."""

    call: str
    tool: str | None
    """None for a model call."""
    attempt: int
    since: int
    arguments: JsonObject = {}
    effect: Effect = Effect.READ
    key: str | None = None
    resolution: ev.EffectResolved | None = None

    @property
    def in_doubt(self) -> bool:
        """A write that may have happened and that nobody has settled."""
        return self.tool is not None and self.effect is Effect.WRITE and self.resolution is None


@dataclass(slots=True)
class Park:
    """What a run that is not driven waits for."""

    kind: str
    call: str | None
    since: int
    detail: dict[str, Any]


@dataclass(slots=True)
class End:
    """How the run ended."""

    status: str
    outcome: str
    terminal_reason: str
    answer: str
    assurance: str = "unverified"


@dataclass(slots=True)
class Spent:
    """What the run used so far. None is unknown and stays so."""

    model_turns: int = 0
    model_repairs: int = 0
    tool_calls: int = 0
    input_tokens: int | None = 0
    output_tokens: int | None = 0
    cached_tokens: int | None = 0
    reasoning_tokens: int | None = 0
    cost: int | None = 0
    estimated: bool = False
    active_ns: int = 0

    def book(self, usage: Usage, cost: int | None) -> None:
        """Adds one model call."""
        self.input_tokens = add_known(self.input_tokens, usage.input_tokens)
        self.output_tokens = add_known(self.output_tokens, usage.output_tokens)
        # Once unknown, a sum stays so.
        if self.cached_tokens is not None:
            self.cached_tokens = add_known(self.cached_tokens, usage.cached_tokens)
        if self.reasoning_tokens is not None:
            self.reasoning_tokens = add_known(self.reasoning_tokens, usage.reasoning_tokens)
        if self.cost is not None:
            self.cost = add_known(self.cost, cost)
        self.estimated |= usage.estimated


class RunState:
    """Everything the journal says about a run so far."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.head: ev.RunStarted | None = None
        self.model = ""
        self.events = 0
        self.started_at = 0
        self.updated_at = 0
        self.spent = Spent()
        self.limits: dict[str, int | None] = {}
        self.open: dict[str, OpenCall] = {}
        self._asked: set[str] = set()
        """Every call with an intent, answered or not."""
        self.unknown: dict[str, OpenCall] = {}
        """Calls that were closed with an unknown outcome."""
        self.late: dict[str, ev.LateResultObserved] = {}
        """Values of attempts that were left behind, until the model has been told."""
        self.reserved: set[str] = set()
        """Calls of an accepted batch that have no intent yet."""
        self.waiting: dict[str, ev.Suspended | ev.SleepStarted] = {}
        self.waiting_since = 0
        self.exceeded: ev.BudgetExceeded | None = None
        self.exceeded_since = 0
        self.proposal: JsonValue = None
        self.end: End | None = None
        self.cancel: ev.CancelRequested | None = None
        self.degradations: list[ev.ExecutionDegraded] = []
        self.drives = 0
        self.idle_drives = 0
        self.epoch = 0
        self._active_before = 0
        self._active_drive = 0

    @property
    def started(self) -> ev.RunStarted:
        """The head.

        Raises:
            MalformedJournalError: the journal is empty.
        """
        if self.head is None:
            raise MalformedJournalError(self.run_id, None, None, "the journal has no head")
        return self.head

    def advance(self, envelope: Envelope, event: ev.Event) -> None:
        """Takes the next event.

        Raises:
            MalformedJournalError: the event cannot follow.
        """
        kind = type(event)
        if self.end is not None:
            raise self._refused(envelope, "an event stands after the end of the run")
        if (self.head is None) is not (kind is ev.RunStarted):
            raise self._refused(envelope, "the first event, and only the first, must be run_started")
        case = _CASES.get(kind)
        if case is not None:
            try:
                case(self, event, envelope)
            except _CannotFollow as error:
                raise self._refused(envelope, str(error)) from None
        self.events += 1
        self.updated_at = envelope.recorded_at
        self._active_drive = envelope.active_ns
        self.spent.active_ns = self._active_before + self._active_drive
        if self.idle_drives and kind not in _NOTHING_NEW:
            self.idle_drives = 0

    def _refused(self, envelope: Envelope, problem: str) -> MalformedJournalError:
        return MalformedJournalError(self.run_id, envelope.seq, envelope.kind, problem)

    @property
    def active_before_ns(self) -> int:
        """Active time of the drives before the last one."""
        return self._active_before

    @property
    def last_active_ns(self) -> int:
        """The reading of the last event, carried on by events recorded outside a drive."""
        return self._active_drive

    def park(self) -> Park | None:
        """What the run waits for when nobody drives it; None when it ended or could go on at once."""
        if self.end is not None:
            return None
        found = self._recorded_park() or self._park_doubt()
        if found is None and self.idle_drives >= CRASH_LOOP_DRIVES:
            return Park("crash_loop", None, self.updated_at, {"drives": self.idle_drives})
        return found

    def _recorded_park(self) -> Park | None:
        """What an event says the run waits for; a doubt and a crash loop are ones only while nobody drives."""
        return self._park_exceeded() or self._park_waiting()

    def _park_exceeded(self) -> Park | None:
        over = self.exceeded
        if over is None:
            return None
        detail = {"limit": over.limit, "max": over.max, "used": over.used, "need": over.need}
        return Park("budget_exceeded", over.call, self.exceeded_since, detail)

    def _park_waiting(self) -> Park | None:
        for call, waits in self.waiting.items():
            if isinstance(waits, ev.SleepStarted):
                return Park("sleeping", call, self.waiting_since, {"wake_at": waits.wake_at})
            detail = {"kind": waits.kind, "reason": waits.reason, "schema": waits.schema}
            return Park("suspended", call, self.waiting_since, detail)
        return None

    def _park_doubt(self) -> Park | None:
        for doubt in self.doubts():
            detail = {"tool": doubt.tool, "arguments": doubt.arguments}
            return Park("needs_reconciliation", doubt.call, doubt.since, detail)
        return None

    def begin_drive(self, epoch: int) -> None:
        """Another drive begins, and its active time from zero."""
        self.drives += 1
        self.epoch = epoch
        self._active_before += self._active_drive

    def ask(self, call: OpenCall) -> None:
        """Opens a call: its intent is recorded."""
        if call.call in self._asked:
            raise _CannotFollow(f"call {call.call} is asked for twice")
        self._asked.add(call.call)
        self.open[call.call] = call

    def answer(self, call: str) -> OpenCall:
        """Closes a call: its completion is recorded."""
        opened = self.open.pop(call, None)
        if opened is None:
            raise _not_open(call)
        return opened

    def open_call(self, call: str) -> OpenCall:
        """A call that something is recorded about while it goes on."""
        opened = self.open.get(call)
        if opened is None:
            raise _not_open(call)
        return opened

    def must_have_asked(self, call: str) -> None:
        """A call that something is recorded about after it was closed."""
        if call not in self._asked:
            raise _CannotFollow(f"call {call} ended late but was never asked for")

    def doubts(self) -> list[OpenCall]:
        """Writes that may have happened and are not settled, by place."""
        return [call for call in self.open.values() if call.in_doubt]

    def may_have_acted(self) -> list[OpenCall]:
        """Calls whose effect may have happened, by place: `doubts`, and those with a key as well, which a run that goes
        on would send again."""
        left = (call for call in self.open.values() if call.call not in self.waiting and call.resolution is None)
        return [call for call in left if call.tool is not None and call.effect is not Effect.READ]

    def settled_late(self) -> list[tuple[OpenCall, ev.LateResultObserved]]:
        """Calls whose unknown outcome a late result has settled, and of which the model has not been told."""
        return [(self.unknown[call], late) for call, late in self.late.items() if call in self.unknown]

    def index_row_fields(self) -> tuple[str, str, str | None, str | None, int | None]:
        """Agent, phase, terminal reason, kind of park, wake time: what a list shows without reading journals."""
        # Whether somebody drives the events cannot say, so what depends on that is derived at reading.
        stored = None if self.end is not None else self._recorded_park()
        phase = self.end.status if self.end else "parked" if stored else "open"
        wake_at = stored.detail["wake_at"] if stored and stored.kind == "sleeping" else None
        reason = self.end.terminal_reason if self.end else None
        return self.started.agent.name, phase, reason, stored.kind if stored else None, wake_at


class _CannotFollow(Exception):
    """An event does not fit what came before it. A case raises it before it changes anything."""


def _not_open(call: str) -> _CannotFollow:
    return _CannotFollow(f"call {call} is answered but not open")


_NOTHING_NEW: frozenset[type[ev.Event]] = frozenset({ev.DriveStarted, ev.AttemptStarted, ev.LateResultObserved})
"""What a drive records without getting any further."""

Case = Callable[[RunState, Any, Envelope], None]


def _run_started(state: RunState, event: ev.RunStarted, envelope: Envelope) -> None:
    state.head, state.model, state.started_at = event, event.model, envelope.recorded_at
    limits = msgspec.structs.asdict(event.agent.policy.limits)
    state.limits = {name: cast("int | None", limits[name]) for name in (*LIMIT_NAMES, "deadline_seconds")}


def _drive_started(state: RunState, event: ev.DriveStarted, envelope: Envelope) -> None:
    state.begin_drive(event.epoch)
    # Asking for the run by name lifts a crash loop; being picked up does not.
    state.idle_drives = state.idle_drives + 1 if event.cause == "recover" else 1


def _model_requested(state: RunState, event: ev.ModelCallRequested, envelope: Envelope) -> None:
    state.ask(OpenCall(event.call, None, 1, envelope.recorded_at))
    state.spent.model_turns += 1
    if event.notice is not None and event.notice.kind != "no_call":
        state.spent.model_repairs += 1


def _model_completed(state: RunState, event: ev.ModelCallCompleted, envelope: Envelope) -> None:
    state.answer(event.call)
    state.spent.book(event.turn.usage, event.cost)


def _model_failed(state: RunState, event: ev.ModelCallFailed, envelope: Envelope) -> None:
    state.answer(event.call)
    if event.usage is not None:
        state.spent.book(event.usage, cost_of(event.usage, state.started.agent.policy.price))


def _usage_reported(state: RunState, event: ev.ModelUsageReported, envelope: Envelope) -> None:
    state.spent.book(event.usage, cost_of(event.usage, state.started.agent.policy.price))


def _model_bound(state: RunState, event: ev.ModelBound, envelope: Envelope) -> None:
    state.model = event.model


def _batch_accepted(state: RunState, event: ev.BatchAccepted, envelope: Envelope) -> None:
    state.reserved.update(event.calls)
    state.spent.model_repairs += event.repair


def _tool_requested(state: RunState, event: ev.ToolCallRequested, envelope: Envelope) -> None:
    state.ask(OpenCall(event.call, event.tool, 1, envelope.recorded_at, event.arguments, event.effect, event.key))
    state.reserved.discard(event.call)
    state.spent.tool_calls += 1


def _attempt_started(state: RunState, event: ev.AttemptStarted, envelope: Envelope) -> None:
    call = state.open_call(event.call)
    call.attempt, call.since, call.resolution = event.n, envelope.recorded_at, None
    if call.tool is None:
        state.spent.model_turns += 1
    else:
        state.spent.tool_calls += 1


def _tool_settled(state: RunState, event: ev.ToolCallCompleted | ev.ToolCallFailed, envelope: Envelope) -> None:
    call = state.answer(event.call)
    if type(event) is ev.ToolCallFailed and event.reason == "unknown":
        state.unknown[event.call] = call


def _late_result(state: RunState, event: ev.LateResultObserved, envelope: Envelope) -> None:
    state.must_have_asked(event.call)
    # An error settles nothing: it may come of having been told to stop.
    if event.reason is None:
        state.late[event.call] = event


def _tool_refused(state: RunState, event: ev.ToolCallRefused, envelope: Envelope) -> None:
    state.reserved.discard(event.call)
    if event.about is not None:
        state.late.pop(event.about, None)


def _effect_resolved(state: RunState, event: ev.EffectResolved, envelope: Envelope) -> None:
    state.open_call(event.call).resolution = event


def _waits(state: RunState, event: ev.Suspended | ev.SleepStarted, envelope: Envelope) -> None:
    state.waiting[event.call] = event
    state.waiting_since = envelope.recorded_at


def _goes_on(state: RunState, event: ev.Resumed | ev.Woken, envelope: Envelope) -> None:
    if state.waiting.pop(event.call, None) is None:
        raise _CannotFollow(f"nothing waits at {event.call}")


def _budget_exceeded(state: RunState, event: ev.BudgetExceeded, envelope: Envelope) -> None:
    state.exceeded, state.exceeded_since = event, envelope.recorded_at


def _budget_changed(state: RunState, event: ev.BudgetChanged, envelope: Envelope) -> None:
    state.limits.update(event.limits)
    over = state.exceeded
    if over is not None and event.limits.get(over.limit, 0) >= over.used + over.need:
        state.exceeded = None


def _cancel_requested(state: RunState, event: ev.CancelRequested, envelope: Envelope) -> None:
    state.cancel = event


def _degraded(state: RunState, event: ev.ExecutionDegraded, envelope: Envelope) -> None:
    state.degradations.append(event)


def _proposal(state: RunState, event: ev.ProposalReceived, envelope: Envelope) -> None:
    state.proposal = event.output


def _completed(state: RunState, event: ev.RunCompleted, envelope: Envelope) -> None:
    state.end = End("completed", "success", event.terminal_reason, event.answer, event.assurance)


def _failed(state: RunState, event: ev.RunFailed, envelope: Envelope) -> None:
    state.end = End("failed", event.outcome, event.terminal_reason, event.answer)


def _cancelled(state: RunState, event: ev.RunCancelled, envelope: Envelope) -> None:
    state.end = End("cancelled", "cancelled", "user_cancelled", event.answer)


def _abandoned(state: RunState, event: ev.RunAbandoned, envelope: Envelope) -> None:
    state.end = End("abandoned", "cancelled", "abandoned", event.answer)


_CASES: dict[type[ev.Event], Case] = {
    ev.RunStarted: _run_started,
    ev.DriveStarted: _drive_started,
    ev.RunCompleted: _completed,
    ev.RunFailed: _failed,
    ev.RunCancelled: _cancelled,
    ev.RunAbandoned: _abandoned,
    ev.ModelCallRequested: _model_requested,
    ev.ModelCallCompleted: _model_completed,
    ev.ModelCallFailed: _model_failed,
    ev.ModelBound: _model_bound,
    ev.ModelUsageReported: _usage_reported,
    ev.BatchAccepted: _batch_accepted,
    ev.ToolCallRequested: _tool_requested,
    ev.AttemptStarted: _attempt_started,
    ev.ToolCallCompleted: _tool_settled,
    ev.ToolCallFailed: _tool_settled,
    ev.ToolCallRefused: _tool_refused,
    ev.LateResultObserved: _late_result,
    ev.EffectResolved: _effect_resolved,
    ev.Suspended: _waits,
    ev.Resumed: _goes_on,
    ev.SleepStarted: _waits,
    ev.Woken: _goes_on,
    ev.BudgetExceeded: _budget_exceeded,
    ev.BudgetChanged: _budget_changed,
    ev.CancelRequested: _cancel_requested,
    ev.ExecutionDegraded: _degraded,
    ev.ProposalReceived: _proposal,
}


def fold(run_id: str, envelopes: Iterable[Envelope]) -> tuple[RunState, list[ev.Event]]:
    """The state after all of a run's events, and the events decoded.

    Raises:
        MalformedJournalError, PayloadErasedError: at the first event that cannot be read or cannot follow.
    """
    state = RunState(run_id)
    return state, fold_on(state, envelopes)


def fold_on(state: RunState, envelopes: Iterable[Envelope]) -> list[ev.Event]:
    """Takes the next events into the state; returns them decoded.

    Raises:
        MalformedJournalError, PayloadErasedError: at the first event that cannot be read or cannot follow.
    """
    decoded = []
    for envelope in envelopes:
        event = ev.decode(envelope)
        state.advance(envelope, event)
        decoded.append(event)
    return decoded
