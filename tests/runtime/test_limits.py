"""Limits: reserved before work, counted from the journal, and the same after any restart."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.runs import (
    RUN,
    agent_of,
    before,
    count,
    cut,
    embedded,
    extended,
    kinds,
    observed,
    only,
    opened,
    script,
    started,
    state_of,
)

from perdure.contracts.limits import Limits, Price, add_known, cost_of
from perdure.contracts.messages import Usage
from perdure.engine import Engine
from perdure.errors import InvalidAnswerError, PerdureError, UsageError
from perdure.journal import events as ev
from perdure.prompting.request import ModelRequest
from perdure.runtime.context import RunContext
from perdure.testing.clocks import ManualClock
from perdure.testing.replies import Reply, calls, fault, text
from perdure.testing.scripted import ScriptedModel
from perdure.tools.define import tool

ran: list[str] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    ran.clear()


@tool(effect="read")
async def look(place: int) -> str:
    """Looks."""
    ran.append(f"look {place}")
    return f"seen {place}"


@tool(effect="read", parallel=True)
async def glance(place: int) -> str:
    """Looks beside others."""
    ran.append(f"glance {place}")
    return f"seen {place}"


@tool
async def act(what: int) -> str:
    """Acts."""
    ran.append(f"act {what}")
    return f"did {what}"


def endless() -> ScriptedModel:
    """Looks at another place in every turn."""
    return ScriptedModel(lambda request: calls(("look", {"place": request.transcript.turns})), chunk=0)


class Slow(ManualClock):
    """Every reply and every call takes a second: time passes with each event."""

    def now_ns(self) -> int:
        self.advance(1)
        return super().now_ns()


LIMITS = [
    ("max_model_turns", {"max_model_turns": 4}, "exhausted", "max_model_turns", (4, 4, 1)),
    ("max_tool_calls", {"max_tool_calls": 3}, "exhausted", "max_tool_calls", (3, 3, 1)),
    ("max_total_tokens", {"max_total_tokens": 100}, "exhausted", "token_limit", (100, 120, 1)),
    ("max_cost_microunits", {"max_cost_microunits": 250}, "exhausted", "cost_limit", (250, 300, 1)),
]


@pytest.mark.parametrize(("limit", "limits", "outcome", "reason", "numbers"), LIMITS)
async def test_a_limit_parks_before_what_would_cross_it(
    limit: str, limits: dict[str, Any], outcome: str, reason: str, numbers: tuple[int, int, int]
) -> None:
    """S-012, S-030, S-031, S-032, S-035, R-017, O4, C3, C4: tokens and cost of a reply may cross once."""
    agent = agent_of(look, limits=Limits(**limits), price=Price(input=1_000_000, output=4_500_000))
    run = await embedded(agent, endless())
    assert run.outcome.status == "parked"
    park = run.outcome.park
    assert park is not None
    assert park.kind == "budget_exceeded"
    assert park.detail == {"limit": limit, "max": numbers[0], "used": numbers[1], "need": numbers[2]}
    assert limit in park.next
    assert kinds(run.envelopes)[-1] == "budget_exceeded"
    assert count(run.envelopes, "model_call_requested") == count(run.envelopes, "model_call_completed")
    assert len(ran) == count(run.envelopes, "tool_call_requested") == count(run.envelopes, "tool_call_completed")


@pytest.mark.parametrize(("limit", "limits", "outcome", "reason", "numbers"), LIMITS)
async def test_the_same_limit_ends_the_run_under_finish_with_its_own_reason(
    limit: str, limits: dict[str, Any], outcome: str, reason: str, numbers: tuple[int, int, int]
) -> None:
    """R-012, C3, O13."""
    price = Price(input=1_000_000, output=4_500_000)
    run = await embedded(agent_of(look, limits=Limits(**limits), price=price, on_exhausted="finish"), endless())
    assert run.outcome.status == "failed"
    assert (run.outcome.outcome, run.outcome.terminal_reason) == (outcome, reason)
    assert limit in str(run.outcome.answer)
    assert count(run.envelopes, "budget_exceeded") == 0


@pytest.mark.parametrize("on_exhausted", ["park", "finish"])
async def test_active_time_is_a_limit(on_exhausted: Any) -> None:
    """S-030, C6."""
    agent = agent_of(look, limits=Limits(max_wall_time_ms=20_000), on_exhausted=on_exhausted)
    run = await embedded(agent, endless(), clock=Slow())
    if on_exhausted == "finish":
        assert (run.outcome.outcome, run.outcome.terminal_reason) == ("exhausted", "time_limit")
    else:
        assert run.outcome.park is not None
        assert run.outcome.park.detail["limit"] == "max_wall_time_ms"
        assert run.outcome.park.detail["used"] >= 20_000


async def test_time_asleep_is_not_active_time_but_counts_for_the_deadline(tmp_path: Path) -> None:
    """C6: two dimensions."""

    async def loop(ctx: RunContext, task: str) -> Any:
        from datetime import timedelta

        await ctx.sleep(timedelta(hours=5))
        await ctx.check_limits()
        return "done"

    for limits, ends in ((Limits(max_wall_time_ms=3_600_000), True), (Limits(deadline_seconds=3_600), False)):
        clock = ManualClock()
        agent = agent_of(loop=loop, limits=limits)
        path = tmp_path / str(ends)
        path.mkdir()
        async with opened(path, clock) as engine:
            assert (await (await started(engine, agent, script())).wait()).status == "parked"
            clock.advance(5 * 3600)
            outcome = await (await engine.resume(RUN, agent, model=script())).wait()
        assert (outcome.status == "completed") is ends
        if not ends:
            assert outcome.park is not None
            assert outcome.park.detail == {"limit": "deadline_seconds", "max": 3600, "used": 18000, "need": 1}


class Jumping(ManualClock):
    """Each reply of the model takes a second, and the wall clock jumps with it."""

    def __init__(self, hours: int) -> None:
        super().__init__()
        self.hours = hours

    def reply(self, request: ModelRequest) -> Reply:
        self.advance(1)
        self.jump(self.hours * 3600)
        turns = request.transcript.turns
        return calls(("look", {"place": turns})) if turns < 9 else text("Done.")


JUMPS = pytest.mark.parametrize("hours", [12, -1])


@JUMPS
async def test_a_time_limit_counts_the_steady_clock_whatever_the_wall_clock_does(hours: int, tmp_path: Path) -> None:
    """H28, C6. Ten replies of a second each, a jump in each of them, and one between two drives."""
    for limit, ends in ((10_001, True), (5_000, False)):
        clock = Jumping(hours)
        directory = tmp_path / str(limit)
        directory.mkdir()
        agent = agent_of(look, limits=Limits(max_wall_time_ms=limit))
        async with opened(directory, clock) as engine:
            run = await started(engine, agent, ScriptedModel(clock.reply, chunk=0))
            async for envelope in run.events():
                if envelope.kind == "tool_call_completed":
                    break
            engine.stop()
            assert (await run.wait()).status == "idle"
            clock.jump(hours * 3600)
            outcome = await (await engine.resume(RUN, agent, model=ScriptedModel(clock.reply, chunk=0))).wait()
            journal = await engine.journal(RUN)
            state = state_of(journal)
        assert (outcome.status == "completed") is ends
        assert all(0 <= envelope.active_ns <= 10 * 10**9 for envelope in journal)
        if ends:
            assert state.spent.active_ns == 10 * 10**9
        else:
            assert outcome.park is not None
            assert outcome.park.detail == {"limit": "max_wall_time_ms", "max": 5_000, "used": 5_000, "need": 1}


@JUMPS
async def test_a_jump_of_the_wall_clock_inside_a_call_neither_ends_nor_prolongs_it(hours: int) -> None:
    """H28. The one call takes no time, and would be over its time by the wall clock; the other never ends."""
    clock = ManualClock()

    @tool(effect="read", timeout=5)
    async def jump() -> str:
        """Lets the wall clock jump."""
        clock.jump(hours * 3600)
        return "jumped"

    @tool(effect="read", timeout=0.05, retries=0)
    async def hang() -> str:
        """Never ends, while the wall clock jumps."""
        clock.jump(hours * 3600)
        await asyncio.Event().wait()
        return "ended"

    run = await embedded(
        agent_of(jump, hang), script(calls(("jump", {})), calls(("hang", {})), text("Done.")), clock=clock
    )
    assert observed(run.envelopes)["1.0"] == "'jumped'"
    assert [failed.reason for failed in only(run.envelopes, ev.ToolCallFailed)] == ["timeout"]
    assert run.outcome.output == "Done."


@pytest.mark.parametrize(("hours", "ends"), [(12, False), (-1, True)])
async def test_a_deadline_reads_the_wall_clock_as_it_is(hours: int, ends: bool) -> None:
    """H28. It is an instant: past it after a jump forward, and no nearer after one back."""
    clock = Jumping(hours)
    agent = agent_of(look, limits=Limits(deadline_seconds=3_600))
    run = await embedded(agent, ScriptedModel(clock.reply, chunk=0), clock=clock)
    assert (run.outcome.status == "completed") is ends
    if not ends:
        assert run.outcome.park is not None
        assert run.outcome.park.detail == {"limit": "deadline_seconds", "max": 3_600, "used": 43_201, "need": 1}


async def test_a_deadline_ends_the_run_under_finish() -> None:
    """C6, R-012."""
    agent = agent_of(look, limits=Limits(deadline_seconds=20), on_exhausted="finish")
    run = await embedded(agent, endless(), clock=Slow())
    assert (run.outcome.outcome, run.outcome.terminal_reason) == ("exhausted", "deadline")


async def test_the_limits_are_checked_in_a_fixed_order() -> None:
    """S-035: turns before tokens."""
    empty = ScriptedModel(lambda _: Reply())
    run = await embedded(agent_of(look, limits=Limits(max_model_turns=1, max_total_tokens=1)), empty)
    assert only(run.envelopes, ev.BudgetExceeded)[0].limit == "max_model_turns"


# Batches


async def test_a_batch_is_reserved_whole_or_not_at_all() -> None:
    """R-017, C11, C12, O4: three calls with room for two: none runs."""
    batch = calls(*[("look", {"place": n}) for n in range(3)])
    run = await embedded(agent_of(look, limits=Limits(max_tool_calls=2)), script(batch, text("Done.")))
    assert ran == []
    assert only(run.envelopes, ev.BudgetExceeded)[0].need == 3


async def test_a_batch_held_back_runs_once_the_limit_is_raised(tmp_path: Path) -> None:
    """R-017, S-033, C3, C28."""
    batch = calls(("look", {"place": 1}), ("act", {"what": 2}), ("look", {"place": 3}))
    agent = agent_of(look, act, limits=Limits(max_tool_calls=2))
    async with opened(tmp_path) as engine:
        await (await started(engine, agent, script(batch, text("Done.")))).wait()
        await engine.limit(RUN, max_tool_calls=3)
        outcome = await (await engine.resume(RUN, agent, model=script(batch, text("Done.")))).wait()
    assert outcome.output == "Done."
    assert ran == ["look 1", "act 2", "look 3"]


async def test_calls_held_back_at_the_end_are_closed_with_one_answer_each() -> None:
    """R-017, C3, O13."""
    batch = calls(("look", {"place": 1}), ("fly", {}), ("act", {"what": 2}))
    agent = agent_of(look, act, limits=Limits(max_tool_calls=2), on_exhausted="finish")
    run = await embedded(agent, script(calls(("look", {"place": 0}), ("look", {"place": 9})), batch))
    assert ran == ["look 0", "look 9"]
    shown = observed(run.envelopes)
    assert "a limit of this run was reached" in shown["2.0"]
    assert "no tool named" in shown["2.1"]
    assert "Nothing of this call happened" in shown["2.2"]
    assert run.outcome.terminal_reason == "max_tool_calls"


# Changing them


async def test_a_raised_limit_lets_the_run_go_on_and_a_lowered_one_stops_it_at_once(tmp_path: Path) -> None:
    """H19, S-033, C3, C28: below use it parks without a call."""
    agent = agent_of(look, limits=Limits(max_model_turns=3))
    async with opened(tmp_path) as engine:
        first = await (await started(engine, agent, endless())).wait()
        assert first.usage.model_turns == 3
        await engine.limit(RUN, max_model_turns=6)
        model = endless()
        second = await (await engine.resume(RUN, agent, model=model)).wait()
        assert second.usage.model_turns == 6
        assert len(model.requests) == 3
        await engine.limit(RUN, max_model_turns=4)
        model = endless()
        third = await (await engine.resume(RUN, agent, model=model)).wait()
        assert third.park is not None
        assert third.park.detail["used"] == 6
        assert model.requests == []
        await engine.limit(RUN, max_model_turns="+5")
        model = endless()
        last = await (await engine.resume(RUN, agent, model=model)).wait()
        assert len(model.requests) == 3
        assert last.usage.model_turns == 9


async def test_a_lowered_limit_of_a_run_that_is_not_at_it_parks_it_at_the_next_step(tmp_path: Path) -> None:
    """H19."""
    agent = agent_of(look, limits=Limits(max_model_turns=3))
    async with opened(tmp_path) as engine:
        await (await started(engine, agent, endless())).wait()
        await engine.limit(RUN, max_model_turns=20, max_tool_calls=2)
        model = endless()
        outcome = await (await engine.resume(RUN, agent, model=model)).wait()
        assert outcome.park is not None
        assert outcome.park.detail["limit"] == "max_tool_calls"
        assert len(ran) == 3


@pytest.mark.parametrize(("lowered", "used"), [("max_model_turns", 2), ("max_tool_calls", 3), ("max_total_tokens", 60)])
async def test_a_batch_that_was_accepted_does_not_run_once_a_limit_is_lowered_below_use(
    lowered: str, used: int
) -> None:
    """H19: at once is before the next call, and not before the next reply."""
    agent = agent_of(look)
    replies = script(
        calls(("look", {"place": 1})), calls(("look", {"place": 2}), ("look", {"place": 3})), text("Done.")
    )
    whole = await embedded(agent, replies)
    accepted = cut(whole, before(whole, "batch_accepted") + 1)
    ran.clear()
    run = await embedded(agent, script(), recorded=extended(accepted, ev.BudgetChanged({lowered: 1})))
    assert run.outcome.park is not None
    assert run.outcome.park.detail == {"limit": lowered, "max": 1, "used": used, "need": 0}
    assert ran == []
    lifted = extended(run, ev.BudgetChanged({lowered: used}))
    await embedded(agent, replies, recorded=lifted)
    assert ran == ["look 2", "look 3"]


async def test_a_run_that_ends_at_a_lowered_limit_closes_every_call_of_the_batch() -> None:
    """H19, O2: a call that was asked for has one answer, whatever becomes of the run."""
    agent = agent_of(look, on_exhausted="finish")
    whole = await embedded(agent, script(calls(*[("look", {"place": place}) for place in (1, 2, 3)]), text("Done.")))
    cut_off = extended(cut(whole, before(whole, "tool_call_completed") + 1), ev.BudgetChanged({"max_tool_calls": 1}))
    run = await embedded(agent, script(), recorded=cut_off)
    assert (run.outcome.outcome, run.outcome.terminal_reason) == ("exhausted", "max_tool_calls")
    assert [event.call for event in only(run.envelopes, ev.ToolCallRefused)] == ["1.1", "1.2"]


async def test_another_limit_does_not_lift_the_one_that_was_crossed(tmp_path: Path) -> None:
    """C3: and neither does a restart."""
    agent = agent_of(look, limits=Limits(max_model_turns=3))
    async with opened(tmp_path) as engine:
        await (await started(engine, agent, endless())).wait()
        await engine.limit(RUN, max_tool_calls=500)
        model = endless()
        before_it = await engine.journal(RUN)
        outcome = await (await engine.resume(RUN, agent, model=model)).wait()
        assert outcome.park is not None
        assert outcome.park.detail["limit"] == "max_model_turns"
        assert model.requests == []
        assert await engine.journal(RUN) == before_it


@pytest.mark.parametrize(
    "change", [{"max_model_turns": 0}, {"max_model_turns": -1}, {"max_fun": 3}, {"max_model_turns": "many"}, {}]
)
async def test_a_change_that_makes_no_sense_is_refused_and_records_nothing(
    change: dict[str, Any], tmp_path: Path
) -> None:
    """S-036, C7."""
    agent = agent_of(look, limits=Limits(max_model_turns=3))
    async with opened(tmp_path) as engine:
        await (await started(engine, agent, endless())).wait()
        before_it = await engine.journal(RUN)
        with pytest.raises(UsageError):
            await engine.limit(RUN, **change)
        assert await engine.journal(RUN) == before_it


async def test_a_limit_lifted_inside_a_call_leaves_a_journal_that_replays(tmp_path: Path) -> None:
    """S-014, S-033: the boundary was recorded between a call's intent and its answer."""
    agent = agent_of(look, limits=Limits(max_model_turns=2))
    whole = await embedded(agent, script(calls(("look", {"place": 1})), text("Done.")))
    dangling = cut(whole, before(whole, "model_call_completed", 1))
    parked = await embedded(agent, script(), recorded=dangling)
    assert parked.outcome.park is not None
    assert parked.outcome.park.detail == {"limit": "max_model_turns", "max": 2, "used": 2, "need": 1}
    lifted = extended(parked, ev.BudgetChanged({"max_model_turns": 3}))
    ended = await embedded(agent, script(*[text("Done.")] * 3), recorded=lifted)
    assert ended.outcome.output == "Done."
    assert "attempt_started" in kinds(ended.envelopes)
    for kept in (before(ended, "proposal_received"), before(ended, "run_completed")):
        again = await embedded(agent, script(), recorded=cut(ended, kept))
        assert again.outcome.output == "Done."


# Restarts


async def test_a_crash_loop_is_not_free(tmp_path: Path) -> None:
    """H19, C5, O3: limit 10 model calls, killed after 6, then killed after each further one: never more than 10."""
    agent = agent_of(look, limits=Limits(max_model_turns=10))
    whole = await embedded(agent, endless())
    assert whole.outcome.usage.model_turns == 10
    asked_in_all, run = 6, cut(whole, before(whole, "model_call_completed", 5))
    for kill in range(12):
        model = endless()
        run = await embedded(agent, model, recorded=run)
        asked_in_all += min(1, len(model.requests))
        if not model.requests:
            break
        # Killed inside the call that was just begun: its intent, or its new attempt, is the last thing stored.
        last = max(envelope.seq for envelope in run.envelopes if envelope.kind == "attempt_started")
        run = cut(run, last + 1)
        assert state_of(run.envelopes).spent.model_turns == 7 + kill
    assert asked_in_all == 10
    assert run.outcome.park is not None
    assert run.outcome.park.detail == {"limit": "max_model_turns", "max": 10, "used": 10, "need": 1}


async def test_each_of_several_dangling_reads_is_charged_again_and_held_at_the_limit() -> None:
    """H19, C5: a group that was cut short may not take more than there is."""
    agent = agent_of(glance, limits=Limits(max_tool_calls=5))
    batch = calls(*[("glance", {"place": n}) for n in range(3)])
    whole = await embedded(agent, script(batch, text("Done.")))
    assert whole.outcome.output == "Done."
    ran.clear()
    dangling = cut(whole, before(whole, "tool_call_completed"))
    run = await embedded(agent, script(batch, text("Done.")), recorded=dangling)
    assert run.outcome.park is not None
    assert run.outcome.park.detail == {"limit": "max_tool_calls", "max": 5, "used": 5, "need": 1}
    assert state_of(run.envelopes).spent.tool_calls == 5


async def test_retries_of_a_model_call_are_charged_like_any_attempt() -> None:
    """C5, S-067."""
    broken = fault("overloaded")
    run = await embedded(agent_of(limits=Limits(max_model_turns=2)), script(broken))
    assert run.outcome.park is not None
    assert run.outcome.usage.model_turns == 2
    assert [event.cause for event in only(run.envelopes, ev.AttemptStarted)] == ["retry"]


async def test_replaying_costs_nothing() -> None:
    """H19, O3."""
    agent = agent_of(look)
    whole = await embedded(agent, script(calls(("look", {"place": 1})), text("Done.")))
    again = await embedded(agent, script(), recorded=cut(whole, before(whole, "run_completed")))
    assert again.outcome.usage == whole.outcome.usage


async def test_use_is_the_same_however_often_the_run_was_cut() -> None:
    """O3, S-035: only the call that was cut short is charged twice."""
    agent = agent_of(look)
    replies = [calls(("look", {"place": 1})), calls(("look", {"place": 2})), text("Done.")]
    whole = await embedded(agent, script(*replies))
    for kept in range(2, len(whole.envelopes)):
        again = await embedded(agent, script(*replies), recorded=cut(whole, kept))
        open_calls = state_of(whole.envelopes[:kept]).open
        models = sum(call.tool is None for call in open_calls.values())
        assert again.outcome.usage.model_turns == whole.outcome.usage.model_turns + models
        assert again.outcome.usage.tool_calls == whole.outcome.usage.tool_calls + len(open_calls) - models
        assert again.outcome.usage.input_tokens == whole.outcome.usage.input_tokens


# Configuration


@pytest.mark.parametrize(
    "limits",
    [Limits(max_model_turns=0), Limits(max_model_turns_per_step=9, max_model_turns=5), Limits(max_tool_calls=-2)],
)
def test_a_zero_and_a_step_limit_above_its_whole_are_errors_at_start(limits: Limits) -> None:
    """C7."""
    with pytest.raises(PerdureError):
        agent_of(limits=limits)


async def test_a_money_limit_without_a_price_is_allowed_and_said_so(tmp_path: Path) -> None:
    """C24, S-037, R-012."""
    agent = agent_of(look, limits=Limits(max_cost_microunits=1, max_model_turns=3))
    async with opened(tmp_path) as engine:
        outcome = await (await started(engine, agent, endless())).wait()
        journal = await engine.journal(RUN)
    assert outcome.usage.cost_microunits is None
    assert only(journal, ev.ExecutionDegraded)[0].code == "cost_unenforced"
    assert outcome.usage.model_turns == 3
    with pytest.raises(PerdureError, match="price"):
        agent_of(limits=Limits(max_cost_microunits=1, require_cost_enforcement=True))


async def test_money_is_whole_microunits_rounded_up() -> None:
    """C25."""
    run = await embedded(agent_of(price=Price(input=1, output=1)), script(Reply(text="Done.")))
    assert run.outcome.usage.cost_microunits == 1
    assert run.outcome.usage.currency == "USD"


def test_sums_stop_at_what_64_bits_hold() -> None:
    """S-063: a price or count beyond reason makes no number that readers of a journal cannot hold."""
    most = 2**63 - 1
    assert cost_of(Usage(most, most), Price(most, most)) == most
    assert add_known(most, most) == most
    assert add_known(most, None) is None


@pytest.mark.parametrize(
    ("usage", "cost"),
    [
        (Usage(100, 10, 0), 100 * 30 + 10 * 50),
        (Usage(100, 10, 40), 60 * 30 + 40 * 3 + 10 * 50),
        (Usage(100, 10, 100), 100 * 3 + 10 * 50),
        (Usage(1, 82, 965_602), 1 * 30 + 965_602 * 3 + 82 * 50),  # counted beside the input
        (Usage(0, 0, 1), 3),
    ],
    ids=repr,
)
def test_cached_input_costs_its_own_price_and_never_makes_a_cost_negative(usage: Usage, cost: int) -> None:
    """C25."""
    prices = Price(input=30_000_000, output=50_000_000, cached_input=3_000_000)
    assert cost_of(usage, prices) == cost


async def test_a_limit_can_be_changed_while_the_run_is_driven_here(tmp_path: Path) -> None:
    """C28: it takes hold at the next step."""
    engine: Engine

    @tool(effect="read")
    async def tighten() -> str:
        """Has somebody lower the limit."""
        await engine.limit(RUN, max_model_turns=1)
        return "tight"

    agent = agent_of(tighten)
    async with opened(tmp_path) as engine:
        outcome = await (await started(engine, agent, script(calls(("tighten", {})), text("Done.")))).wait()
    assert outcome.park is not None
    assert outcome.park.detail == {"limit": "max_model_turns", "max": 1, "used": 1, "need": 1}


async def test_nothing_can_be_settled_that_does_not_wait(tmp_path: Path) -> None:
    """S-065, S-076."""
    agent = agent_of(look, limits=Limits(max_model_turns=1))
    async with opened(tmp_path) as engine:
        await (await started(engine, agent, endless())).wait()
        before_it = await engine.journal(RUN)
        with pytest.raises(InvalidAnswerError):
            await engine.answer(RUN, "1.0", 1)
        with pytest.raises(InvalidAnswerError):
            await engine.resolve(RUN, "1.0", "happened")
        assert await engine.journal(RUN) == before_it
