"""A batch of tool calls: all are checked before any starts, each intent is recorded directly before its own dispatch,
and observations go back in call order.

Writes are barriers; only adjacent reads marked parallel overlap. On replay nothing is checked again: what was
dispatched or refused stands in the journal.
"""

import asyncio
from collections.abc import Sequence

import msgspec

from perdure.calls import CallContext
from perdure.contracts.agents import ANSWER_TOOL
from perdure.contracts.contract import JsonObject, JsonValue, content_digest
from perdure.contracts.messages import (
    Effect,
    Observation,
    ObservationStatus,
    ToolCall,
)
from perdure.errors import CallFailedError, Parked
from perdure.journal import events as ev
from perdure.journal.cursor import Live, Replayed
from perdure.ports import BoundCall, InvalidArgumentsError, Tool
from perdure.prompting import texts
from perdure.runtime import gates
from perdure.runtime.drive import Drive
from perdure.runtime.executing import Work
from perdure.runtime.guards import Settled, Valued, fingerprint, value_result
from perdure.runtime.settling import Settling, value_observation

_LIMIT = "limit "
"""Begins the reason of a refusal at a limit; the limit's name follows."""


class Refusal(msgspec.Struct, frozen=True):
    """Why a call is not dispatched, and what the model reads."""

    reason: str
    text: str
    message: str | None = None
    """What it would have said without a collapse."""
    about: str | None = None
    """The earlier call whose late result it tells."""


class Placed(msgspec.Struct, frozen=True):
    """A call at its place, with the verdict on it."""

    id: str
    call: ToolCall
    verdict: Work | Refusal | None
    """None: the answer tool, taken."""


class Dispatch:
    """The tool side of one drive."""

    def __init__(self, drive: Drive) -> None:
        self._drive = drive
        self._settling = Settling(drive)
        self._descriptors = {descriptor.name: descriptor for descriptor in drive.spec.tools}

    async def use(self, calls: Sequence[tuple[str, ToolCall]]) -> tuple[Observation, ...]:
        """Runs a batch; one observation a call, in call order."""
        known = None if self._drive.cursor.live else self._replayed(calls)
        return await self._run(calls) if known is None else known

    def _replayed(self, calls: Sequence[tuple[str, ToolCall]]) -> tuple[Observation, ...] | None:
        """A batch that is recorded to its end, with a value for each call, as most of a long run is. None: there is
        more to it, and it is gone through step by step."""
        cursor, known, answered = self._drive.cursor, [], []
        for id, call in calls:
            answer = cursor.value_of(id)
            if answer is None or call.fault is not None or call.name not in self._drive.bindings.tools:
                return None
            answered.append((id, call, answer))
        self._accepted(calls)
        for id, call, _ in answered:
            effect = self._descriptors[call.name].effect
            cursor.intend(ev.ToolCallRequested(id, call.name, call.arguments, effect, self._key(id, effect)))
        for id, call, answer in answered:
            known.append(value_observation(answer, call.name))
            effect = self._descriptors[call.name].effect
            valued = Valued(call.name, call.arguments, effect, answer.output, answer.artifact, self._fingerprint)
            if cursor.live:
                self._count(valued.settled(), id)
            else:
                self._drive.guards.replay(valued)
        return tuple(known)

    async def _run(self, calls: Sequence[tuple[str, ToolCall]]) -> tuple[Observation, ...]:
        self._drive.must_not_have_ended("a batch of tool calls")
        if self._drive.cursor.live and any(self._checks_with_user_code(call) for _, call in calls):
            await self._drive.durable()
        placed = [Placed(id, call, self._verdict(id, call, len(calls))) for id, call in calls]
        repair = any(_is_bad(one.verdict) for one in placed)
        if repair:
            placed = self._held_back(placed)
        seen: list[Observation] = []
        try:
            await self._accept(placed, repair)
            for group in self._groups(placed):
                rest = placed[len(seen) :]
                stop = self._stop_before(group)
                if stop is not None:
                    return self._close(rest, stop)
                await self._stop_if_lowered(group, rest)
                seen.extend(await self._run_group(group))
        except (asyncio.CancelledError, Parked):
            self._close_cancelled(placed[len(seen) :])
            raise
        return tuple(seen)

    def _close_cancelled(self, rest: list[Placed]) -> None:
        """What a cancel kept from being begun gets its one observation, too."""
        if not self._drive.cancelling or not self._drive.cursor.live:
            return
        for one in rest:
            if isinstance(one.verdict, Refusal):
                self.refuse(one.id, one.call.name, one.verdict)
            elif one.id not in self._settling.met:
                self.refuse(one.id, one.call.name, Refusal("not_dispatched", texts.CANCELLED_BEFORE))

    async def run_one(self, work: Work) -> JsonValue:
        """Runs a call of the loop's own making (`RunContext.do`).

        Raises:
            CallFailedError: it failed, or its outcome is unknown.
        """
        self._drive.must_not_have_ended(f"a call of {work.tool}")
        await gates.reserve(self._drive, work.call, gates.Need(tool_calls=1))
        answer = (await self._settling.settle((work,)))[0]
        if isinstance(answer, ev.ToolCallFailed):
            raise CallFailedError(work.call, work.tool, answer.message, unknown=answer.reason == "unknown")
        return (await self._settling.observation(work, answer)).output

    # Checking

    def _checks_with_user_code(self, call: ToolCall) -> bool:
        """What was recorded is durable before any code of the user's runs, a validator too."""
        tool = self._drive.bindings.tools.get(call.name)
        return call.name == ANSWER_TOOL if tool is None else tool.checks_with_user_code

    def _verdict(self, id: str, call: ToolCall, batch: int) -> Work | Refusal | None:
        recorded = self._drive.cursor.dispatch_of(id)
        if isinstance(recorded, ev.ToolCallRefused):
            return Refusal(recorded.reason, recorded.observation, recorded.message, recorded.about)
        if call.fault is not None:
            return Refusal("faulty_call", texts.faulty_call(call))
        if call.name == ANSWER_TOOL and self._drive.spec.output_schema is not None:
            return self._answer_verdict(call, batch)
        tool = self._drive.bindings.tools.get(call.name)
        if tool is None or call.name not in self._descriptors:
            offered = [descriptor.name for descriptor in self._drive.spec.tools]
            return Refusal("unknown_tool", texts.unknown_tool(call.name, offered))
        if recorded is not None:
            # Checked when it was recorded; a library that checks otherwise today must not change what was decided.
            bound = _bound_late(tool, call)
        else:
            try:
                bound = tool.bind(call.arguments)
            except InvalidArgumentsError as error:
                return Refusal("invalid_arguments", error.diagnostic)
        effect = self._descriptors[call.name].effect
        key = self._key(id, effect)
        print_of = self._fingerprint(call.name, call.arguments)
        return Work(
            id, call.name, call.arguments, effect, key, bound, tool.timeout_s, tool.retries, fingerprint=print_of
        )

    def _key(self, id: str, effect: Effect) -> str | None:
        return idempotency_key(self._drive.run_id, id) if effect is Effect.IDEMPOTENT else None

    def _fingerprint(self, name: str, arguments: JsonObject) -> str:
        """The call's; of one that must not be repeated lightly by what its function would be called with."""
        descriptor = self._descriptors[name]
        if descriptor.effect is not Effect.READ or descriptor.repeatable is False:
            arguments = self._drive.bindings.tools[name].form(arguments)
        return fingerprint(name, arguments)

    def _answer_verdict(self, call: ToolCall, batch: int) -> Refusal | None:
        if batch > 1:
            return Refusal("answer_not_alone", texts.ANSWER_NOT_ALONE)
        check = self._drive.bindings.answer_check
        # Work recorded after an answer that was not refused means that it was taken then; it is not judged again.
        problem = None if check is None or not self._drive.cursor.live else check.problem(call.arguments)
        if problem is None:
            return None
        text = texts.wrong_answer(problem)
        count = self._drive.guards.failures_with(ANSWER_TOOL, text)
        if count == 1:
            return Refusal("answer_invalid", text)
        # A repeated violation is collapsed like any repeated failure.
        return Refusal("answer_invalid", texts.failure(ANSWER_TOOL, text, count), text)

    def _held_back(self, placed: list[Placed]) -> list[Placed]:
        """What becomes of a batch with a bad call: nothing with an effect runs; reads run unless the batch is
        strict."""
        strict = self._drive.spec.policy.batch == "strict"
        return [
            Placed(one.id, one.call, Refusal("not_dispatched", texts.NOT_DISPATCHED))
            if isinstance(one.verdict, Work) and (strict or one.verdict.effect is not Effect.READ)
            else one
            for one in placed
        ]

    async def _accept(self, placed: list[Placed], repair: bool) -> None:
        """Reserves limits and order for the whole batch. A batch of one sound call needs no event: its intent says
        it. `repair`: some call of it is bad."""
        drive = self._drive
        if self._accepted([(one.id, one.call) for one in placed]):
            return
        running = tuple([one.id for one in placed if isinstance(one.verdict, Work)])
        if not running and not repair:
            return
        need = gates.Need(tool_calls=len(running), repairs=int(repair))
        await gates.reserve(drive, placed[0].id, need, lambda limit: self._refuse_all(placed, limit))
        if drive.cursor.live and (repair or len(running) > 1):
            accepted = ev.BatchAccepted(running, repair)
            match drive.cursor.observe(accepted):
                case Live(permit):
                    drive.safe_point()
                    drive.record(permit, accepted)
                case Replayed():
                    pass

    def _accepted(self, calls: Sequence[tuple[str, ToolCall]]) -> bool:
        """Moves past the acceptance of this batch, if that comes next."""
        recorded = self._drive.cursor.peek()
        if not (isinstance(recorded, ev.BatchAccepted) and {id for id, _ in calls}.issuperset(recorded.calls)):
            return False
        # What was accepted stands: calls of it may have been closed since, so it is not compared with what would run
        # now.
        self._drive.cursor.observe(recorded)
        return True

    def _refuse_all(self, placed: list[Placed], limit: str) -> None:
        for one in placed:
            told = one.verdict.text if isinstance(one.verdict, Refusal) else texts.LIMIT_REACHED
            closed = Refusal(_LIMIT + limit, told)
            self.refuse(one.id, one.call.name, closed)

    # Running

    def _groups(self, placed: list[Placed]) -> list[list[Placed]]:
        """Adjacent reads marked parallel together, every other call alone."""
        groups: list[list[Placed]] = []
        for one in placed:
            if groups and self._parallel(one) and self._parallel(groups[-1][-1]):
                groups[-1].append(one)
            else:
                groups.append([one])
        return groups

    def _parallel(self, one: Placed) -> bool:
        descriptor = self._descriptors.get(one.call.name)
        return (
            isinstance(one.verdict, Work)
            and descriptor is not None
            and descriptor.parallel
            and descriptor.repeatable is not False  # its guard counts calls that have settled
            and descriptor.effect is Effect.READ
        )

    def _stop_before(self, group: list[Placed]) -> Refusal | None:
        """The guard before a dispatch; on replay, what it said then."""
        first = group[0]
        if isinstance(first.verdict, Refusal):
            return first.verdict if _end_of(first.verdict) else None
        if not isinstance(first.verdict, Work) or self._drive.cursor.dispatch_of(first.id) is not None:
            return None
        if self._drive.guards.repeats(first.verdict.fingerprint, self._descriptors[first.verdict.tool]):
            return Refusal("repeated_action", texts.REPEATED_ACTION)
        return None

    async def _stop_if_lowered(self, group: list[Placed], rest: list[Placed]) -> None:
        drive, first = self._drive, group[0]
        if drive.cursor.live and isinstance(first.verdict, Work) and drive.cursor.dispatch_of(first.id) is None:
            await gates.stop_if_lowered(drive, first.id, lambda limit: self._refuse_all(rest, limit))

    def _close(self, rest: list[Placed], stop: Refusal) -> tuple[Observation, ...]:
        if stop.reason.startswith(_LIMIT):
            stop = Refusal(stop.reason, texts.LIMIT_REACHED)  # its own text may be about that one call alone
        for one in rest:
            closed = one.verdict if isinstance(one.verdict, Refusal) else stop
            self.refuse(one.id, one.call.name, closed)
        outcome, reason = _end_of(stop) or ("failed", stop.reason)
        self._drive.finish(
            outcome, reason, f"The run was stopped before call {rest[0].id} ({rest[0].call.name}): {stop.text}"
        )

    async def _run_group(self, group: list[Placed]) -> list[Observation]:
        first = group[0]
        if first.verdict is None:
            text = texts.value_text(first.call.arguments)
            return [Observation(first.id, first.call.name, ObservationStatus.ANSWER, text, first.call.arguments)]
        if isinstance(first.verdict, Refusal):
            return [self._tell(first, first.verdict)]
        work = first.verdict
        doubt = self._doubt_before(work)
        if doubt is not None:
            return [self._tell(first, doubt)]
        works = tuple(one.verdict for one in group if isinstance(one.verdict, Work))
        answers = await self._settling.settle(works)
        return [await self._observe(work, answer) for work, answer in zip(works, answers, strict=True)]

    def _doubt_before(self, work: Work) -> Refusal | None:
        """Why an effect is held back: the same one is still going, has ended without the model's knowing, or may have
        happened. Never on replay: what was decided then stands in the journal."""
        drive = self._drive
        if work.effect is Effect.READ or drive.cursor.dispatch_of(work.call) is not None:
            return None
        print_of = work.fingerprint
        if drive.left_behind.holds(print_of):
            return Refusal("still_going", texts.STILL_GOING)
        for call, late in drive.state.settled_late():
            if call.tool == work.tool and self._fingerprint(call.tool, call.arguments) == print_of:
                told = texts.ended_late(late.call, call.tool, texts.value_text(late.output))
                return Refusal("ended_late", told, about=late.call)
        if drive.guards.outcome_unknown(print_of):
            return Refusal("outcome_unknown", texts.OUTCOME_UNKNOWN_BEFORE)
        return None

    def _tell(self, one: Placed, refusal: Refusal) -> Observation:
        if refusal.about is not None:
            self._drive.guards.told(self._fingerprint(one.call.name, one.call.arguments))
        return self.refuse(one.id, one.call.name, refusal)

    def refuse(self, id: str, tool: str, refusal: Refusal) -> Observation:
        """Closes a call that is not dispatched, with what the model reads of it."""
        event = ev.ToolCallRefused(id, tool, refusal.reason, refusal.text, refusal.message, refusal.about)
        match self._drive.cursor.observe(event):
            case Replayed(recorded):
                event = recorded
            case Live(permit):
                self._drive.record(permit, event)
        self._count_refusal(event)
        return Observation(id, tool, ObservationStatus.REFUSED, event.observation)

    def _count_refusal(self, event: ev.ToolCallRefused) -> None:
        if event.reason == "answer_invalid":
            print_of, text = fingerprint(event.tool, {}), event.message or event.observation
            self._drive.guards.settle(Settled(event.tool, print_of, Effect.READ, event.call, text))

    async def _observe(self, work: Work, answer: ev.ToolCallCompleted | ev.ToolCallFailed) -> Observation:
        """The observation of a settled call; a tool that asked to wait is waited for here."""
        observation = await self._settling.observation(work, answer)
        self._count(_counted(work, answer), work.call)
        return observation

    def _count(self, call: Settled, id: str) -> None:
        """Counts a call that ended, and ends a run that goes nowhere."""
        count = self._drive.guards.settle(call)
        if self._drive.cursor.live and count >= self._drive.spec.policy.limits.max_repeated_actions:
            self._drive.finish(
                "partial",
                "no_progress",
                f"The run was stopped after call {id}: {call.tool} was called {count} times with the same "
                "arguments and ended the same way each time, and nothing changed in between.",
            )


def _end_of(refusal: Refusal) -> tuple[str, str] | None:
    """Outcome and terminal reason when a refusal ends the run once its batch is closed."""
    if refusal.reason == "repeated_action":
        return "failed", "repeated_action"
    if refusal.reason.startswith(_LIMIT):
        return gates.end_of(refusal.reason.removeprefix(_LIMIT))
    return None


def _bound_late(tool: Tool, call: ToolCall) -> BoundCall:
    async def run(context: CallContext) -> object:
        return await tool.bind(call.arguments)(context)

    return run


def idempotency_key(run_id: str, call: str) -> str:
    """A call's key: 32 hex characters, the same on every attempt, different for every call.

    Derived, never drawn: a retry after a crash must present the same key.
    """
    return content_digest(f"perdure idempotency key\n{run_id}\n{call}".encode())[:32]


def _is_bad(verdict: Work | Refusal | None) -> bool:
    """Whether a verdict spoils the batch: a fault of the call itself."""
    return isinstance(verdict, Refusal) and verdict.reason in ("faulty_call", "unknown_tool", "invalid_arguments")


def _counted(work: Work, answer: ev.ToolCallCompleted | ev.ToolCallFailed) -> Settled:
    if isinstance(answer, ev.ToolCallFailed):
        result, failure = fingerprint("failed", {"message": answer.message}), answer.message
        unknown = answer.reason == "unknown"
    else:
        result, failure = value_result(answer.output, answer.artifact), None
        unknown = False
    return Settled(work.tool, work.fingerprint, work.effect, result, failure, unknown)
