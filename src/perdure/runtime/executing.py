"""One attempt at one call: the function is run within its time limit, and however it ends becomes a fact."""

import asyncio
from contextlib import suppress
from datetime import datetime
from typing import Any

import msgspec

from perdure.calls import CallContext, LeftThread, Media, Sleep, Suspend, ToolFailed, Unknown
from perdure.contracts.contract import JsonObject, JsonValue
from perdure.contracts.messages import Effect
from perdure.contracts.values import to_json
from perdure.errors import Parked, RefusedError, ValueFormError
from perdure.journal import events as ev
from perdure.ports import BoundCall
from perdure.prompting import texts
from perdure.runtime.arguments import storable
from perdure.runtime.drive import Drive
from perdure.runtime.gates import from_ns, storable_instant, to_ns
from perdure.runtime.guards import fingerprint
from perdure.runtime.journaling import until_done
from perdure.runtime.left_behind import Attempt

GRACE_S = 1.0
"""How long a cancelled function may take to end before it is left behind, in seconds."""


class Work(msgspec.Struct, frozen=True):
    """One call, checked and ready to run."""

    call: str
    tool: str
    arguments: JsonObject
    effect: Effect
    key: str | None
    bound: BoundCall
    timeout_s: float | None = None
    retries: int = 0
    inline: bool = False
    """The value goes to the loop and not to the model, so it is recorded whole however large it is."""
    fingerprint: str = ""
    """Names the call by its tool and arguments, for the guards; empty for a call of the loop's own making."""


class Done(msgspec.Struct, frozen=True):
    """It returned a value with an agreed form."""

    value: JsonValue


class Failed(msgspec.Struct, frozen=True):
    """It ended without a value. `reason` as in `ToolCallFailed`; `again` says whether a live retry may help."""

    reason: str
    message: str
    again: bool = False


class Waits(msgspec.Struct, frozen=True):
    """It asked to be answered later."""

    suspend: Suspend


class Sleeps(msgspec.Struct, frozen=True):
    """It asked to go on at an instant, in UTC nanoseconds."""

    until: int


Result = Done | Failed | Waits | Sleeps


async def attempt(drive: Drive, work: Work, number: int) -> Result:
    """Runs the function once. Raises nothing but what ends the drive (a cancel)."""
    context = CallContext(drive.run_id, work.call, number, drive.epoch, work.key, _deadline(drive, work.timeout_s))
    # A task of its own, so that a function that swallows its cancellation can be left behind.
    task = asyncio.ensure_future(_run(work, context))
    try:
        if work.timeout_s is None:
            await until_done(task)
        else:
            await asyncio.wait({task}, timeout=work.timeout_s)
        if task.done():
            return task.result()
    except asyncio.CancelledError:
        context.give_up()
        await _give_up(task)
        current = asyncio.current_task()
        if drive.cancel_requested is not None or (current is not None and current.cancelling()):
            raise
        return Failed("handler", "the tool cancelled itself", again=True)
    context.give_up()
    await _give_up(task)
    _leave_behind(drive, work, number, task, context.left)
    return _lost(work, "timeout", f"it did not end within its time limit of {work.timeout_s or 0:g} s")


async def _run(work: Work, context: CallContext) -> Result:
    """What the function comes to. Whatever it raises is caught here: of a call that was left behind nobody else would,
    and the event loop prints what nobody catches."""
    try:
        return _result(work, await work.bound(context))
    except Exception as error:  # noqa: BLE001 - what a user's function raises is the call's failure, never the run's
        return _failure(work, error)


def _failure(work: Work, error: Exception) -> Failed:
    match error:
        case TimeoutError():
            return _lost(work, "timeout", _text_of(error) or "it timed out")
        case ConnectionError():
            return _lost(work, "handler", described(error))
        case ToolFailed():
            return Failed("handler", _text_of(error))
        case _:
            return Failed("handler", described(error), again=True)


async def _give_up(task: "asyncio.Task[Result]") -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=GRACE_S)


def _leave_behind(drive: Drive, work: Work, number: int, task: "asyncio.Task[Result]", left: LeftThread | None) -> None:
    """An attempt past its time limit: what it comes to is recorded as late, if the drive lasts that long. It goes on in
    its thread, if it has one that a cancel could not stop."""
    rest: asyncio.Future[Any] = task if left is None else left.result
    if rest.cancelled():
        return
    print_of = work.fingerprint or fingerprint(work.tool, work.arguments)
    one = Attempt(print_of, rest, None if left is None else left.thread)
    drive.left_behind.add(one)

    def ended(_: "asyncio.Future[Any]") -> None:
        drive.left_behind.remove(one)
        if not (rest.cancelled() or drive.over or isinstance(drive.latch, RefusedError)):
            # Called by the event loop, which has no use for the signal of a drive that is stopping.
            with suppress(RefusedError, Parked):
                result = task.result() if left is None else _result_of(work, left.result)
                drive.note(_late(work, number, result))

    rest.add_done_callback(ended)


def _result_of(work: Work, thread: "asyncio.Future[object]") -> Result:
    try:
        return _result(work, thread.result())
    except Exception as error:  # noqa: BLE001 - as in _run
        return _failure(work, error)


def _late(work: Work, number: int, result: Result) -> ev.LateResultObserved:
    match result:
        case Done(value):
            text = texts.value_text(value)
            whole = len(text) <= texts.INLINE_CAP
            shown = value if whole else texts.shortened(text, texts.SHOWN_HEAD, texts.SHOWN_TAIL)
            return ev.LateResultObserved(work.call, number, shown)
        case Failed(reason, message):
            bounded = texts.shortened(message, texts.SHOWN_HEAD, texts.SHOWN_TAIL)
            return ev.LateResultObserved(work.call, number, None, reason, bounded)
        case _:
            asked = f"{work.tool} asked to wait, when its call had passed its time limit"
            return ev.LateResultObserved(work.call, number, None, "output_form", asked)


def _lost(work: Work, reason: str, message: str) -> Failed:
    """A time limit or a lost connection: an effect may have happened all the same."""
    if work.effect is Effect.READ:
        return Failed(reason, message, again=True)
    return Failed("unknown", message, again=work.effect is Effect.IDEMPOTENT)


def _result(work: Work, value: object) -> Result:
    if isinstance(value, Unknown):
        return Failed("unknown", storable(str(value.reason)))
    if isinstance(value, ToolFailed):
        return Failed("handler", _text_of(value))
    if isinstance(value, Suspend):
        return Waits(value)
    if isinstance(value, Sleep):
        return _sleeps(work, value.until)
    if isinstance(value, Media):
        return Failed("output_form", f"{work.tool} ran, but media results cannot be shown to the model in this release")
    try:
        return Done(to_json(value))
    except ValueFormError as error:
        return Failed(
            "output_form", f"{work.tool} ran, but its result cannot be stored: at {error.path}: {error.found}"
        )


def _sleeps(work: Work, until: datetime) -> Result:
    if until.utcoffset() is None:
        return Failed(
            "output_form", f"{work.tool} asked to sleep until {until.isoformat()}, a time without a time zone"
        )
    if not storable_instant(to_ns(until)):
        return Failed("output_form", f"{work.tool} asked to sleep until {until.isoformat()}, beyond the year 2262")
    return Sleeps(to_ns(until))


def _deadline(drive: Drive, timeout_s: float | None) -> datetime | None:
    if timeout_s is None:
        return None
    return from_ns(drive.bindings.clock.now_ns() + int(timeout_s * 10**9))


def described(error: BaseException) -> str:
    """The error with its causes, outermost first."""
    lines, seen = [], set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        lines.append(f"{type(current).__name__}: {_text_of(current)}")
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "\ncaused by ".join(lines)


def _text_of(error: BaseException) -> str:
    try:
        return storable(str(error))
    except Exception as broken:  # noqa: BLE001 - an error whose own text cannot be made
        return f"(its text could not be read: {type(broken).__name__})"
