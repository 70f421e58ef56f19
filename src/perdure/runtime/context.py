"""`RunContext`: the one API a loop may use. Everything a loop does through it is recorded once and replayed for free.

| method | cursor request | done live |
| --- | --- | --- |
| `ask` | intend | a model call |
| `use` | observe the batch, intend each call | tool calls |
| `do` | intend | a function of the loop's own |
| `wait`, `sleep`, `sleep_until` | wait | park until an answer, a time |
| `now`, `entropy`, `patched` | observe | a reading, a draw, a mark |
| `check_limits` | observe a crossing | park or end |

A context serves one caller at a time. Once the drive is parked or out of its lease, every further call raises the
same signal.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from operator import is_, itemgetter
from types import TracebackType
from typing import TypeVar

from perdure.calls import CallContext
from perdure.contracts.agents import AgentSpec
from perdure.contracts.contract import JsonObject, JsonValue
from perdure.contracts.messages import AssistantTurn, Effect, Observation, ToolCall
from perdure.contracts.values import to_json
from perdure.errors import ConcurrentUseError, ConfigurationError, Parked, RefusedError
from perdure.journal import events as ev
from perdure.journal.cursor import Live, Replayed
from perdure.journal.transcript import ResultsEntry, Transcript, UserEntry
from perdure.prompting import texts
from perdure.prompting.request import ModelRequest
from perdure.runtime import gates
from perdure.runtime.asking import Asking
from perdure.runtime.dispatch import Dispatch, Refusal, idempotency_key
from perdure.runtime.drive import CANCELLED, INTERRUPTED, Drive
from perdure.runtime.executing import Work

E = TypeVar("E", bound=ev.Event)


class RunContext:
    """A run as its loop sees it. Made by the engine, or by `perdure.embedded` over a plain list."""

    def __init__(self, drive: Drive) -> None:
        self._drive = drive
        self._asking = Asking(drive)
        self._dispatch = Dispatch(drive)
        self._one = _Operations(drive)
        self._turn = 0
        self._place = 0
        self._calls: tuple[ToolCall, ...] = ()
        self._unanswered: set[int] = set()
        self._current = drive.transcript
        self._patches: dict[str, bool] = {}

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._drive.run_id

    @property
    def agent(self) -> AgentSpec:
        """The agent's definition as pinned when the run started."""
        return self._drive.spec

    @property
    def transcript(self) -> Transcript:
        """The conversation so far: the task, and every turn and observation since."""
        return self._drive.transcript

    async def ask(self, request: ModelRequest) -> AssistantTurn:
        """One model call. The turn is appended to the transcript the request is a view of.

        Raises:
            ModelError: the call failed for good.
        """
        with self._one["ask"]:
            _must_be_whole(request)
            self._close_unanswered()
            self._turn += 1
            self._current = request.transcript.owner
            turn = await self._asking.ask(str(self._turn), request)
            self._calls = turn.calls
            self._place = len(self._calls)
            self._unanswered = set(range(len(self._calls)))
            return turn

    async def use(self, calls: Sequence[ToolCall]) -> tuple[Observation, ...]:
        """Runs calls of the last turn as one batch; observations in call order, appended to the transcript.

        A call the turn does not hold (one the loop made itself) runs too; its observation is returned and not appended.
        """
        if not calls:
            return ()
        with self._one["use"]:
            whole = len(calls) == len(self._unanswered) == len(self._calls) and all(map(is_, calls, self._calls))
            places = range(len(calls)) if whole else self._places_of(calls)
            seen = await self._dispatch.use(
                [(self._id(place), call) for place, call in zip(places, calls, strict=True)]
            )
            if whole:
                self._unanswered.clear()
                self._current.append(ResultsEntry(seen))
            else:
                self._answered([pair for pair in zip(places, seen, strict=True) if pair[0] < len(self._calls)])
            return seen

    async def do(
        self, name: str, fn: Callable[..., object], *args: object, effect: str | Effect = Effect.READ
    ) -> JsonValue:
        """Runs a function of the loop's own as a call: recorded, replayed, counted. Arguments and result must have a
        JSON form.

        A parameter annotated `CallContext` is filled in.

        Raises:
            ValueFormError: an argument has no JSON form; nothing was recorded.
            CallFailedError: it failed, or its outcome is unknown.
        """
        with self._one["do"]:
            arguments: JsonObject = {"args": to_json(args)}
            kind = _effect(effect, name)
            call = self._next_id()
            key = idempotency_key(self.run_id, call) if kind is Effect.IDEMPOTENT else None
            return await self._dispatch.run_one(Work(call, name, arguments, kind, key, _bound(fn, args), inline=True))

    async def wait(self, reason: str, *, schema: JsonObject, kind: str = "question") -> JsonValue:
        """Parks until an answer that fits the JSON schema is given, days later or on another machine; returns it.

        Raises:
            ConfigurationError: it is no valid schema; nothing was recorded.
        """
        with self._one["wait"]:
            call = self._next_id()
            self._drive.must_not_have_ended(f"a wait at {call}")
            check = self._drive.bindings.check_schema
            # A recorded schema was checked when it was recorded.
            checked = check(schema, f"wait at {call}") if check is not None and self._drive.cursor.live else schema
            return (await gates.wait_for_answer(self._drive, call, reason, kind, to_json(checked))).value

    async def sleep(self, duration: timedelta) -> None:
        """Parks for a time that survives restarts; goes on at once when it has passed already."""
        with self._one["sleep"]:
            if not isinstance(duration, timedelta):
                raise ConfigurationError(f"{duration!r} is no timedelta", where="sleep", next="give a timedelta")
            await self._sleep(duration)

    async def sleep_until(self, instant: datetime) -> None:
        """Parks until an instant. An instant without a time zone is refused."""
        with self._one["sleep_until"]:
            if instant.utcoffset() is None:
                raise ConfigurationError(
                    f"{instant.isoformat()} has no time zone", where="sleep_until", next="give an aware datetime"
                )
            await self._sleep(gates.to_ns(instant))

    async def _sleep(self, wake_at: int | timedelta) -> None:
        call = self._next_id()
        self._drive.must_not_have_ended(f"a sleep at {call}")
        await gates.sleep_until(self._drive, call, wake_at)

    async def now(self) -> datetime:
        """The wall clock (UTC), read once and replayed."""
        with self._one["now"]:
            call, clock = self._next_id(), self._drive.bindings.clock
            return gates.from_ns(
                self._observe(ev.NowObserved(call, 0), lambda: ev.NowObserved(call, clock.now_ns())).now_ns
            )

    async def entropy(self) -> int:
        """64 random bits (0 to 2**64-1), drawn once and replayed."""
        with self._one["entropy"]:
            call, entropy = self._next_id(), self._drive.bindings.entropy
            drawn = self._observe(
                ev.EntropyObserved(call, 0),
                lambda: ev.EntropyObserved(call, int.from_bytes(entropy.draw(8), "big", signed=True)),
            )
            return drawn.value % 2**64

    async def patched(self, name: str) -> bool:
        """Whether this run takes the changed path of the code named so: true for a run that first comes here now,
        false for one that passed here before the change. Remembered for the run."""
        with self._one["patched"]:
            known = self._patches.get(name)
            if known is None:
                recorded = self._drive.cursor.peek()
                known = self._drive.cursor.live or (isinstance(recorded, ev.PatchObserved) and recorded.name == name)
                if known:
                    mark = ev.PatchObserved(self._next_id(), name)
                    self._observe(mark, lambda: mark)
                self._patches[name] = known
            return known

    async def check_limits(self) -> None:
        """Stops here when a limit is reached already: parks, or ends the run under `on_exhausted = "finish"`."""
        with self._one["check_limits"]:
            if self._drive.cursor.live:
                await gates.reserve(self._drive, str(self._turn + 1), gates.Need(model_turns=1))

    def begin(self, text: str) -> None:
        """Opens the conversation with the task. The engine calls it once, before the loop."""
        self._drive.transcript.append(UserEntry(text))

    def _observe(self, asked: E, read: Callable[[], E]) -> E:
        """The recorded event, or the one that `read` makes: a clock or a source of chance is touched only then."""
        self._drive.must_not_have_ended(asked.event_kind)
        match self._drive.cursor.observe(asked):
            case Replayed(recorded):
                return recorded
            case Live(permit):
                observed = read()
                self._drive.record(permit, observed)
                return observed

    def _id(self, place: int) -> str:
        return f"{self._turn}.{place}"

    def _next_id(self) -> str:
        call = self._id(self._place)
        self._place += 1
        return call

    def _places_of(self, calls: Sequence[ToolCall]) -> list[int]:
        """Where each call stands in the turn; one the turn does not hold (or holds answered already) gets a new
        place."""
        free = {id(self._calls[place]): place for place in sorted(self._unanswered, reverse=True)}
        places = []
        for call in calls:
            place = free.pop(id(call), None)
            if place is None:
                place, self._place = self._place, self._place + 1
            places.append(place)
        return places

    def _answered(self, answered: list[tuple[int, Observation]]) -> None:
        if answered:
            self._unanswered.difference_update([place for place, _ in answered])
            ordered = tuple([one for _, one in sorted(answered, key=itemgetter(0))])
            self._current.append(ResultsEntry(ordered))

    def _close_unanswered(self) -> None:
        """A call the loop did not use gets one observation all the same: a request with an unanswered call is refused
        by every provider."""
        if not self._unanswered:
            return
        refusal = Refusal("not_dispatched", texts.NOT_ASKED_FOR)
        closed = [
            (place, self._dispatch.refuse(self._id(place), self._calls[place].name, refusal))
            for place in sorted(self._unanswered)
        ]
        self._answered(closed)


class _Operations(dict[str, "_Operation"]):
    """The kinds of call on the context, by name; one caller at a time."""

    def __init__(self, drive: Drive) -> None:
        self.drive = drive
        self.busy: str | None = None

    def __missing__(self, name: str) -> "_Operation":
        made = self[name] = _Operation(self, name)
        return made


class _Operation:
    """One kind of call on the context. Latches the drive when what the caller asked for was refused or cut off."""

    __slots__ = ("_all", "_name")

    def __init__(self, all: _Operations, name: str) -> None:
        self._all, self._name = all, name

    def __enter__(self) -> None:
        operations = self._all
        if operations.drive.latch is not None:
            raise operations.drive.latch
        if operations.busy is not None:
            raise ConcurrentUseError(
                f"{self._name} was called while {operations.busy} is open",
                where=f"run {operations.drive.run_id}",
                next="await one call after the other; for concurrent calls use one batch",
            )
        operations.busy = self._name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._all.busy = None
        if error is None:
            return
        drive = self._all.drive
        if isinstance(error, RefusedError):
            # A loop that swallows a refusal must not go on as if nothing were wrong.
            drive.refuse(error)
        if isinstance(error, asyncio.CancelledError):
            drive.check_latch()
            if drive.cancel_requested is not None:
                drive.park(CANCELLED)
            # A call was cut off (by a time limit of the loop's own, say): its place in the journal has no answer, so
            # this drive asks for nothing more, whatever the loop makes of the signal.
            drive.latch = Parked(INTERRUPTED, {})


def _must_be_whole(request: ModelRequest) -> None:
    view = request.transcript
    if not view.whole:
        raise ConfigurationError(
            f"the request holds a view of {len(view)} entries of a transcript that has {len(view.owner)} by now",
            where="ask",
            next="take the view directly before the request",
        )


def _effect(effect: str | Effect, name: str) -> Effect:
    try:
        return Effect(effect)
    except ValueError:
        known = ", ".join(Effect)
        raise ConfigurationError(
            f"unknown effect {effect!r}", where=f"do({name!r})", next=f"use one of: {known}"
        ) from None


def _bound(fn: Callable[..., object], args: Sequence[object]) -> Callable[[CallContext], Awaitable[object]]:
    async def run(context: CallContext) -> object:
        injected = {
            name: context
            for name, annotation in inspect.get_annotations(fn, eval_str=True).items()
            if annotation is CallContext and name != "return"
        }
        result = fn(*args, **injected)
        return await result if inspect.isawaitable(result) else result

    return run
