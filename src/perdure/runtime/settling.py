"""From a checked call to its recorded end: intent, dispatch, completion; and what recovery does with a call that was
in flight.

| found at resume | what happens |
| --- | --- |
| completed | replayed |
| dangling read, dangling idempotent call | a new attempt, charged; the idempotent one with the same key |
| dangling write, settled by a person | recorded as they said, or a new attempt when it did not happen |
| dangling write otherwise | the run parks `needs_reconciliation` |
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NoReturn

from perdure.calls import Suspend
from perdure.contracts.contract import canonical
from perdure.contracts.messages import Effect, Observation, ObservationStatus
from perdure.contracts.values import to_json
from perdure.errors import ConfigurationError, Parked, RefusedError, ValueFormError
from perdure.journal import events as ev
from perdure.journal.cursor import Live, Permit, Replayed
from perdure.prompting import texts
from perdure.runtime import gates
from perdure.runtime.arguments import storable
from perdure.runtime.drive import Drive
from perdure.runtime.executing import Done, Failed, Result, Sleeps, Waits, Work, attempt

FIRST_RETRY_S = 0.1
"""Pause before a live retry, in seconds; doubled for each further one."""

Answer = ev.ToolCallCompleted | ev.ToolCallFailed


class Settling:
    """Brings calls to their end for one drive."""

    def __init__(self, drive: Drive) -> None:
        self._drive = drive
        self.met: set[str] = set()
        """Calls with a recorded intent."""
        self._cut: dict[str, asyncio.CancelledError] = {}
        """Calls that had ended when they were cancelled, and whose large result was being stored."""

    async def settle(self, works: Sequence[Work]) -> list[Answer]:
        """Ends every call of a group; more than one only for parallel reads. Answers in the order of the calls."""
        answers: dict[str, Answer] = {}
        open_calls: list[tuple[Work, Permit]] = []
        # All that is recorded first: what is begun again below is judged by limits, and only what is live is judged.
        for work in works:
            match self._drive.cursor.intend(_intent(work)):
                case Replayed(answer):
                    answers[work.call] = answer
                    self.met.add(work.call)
                case Live(permit):
                    open_calls.append((work, permit))
                    if permit.intended:
                        self.met.add(work.call)
        if self._drive.spec.policy.resume_mode == "conservative" and self._drive.cursor.live:
            self._end_if_closed(works, answers)
            self._close_in_flight([(work, permit) for work, permit in open_calls if permit.intended])
        if open_calls:
            await self._run_all(open_calls, answers, alone=len(works) == 1)
        return [answers[work.call] for work in works]

    async def _run_all(
        self, open_calls: Sequence[tuple[Work, Permit]], answers: dict[str, Answer], *, alone: bool
    ) -> None:
        """Runs what has no recorded answer, and adds the answers."""
        live: list[tuple[Work, Permit]] = []
        try:
            for work, permit in open_calls:
                known = await self._begin(work, permit)
                if known is None:
                    live.append((work, permit))
                else:
                    answers[work.call] = known
            if live:
                await self._drive.dispatchable()
        except (asyncio.CancelledError, Parked):
            for work, permit in live:
                self._cancelled(work, permit, begun=permit.intended)
            raise
        for answer in await self._dispatch(live, alone=alone):
            answers[answer.call] = answer

    async def _begin(self, work: Work, permit: Permit) -> Answer | None:
        """Records the intent, or decides what becomes of one that was left open. None: it is to be dispatched."""
        drive = self._drive
        if not permit.intended:
            drive.safe_point()
            drive.record(permit, _intent(work))
            self.met.add(work.call)
            return None
        found = drive.state.open[work.call]
        resolved = found.resolution
        if resolved is not None and resolved.verdict != "did_not_happen":
            return self._resolved(work, permit, resolved)
        if work.effect is Effect.WRITE and resolved is None:
            drive.park("needs_reconciliation", call=work.call, tool=work.tool, arguments=work.arguments)
        await gates.reserve(drive, work.call, gates.Need(tool_calls=1))
        drive.safe_point()
        drive.record(permit, ev.AttemptStarted(work.call, found.attempt + 1, "recovery"))
        return None

    def _resolved(self, work: Work, permit: Permit, resolved: ev.EffectResolved) -> Answer:
        if resolved.verdict == "happened":
            return self._completed(work, permit, resolved.result)
        return self._failed(work, permit, Failed("handler", resolved.text or "a person recorded that it failed"))

    def _close_in_flight(self, dangling: Sequence[tuple[Work, Permit]]) -> None:
        """In conservative mode nothing is started again: what was in flight is closed, and the run ends."""
        unsettled = [(work, permit) for work, permit in dangling if self._in_flight(work)]
        if not unsettled:
            return
        first = unsettled[0][0]
        # A person who said that it did not happen has taken the doubt away, if not the interruption.
        doubt = first.effect is not Effect.READ and self._drive.state.open[first.call].resolution is None
        reason = "indeterminate" if doubt else "interrupted"
        for work, permit in unsettled:
            self._failed(work, permit, Failed(reason, "the run stopped while this call was in flight"))
        self._end_interrupted(first, doubt)

    def _end_interrupted(self, work: Work, doubt: bool) -> NoReturn:
        stopped = f"The run stopped inside call {work.call} ({work.tool})"
        if doubt:
            self._drive.finish("indeterminate", "effect_indeterminate", f"{stopped}, which may have taken effect.")
        self._drive.finish("interrupted", "interrupted", f"{stopped}.")

    def _end_if_closed(self, works: Sequence[Work], answers: Mapping[str, Answer]) -> None:
        """A conservative resume that was cut between closing its calls and ending the run ends it now."""
        for work in works:
            answer = answers.get(work.call)
            if isinstance(answer, ev.ToolCallFailed) and answer.reason in ("interrupted", "indeterminate"):
                self._end_interrupted(work, answer.reason == "indeterminate")

    def _in_flight(self, work: Work) -> bool:
        """Whether it is still open what became of a call; not so where a person has said that it happened or failed."""
        resolved = self._drive.state.open[work.call].resolution
        return resolved is None or resolved.verdict == "did_not_happen"

    async def _dispatch(self, live: Sequence[tuple[Work, Permit]], *, alone: bool) -> list[Answer]:
        if len(live) == 1:
            return [await self._run(*live[0], alone=alone)]
        # Every call of the group ends before anything is raised: parking lets calls in flight settle.
        tasks = [asyncio.ensure_future(self._run(*one, alone=alone)) for one in live]
        try:
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        except asyncio.CancelledError:
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            raise
        for one in ended:
            if isinstance(one, BaseException):
                raise one
        return [one for one in ended if not isinstance(one, BaseException)]

    async def _run(self, work: Work, permit: Permit, *, alone: bool) -> Answer:
        """Attempts until it ends; a completion is queued the moment it is there."""
        try:
            answer = await self._record(work, permit, await self._attempts(work, permit), alone)
        except asyncio.CancelledError:
            self._cancelled(work, permit, begun=True)
            raise
        cut = self._cut.pop(work.call, None)
        if cut is not None:
            raise cut
        return answer

    async def _attempts(self, work: Work, permit: Permit) -> Result:
        drive = self._drive
        number = drive.state.open[work.call].attempt
        retries = work.retries if work.effect is not Effect.WRITE else 0
        while True:
            result = await attempt(drive, work, number)
            if not (isinstance(result, Failed) and result.again and retries > 0 and self._may_retry()):
                return result
            await drive.pause(FIRST_RETRY_S * 2 ** (work.retries - retries))
            retries -= 1
            number += 1
            drive.record(permit, ev.AttemptStarted(work.call, number, "retry", result.message[:500]))
            await drive.dispatchable()

    def _may_retry(self) -> bool:
        drive = self._drive
        if drive.stopping.is_set() or drive.cancel_requested is not None:
            return False
        # A retry is an extra charge: past a limit the failure stands as it is.
        return gates.first_crossing(drive, gates.Need(tool_calls=1)) is None

    def _cancelled(self, work: Work, permit: Permit, *, begun: bool) -> None:
        """Closes a call that a cancel cut off. `begun`: some attempt at it may have reached the outside."""
        if not self._drive.cancelling:
            return
        if not begun:
            self._failed(work, permit, Failed("interrupted", "the run was cancelled before this call began"))
            return
        unknown = work.effect is not Effect.READ
        if unknown:
            self._drive.unresolved.append(work.call)
        message = "the run was cancelled while this call was in flight"
        self._failed(work, permit, Failed("unknown" if unknown else "interrupted", message))

    async def _record(self, work: Work, permit: Permit, result: Result, alone: bool) -> Answer:
        match result:
            case Done(value):
                return await self._completed_or_stored(work, permit, value)
            case Failed():
                return await self._failed_or_stored(work, permit, result, alone)
            case Waits(suspend):
                return self._suspended(work, permit, suspend, alone)
            case Sleeps(until):
                woke = texts.woke(gates.from_ns(until).isoformat())
                return self._note(permit, ev.ToolCallCompleted(work.call, observation=woke, sleep_until=until))

    def _suspended(self, work: Work, permit: Permit, suspend: Suspend, alone: bool) -> Answer:
        check = self._drive.bindings.check_schema
        try:
            schema = to_json(suspend.schema) if check is None else check(suspend.schema, work.tool)
        except (ConfigurationError, ValueFormError) as error:
            message = f"{work.tool} asked for an answer that nothing could be checked against: {error}"
            return self._failed(work, permit, Failed("output_form", message), alone)
        if not (isinstance(suspend.reason, str) and isinstance(suspend.kind, str)):
            message = f"{work.tool} asked to wait with a reason or kind that is no text"
            return self._failed(work, permit, Failed("output_form", message), alone)
        wanted = ev.WaitRequest(storable(suspend.reason), storable(suspend.kind), schema)
        return self._note(permit, ev.ToolCallCompleted(work.call, suspend=wanted))

    async def _completed_or_stored(self, work: Work, permit: Permit, value: object) -> Answer:
        text = texts.value_text(value)
        store = self._drive.bindings.put_artifact
        if work.inline or len(text) <= texts.INLINE_CAP or store is None:
            return self._completed(work, permit, value)
        digest = await self._stored(work, store, canonical(value))
        shown = texts.large_value(text, digest)
        return self._note(permit, ev.ToolCallCompleted(work.call, observation=shown, artifact=digest))

    def _completed(self, work: Work, permit: Permit, value: object) -> Answer:
        shown = None if texts.value_text(value).strip() else texts.NO_OUTPUT
        return self._note(permit, ev.ToolCallCompleted(work.call, value, shown))

    async def _stored(self, work: Work, store: Callable[[bytes], Awaitable[str]], data: bytes) -> str:
        """Stores bytes to the end, also under a cancel: the call has ended, and its result must not be lost for
        that. The cancel goes on once the result is recorded."""
        storing = asyncio.ensure_future(store(data))
        try:
            return await asyncio.shield(storing)
        except asyncio.CancelledError as cancel:
            self._cut[work.call] = cancel
            return await storing
        except RefusedError as error:
            self._drive.refuse(error)

    async def _failed_or_stored(self, work: Work, permit: Permit, failed: Failed, alone: bool) -> Answer:
        store = self._drive.bindings.put_artifact
        artifact = None
        if len(failed.message) > texts.INLINE_CAP and store is not None:
            artifact = await self._stored(work, store, failed.message.encode("utf-8"))
        return self._failed(work, permit, failed, alone, artifact)

    def _failed(
        self, work: Work, permit: Permit, failed: Failed, alone: bool = True, artifact: str | None = None
    ) -> Answer:
        message = failed.message
        if artifact is not None:
            message = texts.shortened(message, texts.SHOWN_HEAD, texts.SHOWN_TAIL)
        if failed.reason == "unknown":
            shown = texts.unknown_outcome(work.tool, message)
        elif failed.reason in ("interrupted", "indeterminate"):
            shown = texts.INTERRUPTED
        else:
            # Calls that overlap end in any order, so what one shows must not depend on another: they are not collapsed.
            count = self._drive.guards.failures_with(work.tool, message) if alone else 1
            shown = texts.failure(work.tool, message, count)
        return self._note(permit, ev.ToolCallFailed(work.call, failed.reason, message, shown, artifact))

    def _note(self, permit: Permit, answer: Answer) -> Answer:
        self._drive.record(permit, answer)
        return answer

    async def observation(self, work: Work, answer: Answer) -> Observation:
        """What the model reads of a settled call; waits here for what its tool asked to wait for."""
        if isinstance(answer, ev.ToolCallFailed):
            status = {
                "unknown": ObservationStatus.UNKNOWN,
                "indeterminate": ObservationStatus.UNKNOWN,
                "interrupted": ObservationStatus.INTERRUPTED,
            }.get(answer.reason, ObservationStatus.FAILED)
            return Observation(work.call, work.tool, status, answer.observation, artifact=answer.artifact)
        if answer.suspend is not None:
            wanted = answer.suspend
            given = await gates.wait_for_answer(self._drive, work.call, wanted.reason, wanted.kind, wanted.schema)
            text = given.observation if given.observation is not None else texts.value_text(given.value)
            return Observation(work.call, work.tool, ObservationStatus.COMPLETED, text, given.value)
        if answer.sleep_until is not None:
            await gates.sleep_until(self._drive, work.call, answer.sleep_until)
        return value_observation(answer, work.tool)


def value_observation(answer: ev.ToolCallCompleted, tool: str) -> Observation:
    """What the model reads of a value that nothing had to be waited for."""
    shown = answer.observation if answer.observation is not None else texts.value_text(answer.output)
    return Observation(answer.call, tool, ObservationStatus.COMPLETED, shown, answer.output, answer.artifact)


def _intent(work: Work) -> ev.ToolCallRequested:
    return ev.ToolCallRequested(work.call, work.tool, work.arguments, work.effect, work.key)
