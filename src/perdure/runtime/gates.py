"""Where a run stops and waits: limits before work, answers, timers. All of them record a request, then park until
something lifts it.

On replay nothing is judged again: recorded work that follows was let through then.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import NoReturn

import msgspec

from perdure.contracts.contract import JsonObject
from perdure.contracts.limits import Crossing, add_known
from perdure.errors import ConfigurationError
from perdure.journal import events as ev
from perdure.journal.cursor import Live, Replayed
from perdure.runtime.drive import Drive
from perdure.runtime.guards import LONG_WAIT_NS

_REASONS = {
    "max_total_tokens": "token_limit",
    "max_cost_microunits": "cost_limit",
    "max_wall_time_ms": "time_limit",
    "deadline_seconds": "deadline",
}
"""Terminal reasons that are not the limit's own name."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Need(msgspec.Struct, frozen=True):
    """What the next act takes from the counted limits."""

    model_turns: int = 0
    tool_calls: int = 0
    repairs: int = 0


async def reserve(drive: Drive, call: str, need: Need, before_finish: Callable[[str], None] | None = None) -> None:
    """Lets work through or stops the run before it. The intents that follow are the reservation: they are counted.

    Under `park` a crossing is recorded and the run parks until `limit` raises the total; under `finish` the run ends,
    and `before_finish` is called with the limit's name so that what was held back can be closed.
    """
    crossing = first_crossing(drive, need) if drive.cursor.live else None
    if crossing is not None:
        await _cross(drive, call, crossing, before_finish)


async def stop_if_lowered(drive: Drive, call: str, before_finish: Callable[[str], None]) -> None:
    """Stops the run before work that was let through, when a limit was since lowered below what is used and set aside.
    Time goes on by itself, so its limits are judged with the next work and not here. `before_finish` as in `reserve`.
    """
    for name, used in _counted(drive):
        limit = drive.state.limits.get(name)
        if limit is not None and used is not None and used > limit:
            await _cross(drive, call, Crossing(name, limit, used, need=0), before_finish)


def _counted(drive: Drive) -> tuple[tuple[str, int | None], ...]:
    """What is used of everything that only the run's own acts use up."""
    spent = drive.state.spent
    return (
        ("max_model_turns", spent.model_turns),
        ("max_model_repairs", spent.model_repairs),
        ("max_tool_calls", spent.tool_calls + len(drive.state.reserved)),
        ("max_total_tokens", _tokens(drive)),
        ("max_cost_microunits", _cost(drive)),
    )


def first_crossing(drive: Drive, need: Need) -> Crossing | None:
    """The first limit the next act would cross: counted ones first, then tokens, cost, active time, deadline."""
    state = drive.state
    spent, limits = state.spent, state.limits
    # A parked run holds back work under its recorded boundary until that very boundary is lifted.
    held = state.exceeded
    if held is not None:
        return Crossing(held.limit, held.max, held.used, held.need)
    counted = (
        ("max_model_turns", need.model_turns, spent.model_turns),
        ("max_model_repairs", need.repairs, spent.model_repairs),
        ("max_tool_calls", need.tool_calls, spent.tool_calls + len(state.reserved)),
    )
    for name, wanted, used in counted:
        if wanted:
            limit = limits.get(name)
            if limit is not None and used + wanted > limit:
                return Crossing(name, limit, used, wanted)
    for name, measured in _MEASURED.items():
        limit = limits.get(name)
        if limit is not None:
            so_far = measured(drive)
            if so_far is not None and so_far + 1 > limit:
                return Crossing(name, limit, so_far, 1)
    return None


def _tokens(drive: Drive) -> int | None:
    return add_known(drive.state.spent.input_tokens, drive.state.spent.output_tokens)


def _cost(drive: Drive) -> int | None:
    return drive.state.spent.cost


def _active_ms(drive: Drive) -> int:
    return drive.journal.total_active_ns() // 1_000_000


def _age_s(drive: Drive) -> int:
    return (drive.bindings.clock.now_ns() - drive.state.started_at) // 10**9


_MEASURED: dict[str, Callable[[Drive], int | None]] = {
    "max_total_tokens": _tokens,
    "max_cost_microunits": _cost,
    "max_wall_time_ms": _active_ms,
    "deadline_seconds": _age_s,
}
"""What is read only where a limit is set, in the order of judgement. None: unknown, and so over no limit."""


async def _cross(drive: Drive, call: str, crossing: Crossing, before_finish: Callable[[str], None] | None) -> NoReturn:
    if drive.spec.policy.on_exhausted == "finish":
        used = f"{crossing.used} used, {crossing.need} more needed"
        over = f"The limit {crossing.limit} ({crossing.max}) was reached: {used}."
        if before_finish is not None:
            before_finish(crossing.limit)
        drive.finish(*end_of(crossing.limit), over)
    if drive.state.exceeded is None:
        event = ev.BudgetExceeded(call, crossing.limit, crossing.max, crossing.used, crossing.need)
        drive.note(event)
        await drive.durable()
    drive.park(
        "budget_exceeded", limit=crossing.limit, max=crossing.max, used=crossing.used, need=crossing.need, call=call
    )


def end_of(limit: str) -> tuple[str, str]:
    """Outcome and terminal reason of a run that ends at a limit."""
    if limit == "max_model_repairs":
        return "failed", "invalid_decision"
    return "exhausted", _REASONS.get(limit, limit)


async def wait_for_answer(drive: Drive, call: str, reason: str, kind: str, schema: JsonObject) -> ev.Resumed:
    """Parks until an answer that fits the schema is recorded; returns it."""
    asked = ev.Suspended(call, reason, kind, schema)
    answer = drive.cursor.wait(asked)
    if isinstance(answer, Replayed):
        assert isinstance(answer.event, ev.Resumed)
        drive.guards.changed()
        return answer.event
    if not answer.permit.intended:
        drive.safe_point()
        drive.record(answer.permit, asked)
        await drive.durable()
    return drive.park("suspended", call=call, kind=kind, reason=reason, schema=schema)


async def sleep_until(drive: Drive, call: str, wake_at: int | timedelta) -> int:
    """Parks until the instant (UTC nanoseconds, or a time from now); returns it. Once it has come the run goes on,
    once."""
    recorded = drive.cursor.waiting_request(call)
    asked = recorded if isinstance(recorded, ev.SleepStarted) else _new_sleep(drive, call, wake_at)
    if isinstance(wake_at, int) and asked.wake_at != wake_at:
        asked = ev.SleepStarted(call, wake_at, asked.asked_at)
    match drive.cursor.wait(asked):
        case Replayed():
            pass
        case Live(permit):
            if not permit.intended:
                drive.safe_point()
                drive.record(permit, asked)
            if drive.bindings.clock.now_ns() < asked.wake_at:
                await drive.durable()
                drive.park("sleeping", call=call, wake_at=asked.wake_at)
            drive.record(permit, ev.Woken(call))
    if asked.wake_at - asked.asked_at >= LONG_WAIT_NS:
        drive.guards.changed()
    return asked.wake_at


def _new_sleep(drive: Drive, call: str, wake_at: int | timedelta) -> ev.SleepStarted:
    now = drive.bindings.clock.now_ns()
    until = wake_at if isinstance(wake_at, int) else now + wake_at // timedelta(microseconds=1) * 1000
    if not storable_instant(until):
        raise ConfigurationError(
            "the instant is beyond the year 2262", where=f"sleep at {call}", next="sleep less long"
        )
    return ev.SleepStarted(call, until, now)


def storable_instant(ns: int) -> bool:
    """Whether UTC nanoseconds fit the 64 bits they are stored in (the years 1677 to 2262)."""
    return -(2**63) <= ns < 2**63


def to_ns(instant: datetime) -> int:
    """UTC nanoseconds of an aware datetime, exact to its microsecond."""
    return (instant - _EPOCH) // timedelta(microseconds=1) * 1000


def from_ns(ns: int) -> datetime:
    """The aware datetime of UTC nanoseconds, cut to microseconds."""
    return _EPOCH + timedelta(microseconds=ns // 1000)
