"""From a loop to a recorded end or a park. The latch decides, not what the loop returned, raised or swallowed."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from perdure.contracts.contract import JsonValue
from perdure.contracts.values import to_json
from perdure.errors import DivergedError, LoopStoppedError, ModelError, Parked, RefusedError, ValueFormError
from perdure.journal import events as ev
from perdure.journal.cursor import Live, Replayed
from perdure.prompting.texts import value_text
from perdure.runtime.arguments import storable
from perdure.runtime.context import RunContext
from perdure.runtime.drive import CANCELLED, ENDED, Drive
from perdure.runtime.executing import described

Loop = Callable[[RunContext, str], Awaitable[Any]]

LOOP_ERROR = "loop_error"
"""Terminal reason of a run whose loop raised an error of its own."""
_STOPPED = (Exception, asyncio.CancelledError, BaseExceptionGroup, Parked, SystemExit, GeneratorExit)
"""What a loop may stop with. A process that exits by the user's code would leave the run without an end."""
_LONGEST_ANSWER = 4_000
"""Characters of an error that an end quotes."""


async def run_loop(drive: Drive, loop: Loop, task: JsonValue) -> None:
    """Drives the loop until the run ends or parks, and records the end.

    Raises:
        RefusedError: the drive was refused (divergence, a lost lease, a failed store), or its loop stopped inside a
            call of its own; nothing more was recorded.
        asyncio.CancelledError: the process is going down; the run stays as recorded.
    """
    context = RunContext(drive)
    text = value_text(task)
    context.begin(text)
    try:
        output = await loop(context, text)
        if drive.latch is None and drive.cursor.live and drive.bindings.answer_check is not None:
            await drive.durable()  # before code of the user's runs, a check of the answer too
    except _STOPPED as error:  # the latch decides what it comes to
        if drive.latch is None:
            _end_by_error(drive, error)
        elif isinstance(error, asyncio.CancelledError) and drive.cancel_requested is None:
            if isinstance(drive.latch, RefusedError):
                raise drive.latch from error
            raise
    else:
        if drive.latch is None:
            _end_in_success(drive, output)
    finally:
        drive.over = True
    await _after(drive)


def _end_in_success(drive: Drive, output: object) -> None:
    try:
        value = to_json(output)
    except ValueFormError as error:
        return _end(drive, "failed", LOOP_ERROR, f"The loop returned a value that cannot be stored: {error}")
    if _left_open(drive, None):
        return None
    problem = _output_problem(drive, value)
    if problem is not None:
        return _end(
            drive, "failed", LOOP_ERROR, f"The loop returned a value that does not fit the output schema: {problem}"
        )
    proposal = ev.ProposalReceived(value)
    try:
        match drive.cursor.observe(proposal):
            case Live(permit):
                drive.safe_point()
                drive.record(permit, proposal)
            case Replayed():
                pass
        if drive.cursor.live and drive.state.end is None:
            drive.note(ev.RunCompleted("final", "unverified", value_text(value)))
    except RefusedError as error:
        drive.latch = drive.latch or error
    except Parked:
        return None  # latched by the safe point
    return None


def _left_open(drive: Drive, raised: BaseException | None) -> bool:
    """Whether a call is under way that the loop did not wait for: what becomes of it is not known, so nothing is said
    of the run; it stops here, and a resume settles the call first."""
    if not (drive.cursor.live and drive.state.open):
        return False
    found = "the loop returned" if raised is None else f"the loop raised {described(raised)[:_LONGEST_ANSWER]}"
    drive.latch = LoopStoppedError(drive.run_id, tuple(drive.state.open), found)
    drive.latch.__cause__ = raised
    return True


def _output_problem(drive: Drive, value: JsonValue) -> str | None:
    check = drive.bindings.answer_check
    # Recorded proposals were judged when they were made.
    return None if check is None or not drive.cursor.live else check.problem(value)


def _end_by_error(drive: Drive, error: BaseException) -> None:
    if isinstance(error, RefusedError):
        drive.latch = error
    elif isinstance(error, asyncio.CancelledError):
        if drive.cancel_requested is None:
            raise error
        drive.latch = Parked(CANCELLED, {})  # the loop was waiting for something of its own
    elif isinstance(error, ModelError):
        _end(
            drive, "failed", "model_error", storable(f"The model could not be asked: {error}")[:_LONGEST_ANSWER], error
        )
    else:
        answer = f"The loop stopped with an error: {described(error)}"[:_LONGEST_ANSWER]
        _end(drive, "failed", LOOP_ERROR, answer, error)


def _end(drive: Drive, outcome: str, reason: str, answer: str, raised: BaseException | None = None) -> None:
    if not drive.cursor.live:
        # Recorded work follows that the loop did not come to this time: not a failure to record, but a divergence.
        recorded = drive.cursor.peek()
        drive.latch = _diverged(recorded, answer)
        return
    if _left_open(drive, raised):
        return
    try:
        drive.note(ev.RunFailed(outcome, reason, answer))
    except RefusedError as error:
        drive.latch = drive.latch or error


def _diverged(recorded: ev.Event | None, answer: str) -> RefusedError:
    held = "nothing" if recorded is None else recorded.event_kind
    return DivergedError("end", held, f"the end of the run ({answer[:200]})", "request")


async def _after(drive: Drive) -> None:
    """What the latch asks for, then everything durable."""
    latch = drive.latch
    if isinstance(latch, LoopStoppedError):
        await drive.journal.commit()
    if isinstance(latch, RefusedError):
        raise latch
    if isinstance(latch, Parked) and latch.kind == ENDED:
        _record_end(drive, ev.RunFailed(**latch.detail))
    elif isinstance(latch, Parked) and latch.kind == CANCELLED:
        _cancel(drive)
    await drive.journal.commit()


def _cancel(drive: Drive) -> None:
    request = drive.cancel_requested or drive.state.cancel or ev.CancelRequested()
    unresolved = (*drive.unresolved, *(call.call for call in drive.state.may_have_acted()))
    if drive.state.cancel is None:
        _record_end(drive, request)
    _record_end(drive, ev.RunCancelled(cancelled_answer(request, unresolved), unresolved))


def cancelled_answer(request: ev.CancelRequested, unresolved: tuple[str, ...]) -> str:
    """What happened, for a person."""
    why = f": {request.reason}" if request.reason else ""
    return f"The run was cancelled{why}.{doubt_named(unresolved)}"


def doubt_named(unresolved: tuple[str, ...]) -> str:
    """What an end says of calls that nothing more will be heard of."""
    return f" Calls whose effect may have happened: {', '.join(unresolved)}." if unresolved else ""


def _record_end(drive: Drive, event: ev.Event) -> None:
    if drive.state.end is None:
        drive.journal.queue(event)
