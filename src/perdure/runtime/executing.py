"""One attempt at one call: the function is run within its time limit, and however it ends becomes a fact."""

import asyncio
from collections.abc import Awaitable
from datetime import datetime

import msgspec

from perdure.calls import CallContext, Media, Sleep, Suspend, ToolFailed, Unknown
from perdure.contracts.contract import JsonObject, JsonValue
from perdure.contracts.messages import Effect
from perdure.contracts.values import to_json
from perdure.errors import ValueFormError
from perdure.ports import BoundCall
from perdure.runtime.arguments import storable
from perdure.runtime.drive import Drive
from perdure.runtime.gates import from_ns, storable_instant, to_ns
from perdure.runtime.journaling import until_done

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
    try:
        return _result(work, await _within(work.bound(context), work.timeout_s))
    except TimeoutError as error:
        context.give_up()
        return _lost(work, "timeout", _text_of(error) or "it timed out")
    except ConnectionError as error:
        return _lost(work, "handler", described(error))
    except ToolFailed as error:
        return Failed("handler", _text_of(error))
    except asyncio.CancelledError:
        context.give_up()
        task = asyncio.current_task()
        if drive.cancel_requested is not None or (task is not None and task.cancelling()):
            raise
        return Failed("handler", "the tool cancelled itself", again=True)
    except Exception as error:  # noqa: BLE001 - what a user's function raises is the call's failure, never the run's
        return Failed("handler", described(error), again=True)


async def _within(work: Awaitable[object], timeout_s: float | None) -> object:
    # A task of its own, so that a function that swallows its cancellation can be left behind.
    task = asyncio.ensure_future(work)
    try:
        if timeout_s is None:
            await until_done(task)
        else:
            await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        await _give_up(task)
        raise
    if task.done():
        return task.result()
    await _give_up(task)
    raise TimeoutError(f"it did not end within its time limit of {timeout_s or 0:g} s")


async def _give_up(task: "asyncio.Future[object]") -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=GRACE_S)
    # Reading the outcome marks it as seen: what an abandoned call raises later is nobody's to handle.
    task.add_done_callback(lambda ended: None if ended.cancelled() else ended.exception())


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
