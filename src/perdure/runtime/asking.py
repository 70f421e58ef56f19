"""One model call: reserve, record the intent, stream, record the turn. A broken stream is another attempt at the same
call."""

from typing import NoReturn

import msgspec

from perdure.contracts.contract import canonical
from perdure.contracts.limits import cost_of
from perdure.contracts.messages import AssistantTurn, CallPart, Usage
from perdure.contracts.notices import Notice, NoticeKind
from perdure.errors import DivergedError, ModelError
from perdure.journal import events as ev
from perdure.journal.cursor import Live, Permit, Replayed
from perdure.journal.transcript import Transcript, TurnEntry, UserEntry, keyed_digest
from perdure.ports import Degraded
from perdure.prompting.request import ModelRequest
from perdure.prompting.wire_names import true_names
from perdure.runtime import gates
from perdure.runtime.arguments import storable
from perdure.runtime.drive import Drive
from perdure.runtime.executing import described
from perdure.runtime.turns import assemble

ATTEMPTS = 3
"""Attempts at one model call in one drive, for failures that may pass."""
FIRST_RETRY_S = 0.5
"""Pause before the second attempt, in seconds; doubled for each further one."""
LONGEST_RETRY_S = 60.0
"""A provider that asks for a longer pause than this fails the call."""
_BYTES_PER_TOKEN = 4
"""For estimating tokens a provider did not report; always flagged as an estimate."""


class Asking:
    """The model side of one drive."""

    def __init__(self, drive: Drive) -> None:
        self._drive = drive
        self._sent: tuple[object, ...] = ()
        """The parts of the last request beside the transcript; most requests of a run have the same."""
        self._part_digests: dict[str, str] = {}

    async def ask(self, call: str, request: ModelRequest) -> AssistantTurn:
        """The turn, replayed or asked for; appended to the transcript the request is a view of.

        Raises:
            ModelError: the call failed for good.
        """
        drive, transcript = self._drive, request.transcript.owner
        if drive.cursor.live:  # what is replayed is judged by neither: nothing is made up to ask them
            drive.must_not_have_ended(f"a model call at {call}")
            repairs = int(request.notice is not None and request.notice.kind is not NoticeKind.NO_CALL)
            await gates.reserve(drive, call, gates.Need(model_turns=1, repairs=repairs))
        asked, parts = self._intent(call, request, transcript)
        match drive.cursor.intend_model(asked, parts):
            case Replayed(ev.ModelCallCompleted(turn=turn)):
                pass
            case Replayed(failed):
                assert isinstance(failed, ev.ModelCallFailed)
                if failed.reason == "interrupted" and drive.cursor.live:
                    self._end_interrupted(failed)
                raise _error_of(failed)
            case Live(permit):
                request = msgspec.structs.replace(request, transcript=transcript.view(), notice=None)
                turn = await self._live(permit, asked, request)
        transcript.append(TurnEntry(call, turn))
        return turn

    def _intent(
        self, call: str, request: ModelRequest, transcript: Transcript
    ) -> tuple[ev.ModelCallRequested, dict[str, str]]:
        recorded, notice = self._drive.cursor.peek(), request.notice
        replayed = isinstance(recorded, ev.ModelCallRequested)
        if isinstance(recorded, ev.ModelCallRequested):
            # The recorded text is what was sent: a later release may word a notice otherwise, but not send another
            # kind.
            if recorded.notice is not notice and (held := _kind(recorded.notice)) != (wanted := _kind(notice)):
                self._drive.refuse(DivergedError(call, f"notice {held}", f"notice {wanted}", "notice"))
            notice = recorded.notice
        if notice is not None:
            transcript.append(UserEntry(notice.text))
        parts = self._digests_of(request)
        changed = {} if replayed else self._drive.cursor.changed_parts(parts)
        target, digest = self._drive.bindings.model.target, transcript.digest(self._drive.key)
        return ev.ModelCallRequested(call, target, digest, changed, notice), parts

    def _digests_of(self, request: ModelRequest) -> dict[str, str]:
        sent = (request.instructions, request.tools, request.settings, request.tool_choice)
        if sent != self._sent:
            parts = {
                "system": request.instructions,
                "tools": request.tools,
                "settings": (request.settings, request.tool_choice),
            }
            self._part_digests = {name: keyed_digest(self._drive.key, canonical(part)) for name, part in parts.items()}
            self._sent = sent
        return self._part_digests

    async def _live(self, permit: Permit, asked: ev.ModelCallRequested, request: ModelRequest) -> AssistantTurn:
        drive = self._drive
        if permit.intended:
            await self._recover(permit)
        else:
            drive.safe_point()
            drive.record(permit, asked)
        attempt = 1
        while True:
            await drive.dispatchable()
            degradations: list[Degraded] = []
            try:
                turn = await self._stream(asked.call, request, degradations)
            except Exception as raised:  # noqa: BLE001 - a client's defect is the call's failure
                self._record_degradations(permit, degradations)
                error = raised if isinstance(raised, ModelError) else _of_client(raised)
                if attempt >= ATTEMPTS or not _may_pass(error):
                    self._fail(permit, error)
                await self._again(permit, error, attempt)
                attempt += 1
                continue
            turn = _with_usage(turn, request)
            self._record_degradations(permit, degradations)
            drive.record(permit, ev.ModelCallCompleted(permit.call, turn, cost_of(turn.usage, drive.spec.policy.price)))
            return turn

    def _record_degradations(self, permit: Permit, degradations: list[Degraded]) -> None:
        recorded = {(event.code, event.summary) for event in self._drive.state.degradations}
        for one in degradations:
            if not (one.standing and (one.code, one.summary) in recorded):
                self._drive.record(permit, ev.ExecutionDegraded(one.code, one.summary))

    async def _stream(self, call: str, request: ModelRequest, degradations: list[Degraded]) -> AssistantTurn:
        model, on_delta = self._drive.bindings.model, self._drive.bindings.on_delta
        turn = await assemble(
            model.stream(request),
            strict=model.strict,
            idle_timeout_s=request.settings.idle_timeout_s,
            timeout_s=request.settings.timeout_s,
            on_delta=None if on_delta is None else lambda event: on_delta(call, event),
            degradations=degradations,
        )
        return _by_true_names(turn, request)

    async def _recover(self, permit: Permit) -> None:
        """The driver before stopped inside this call: it stays charged, and a new attempt is charged too."""
        drive = self._drive
        if drive.spec.policy.resume_mode == "conservative":
            message = "a model call was in flight when the run stopped; nothing is started again in conservative mode"
            closed = ev.ModelCallFailed(permit.call, "interrupted", message)
            drive.record(permit, closed)
            self._end_interrupted(closed)
        await gates.reserve(drive, permit.call, gates.Need(model_turns=1))
        drive.safe_point()
        n = drive.state.open[permit.call].attempt + 1
        drive.record(permit, ev.AttemptStarted(permit.call, n, "recovery"))

    def _end_interrupted(self, closed: ev.ModelCallFailed) -> NoReturn:
        message = f"The run stopped inside model call {closed.call}: {closed.message}."
        self._drive.finish("interrupted", "interrupted", message)

    async def _again(self, permit: Permit, error: ModelError, attempt: int) -> None:
        drive = self._drive
        usage = getattr(error, "usage", None)
        if usage is not None:
            # Booked before anything is judged or waited for: it was spent, whatever comes of the next attempt.
            drive.record(permit, ev.ModelUsageReported(permit.call, usage))
        pause = error.retry_after_s if error.retry_after_s is not None else FIRST_RETRY_S * 2 ** (attempt - 1)
        await drive.pause(pause)
        await gates.reserve(drive, permit.call, gates.Need(model_turns=1))
        drive.safe_point()
        n = drive.state.open[permit.call].attempt + 1
        why = storable(f"{error.kind}: {error.found}")[:500]
        drive.record(permit, ev.AttemptStarted(permit.call, n, "retry", why))

    def _fail(self, permit: Permit, error: ModelError) -> NoReturn:
        usage = getattr(error, "usage", None)
        failed = ev.ModelCallFailed(permit.call, error.kind, storable(str(error))[:2000], error.retryable, usage)
        self._drive.record(permit, failed)
        raise _error_of(failed) from error


def _by_true_names(turn: AssistantTurn, request: ModelRequest) -> AssistantTurn:
    """A tool has one name here, whatever a provider had to call it: limits, approvals and the journal go by that."""
    names = true_names(tool.name for tool in request.tools)
    if not any(call.name in names for call in turn.calls):
        return turn
    content = tuple(
        CallPart(msgspec.structs.replace(part.call, name=names.get(part.call.name, part.call.name)))
        if isinstance(part, CallPart)
        else part
        for part in turn.content
    )
    return msgspec.structs.replace(turn, content=content)


def _kind(notice: Notice | None) -> NoticeKind | None:
    return None if notice is None else notice.kind


def _error_of(failed: ev.ModelCallFailed) -> ModelError:
    """The error a loop sees: drawn from the record alone, so that it is the same on replay."""
    return ModelError(failed.reason, failed.message, where=f"call {failed.call}", retryable=failed.retryable)


def _of_client(error: Exception) -> ModelError:
    """A defect of a client is the call's failure, recorded as one: a loop may catch it, and must meet it on replay."""
    return ModelError("client", described(error), where="the model client")


def _may_pass(error: ModelError) -> bool:
    return error.retryable and (error.retry_after_s or 0.0) <= LONGEST_RETRY_S


def _with_usage(turn: AssistantTurn, request: ModelRequest) -> AssistantTurn:
    """Fills in what the provider did not report, flagged as an estimate: unknown usage would otherwise escape every
    limit."""
    usage = turn.usage
    if usage.input_tokens is not None and usage.output_tokens is not None:
        return turn
    sent = request.transcript.owner.hashed_bytes + len(request.instructions)
    received = len(canonical(turn.content))
    estimated = Usage(
        input_tokens=usage.input_tokens if usage.input_tokens is not None else -(-sent // _BYTES_PER_TOKEN),
        output_tokens=usage.output_tokens if usage.output_tokens is not None else -(-received // _BYTES_PER_TOKEN),
        cached_tokens=usage.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        estimated=True,
    )
    return msgspec.structs.replace(turn, usage=estimated)
