"""Replay: a journal's events answered to the requests that made them.

Three shapes serve every feature. `observe`: one event. `intend`: an intent, then a completion that names its call.
`wait`: a request, then an event that comes from outside. Each answers `Replayed` or `Live`; only a permit can record,
and a recorded answer carries none.

Intents, observations and requests stand in the order the loop made them, so they are matched in order. Completions
may come in any order, so they are matched by call. A crossed limit is matched by nothing: it is no request of the loop,
and work that is recorded behind one was let through.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from perdure.contracts.contract import canonical
from perdure.errors import DivergedError
from perdure.journal import events as ev

E = TypeVar("E", bound=ev.Event)


class Replayed(msgspec.Struct, Generic[E], frozen=True):
    """The recorded answer."""

    event: E


class Permit(msgspec.Struct, frozen=True):
    """The right to record what comes next for one request. Only a cursor makes one."""

    call: str
    intended: bool = False
    """The request is recorded already: the driver before stopped between it and its answer."""


class Live(msgspec.Struct, frozen=True):
    """Nothing is recorded for this request yet."""

    permit: Permit


_IN_ORDER: frozenset[type[ev.Event]] = frozenset(
    {
        ev.NowObserved,
        ev.EntropyObserved,
        ev.PatchObserved,
        ev.ModelCallRequested,
        ev.BatchAccepted,
        ev.ToolCallRequested,
        ev.ToolCallRefused,
        ev.Suspended,
        ev.SleepStarted,
        ev.ProposalReceived,
        *ev.TERMINAL,
    }
)
_DISPATCH = (ev.ToolCallRequested, ev.ToolCallRefused)
_FROM_OUTSIDE = (ev.Resumed, ev.Woken)
_END = "end"
"""Stands for the call of an event that ends the run."""
_TOOL_ANSWERS = (ev.ToolCallCompleted, ev.ToolCallFailed)
_MODEL_ANSWERS = (ev.ModelCallCompleted, ev.ModelCallFailed)


class Cursor:
    """Walks one run's recorded events. Pure; knows nothing of what comes after them."""

    def __init__(self, recorded: Sequence[ev.Event]) -> None:
        self._ordered = [event for event in recorded if type(event) in _IN_ORDER]
        self._position = 0
        self.live = not self._ordered
        """Whether every recorded request has been replayed."""
        self._answers: dict[str, ev.Event] = {}
        self._outside: dict[str, ev.Resumed | ev.Woken] = {}
        self._dispatch: dict[str, ev.ToolCallRequested | ev.ToolCallRefused] = {}
        homes: dict[type[ev.Event], dict[str, Any]] = {
            **dict.fromkeys((*_MODEL_ANSWERS, *_TOOL_ANSWERS), self._answers),
            **dict.fromkeys(_FROM_OUTSIDE, self._outside),
            **dict.fromkeys(_DISPATCH, self._dispatch),
        }
        for event in recorded:
            home = homes.get(type(event))
            if home is not None:
                home[getattr(event, "call", _END)] = event
        self._parts: dict[str, str] = {}

    def peek(self) -> ev.Event | None:
        """The next recorded request; None when there is none."""
        return None if self.live else self._ordered[self._position]

    def dispatch_of(self, call: str) -> ev.ToolCallRequested | ev.ToolCallRefused | None:
        """Whether a call was dispatched or refused when it was first met; None when it was not met yet."""
        return self._dispatch.get(call)

    def value_of(self, call: str) -> ev.ToolCallCompleted | None:
        """The recorded answer of a tool call, when it is a value that nothing had to be waited for."""
        answer = self._answers.get(call)
        if type(answer) is not ev.ToolCallCompleted or answer.suspend is not None or answer.sleep_until is not None:
            return None
        return answer

    def observe(self, asked: E) -> Replayed[E] | Live:
        """One event that is its own answer."""
        recorded = self._take(asked)
        return Live(Permit(_call(asked))) if recorded is None else Replayed(recorded)

    def intend(self, asked: ev.ToolCallRequested) -> Replayed[ev.ToolCallCompleted | ev.ToolCallFailed] | Live:
        """A tool call's intent, then its completion."""
        if self._take(asked) is None:
            return Live(Permit(asked.call))
        answer = self._answers.get(asked.call)
        if isinstance(answer, _TOOL_ANSWERS):
            return Replayed(answer)
        return Live(Permit(asked.call, intended=True))

    def intend_model(
        self, asked: ev.ModelCallRequested, parts: dict[str, str]
    ) -> Replayed[ev.ModelCallCompleted | ev.ModelCallFailed] | Live:
        """A model call's intent, then its completion. `parts` are the digests of all parts of the request as it is
        now."""
        recorded = self._take(asked)
        if recorded is None:
            return Live(Permit(asked.call))
        self._compare_request(recorded, asked, parts)
        answer = self._answers.get(asked.call)
        if isinstance(answer, _MODEL_ANSWERS):
            return Replayed(answer)
        return Live(Permit(asked.call, intended=True))

    def changed_parts(self, parts: dict[str, str]) -> dict[str, str]:
        """Those parts whose digest differs from the request before; what a new request records."""
        changed = {name: digest for name, digest in parts.items() if self._parts.get(name) != digest}
        self._parts = parts
        return changed

    def wait(self, asked: ev.Suspended | ev.SleepStarted) -> Replayed[ev.Resumed | ev.Woken] | Live:
        """A request, then an event from outside; a permit for one already recorded means: still nothing came."""
        if self._take(asked) is None:
            return Live(Permit(asked.call))
        answer = self._outside.get(asked.call)
        return Live(Permit(asked.call, intended=True)) if answer is None else Replayed(answer)

    def waiting_request(self, call: str) -> ev.Suspended | ev.SleepStarted | None:
        """The recorded request that comes next, when it is a wait at this call."""
        recorded = self.peek()
        if isinstance(recorded, ev.Suspended | ev.SleepStarted) and recorded.call == call:
            return recorded
        return None

    def _take(self, asked: E) -> E | None:
        """Moves past the next recorded request when it is the one asked for; None when all have been replayed."""
        if self.live:
            return None
        recorded = self._ordered[self._position]
        call, kind = getattr(asked, "call", _END), type(asked)
        if type(recorded) is not kind or getattr(recorded, "call", _END) != call:
            raise DivergedError(call, _name(recorded), _name(asked), "request")
        for name in asked.identity:
            held, wanted = getattr(recorded, name), getattr(asked, name)
            if held is wanted or (type(held) is str and held == wanted):
                continue
            # Equal by their bytes: to Python 1, 1.0 and True are equal, and a journal that holds one does not hold
            # another.
            if canonical(held) != canonical(wanted):
                raise DivergedError(call, _shown(recorded, name), _shown(asked, name), name)
        self._position += 1
        self.live = self._position == len(self._ordered)
        return recorded

    def _compare_request(
        self, recorded: ev.ModelCallRequested, asked: ev.ModelCallRequested, parts: dict[str, str]
    ) -> None:
        if recorded.parts:
            self._parts = {**self._parts, **recorded.parts}
        if self._parts != parts:
            for name, digest in parts.items():
                if self._parts.get(name) != digest:
                    raise DivergedError(asked.call, f"{name} {self._parts.get(name)}", f"{name} {digest}", name)
        if recorded.transcript != asked.transcript:
            held, wanted = f"transcript {recorded.transcript}", f"transcript {asked.transcript}"
            raise DivergedError(asked.call, held, wanted, "transcript")


def _call(event: ev.Event) -> str:
    call: str = getattr(event, "call", _END)
    return call


def _name(event: ev.Event) -> str:
    tool = getattr(event, "tool", None)
    return f"{event.event_kind} at {_call(event)}" + (f" ({tool})" if tool else "")


def _shown(event: ev.Event, name: str) -> str:
    return f"{name} {canonical(getattr(event, name))[:200].decode('utf-8', 'replace')}"
