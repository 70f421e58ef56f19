"""Calls that are cut off, clients that break, journals cut at the worst place: nothing is lost and nothing is asked
twice."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
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

from perdure import (
    ConfigurationError,
    DivergedError,
    Limits,
    LoopStoppedError,
    ModelError,
    Notice,
    NoticeKind,
    Parked,
    Price,
    RunContext,
    Usage,
    assemble,
    tool,
)
from perdure.contracts.messages import AssistantTurn
from perdure.journal import events as ev
from perdure.journal.envelope import Envelope
from perdure.ports import ModelEvent, TextDelta, UsageReport
from perdure.prompting.request import ModelRequest
from perdure.testing.replies import calls, text
from perdure.testing.scripted import ScriptedModel

END = text("Done.")
BLINK = 0.1
"""A loop's own time limit, in seconds."""
ran: list[str] = []
hung = asyncio.Event()


@pytest.fixture(autouse=True)
def _fresh() -> None:
    ran.clear()
    hung.clear()


@tool(effect="read")
async def look(place: str = "here") -> str:
    """Looks."""
    ran.append(place)
    return f"seen {place}"


@tool
async def act(what: str = "it") -> str:
    """Acts."""
    ran.append(what)
    return f"did {what}"


@tool
async def hang() -> str:
    """Acts and never comes back."""
    ran.append("hung")
    hung.set()
    await asyncio.Event().wait()
    return "late"


async def ask(ctx: RunContext, notice: Notice | None = None) -> AssistantTurn:
    return await ctx.ask(assemble(ctx.agent, ctx.transcript.view(), notice))


def slow(*replies: Any) -> ScriptedModel:
    return ScriptedModel(replies, delay_ms=60_000)


# A time limit of the loop's own


async def test_a_write_cut_off_by_the_loops_own_time_limit_is_in_doubt_and_the_run_does_not_end() -> None:
    """R-098, S-011, O10: whatever the loop makes of the signal."""

    async def loop(ctx: RunContext, task: str) -> Any:
        turn = await ask(ctx)
        with suppress(TimeoutError):
            async with asyncio.timeout(BLINK):
                await ctx.use(turn.calls)
        return "made up"

    run = await embedded(agent_of(hang, loop=loop), script(calls(("hang", {}))))
    assert ran == ["hung"]
    assert run.outcome.park is not None
    assert (run.outcome.park.kind, run.outcome.park.call) == ("needs_reconciliation", "1.0")
    assert kinds(run.envelopes)[-1] == "tool_call_requested"


async def test_a_loop_that_goes_on_after_a_cut_off_call_asks_for_nothing_more() -> None:
    """R-098, S-011: the place of that call in the journal has no answer yet."""

    async def loop(ctx: RunContext, task: str) -> Any:
        turn = await ask(ctx)
        with suppress(TimeoutError):
            async with asyncio.timeout(BLINK):
                await ctx.use(turn.calls)
        for more in (lambda: ask(ctx), ctx.now, lambda: ctx.do("x", lambda: 1), ctx.check_limits):
            with pytest.raises(Parked):
                await more()
        return "made up"

    model = script(calls(("hang", {})), END)
    run = await embedded(agent_of(hang, loop=loop), model)
    assert len(model.requests) == 1
    assert kinds(run.envelopes)[-1] == "tool_call_requested"


async def test_after_a_cut_off_ask_replay_asks_no_model_twice_and_does_not_diverge() -> None:
    """S-013, S-015, S-016."""

    async def loop(ctx: RunContext, task: str) -> Any:
        said = []
        for _ in range(2):
            with suppress(TimeoutError):
                async with asyncio.timeout(BLINK):
                    said.append((await ask(ctx)).text)
        return said

    agent = agent_of(loop=loop)
    stopped = await embedded(agent, slow(text("never heard")))
    assert stopped.outcome.status == "idle"
    assert kinds(stopped.envelopes)[-1] == "model_call_requested"
    model = script(text("one"), text("two"))
    whole = await embedded(agent, model, recorded=stopped)
    assert whole.outcome.output == ["one", "two"]
    assert len(model.requests) == 2
    nobody = script()
    again = await embedded(agent, nobody, recorded=cut(whole, before(whole, "proposal_received")))
    assert again.outcome.output == ["one", "two"]
    assert nobody.requests == []


async def test_a_loop_that_returns_while_a_background_task_still_asks_is_an_error_and_records_no_end(
    tmp_path: Path,
) -> None:
    """S-011, R-098: a resume settles the open call first."""
    left: list[asyncio.Task[Any]] = []

    async def loop(ctx: RunContext, task: str) -> Any:
        if left:
            return (await ask(ctx)).text
        left.append(asyncio.create_task(ask(ctx)))
        await asyncio.sleep(BLINK)
        return "early"

    async with opened(tmp_path) as engine:
        run = await started(engine, agent_of(loop=loop), slow(END))
        with pytest.raises(LoopStoppedError, match="the loop returned while a call of its own was open: 1") as stopped:
            await run.wait()
        assert (stopped.value.calls, stopped.value.__cause__) == (("1",), None)
        left[0].cancel()
        await asyncio.gather(*left, return_exceptions=True)
        assert (await engine.outcome(RUN)).status == "idle"
        assert kinds(await engine.journal(RUN))[-1] == "model_call_requested"
        again = await (await engine.resume(RUN, agent_of(loop=loop), model=script(END))).wait()
        assert again.output == "Done."


async def test_a_loop_that_raises_while_a_write_is_under_way_leaves_it_in_doubt_and_its_error_is_named(
    tmp_path: Path,
) -> None:
    """S-011, R-098, O10."""
    left: list[asyncio.Task[Any]] = []

    async def loop(ctx: RunContext, task: str) -> Any:
        left.append(asyncio.create_task(ctx.use((await ask(ctx)).calls)))
        await hung.wait()
        raise ValueError("early")

    async with opened(tmp_path) as engine:
        agent = agent_of(hang, loop=loop)
        with pytest.raises(LoopStoppedError, match="the loop raised ValueError: early") as stopped:
            await (await started(engine, agent, script(calls(("hang", {}))))).wait()
        assert isinstance(stopped.value.__cause__, ValueError)
        assert (stopped.value.calls, stopped.value.exit_code) == (("1.0",), 4)
        left[0].cancel()
        await asyncio.gather(*left, return_exceptions=True)
        outcome = await engine.outcome(RUN)
        assert outcome.park is not None
        assert outcome.park.kind == "needs_reconciliation"
        assert kinds(await engine.journal(RUN))[-1] == "tool_call_requested"


# Clients


class Broken:
    """A client with a defect: its first stream raises what no client should."""

    target, strict = "scripted:broken", True

    def __init__(self, *replies: Any) -> None:
        self.then = script(*replies)
        self.asked = 0

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        self.asked += 1
        if self.asked == 1:
            yield TextDelta("half")
            raise KeyError("choices")
        async for event in self.then.stream(request):
            yield event

    async def close(self) -> None:
        """Nothing to give back."""


async def test_a_client_that_raises_ends_the_run_as_a_model_call_that_failed() -> None:
    """R-012, S-013, O13."""
    run = await embedded(agent_of(), Broken())
    assert (run.outcome.status, run.outcome.terminal_reason) == ("failed", "model_error")
    assert kinds(run.envelopes)[-2:] == ["model_call_failed", "run_failed"]
    failed = only(run.envelopes, ev.ModelCallFailed)[0]
    assert (failed.reason, failed.retryable) == ("client", False)
    assert "KeyError: 'choices'" in failed.message
    assert state_of(run.envelopes).open == {}


async def test_a_loop_that_catches_a_clients_defect_meets_it_on_replay_without_asking() -> None:
    """S-013, S-014, S-016."""
    told: list[str] = []

    async def loop(ctx: RunContext, task: str) -> Any:
        try:
            await ask(ctx)
        except ModelError as error:
            told.append(f"{error.kind}: {error}")
        return (await ask(ctx)).text

    agent = agent_of(loop=loop)
    whole = await embedded(agent, Broken(END))
    assert whole.outcome.output == "Done."
    nobody = script()
    again = await embedded(agent, nobody, recorded=cut(whole, before(whole, "proposal_received")))
    assert again.outcome.output == "Done."
    assert nobody.requests == []
    assert told[0] == told[1]
    assert told[0].startswith("client: ")


class Costly:
    """A client whose streams report their usage and then end without their closing event."""

    target, strict = "scripted:costly", True
    asked = 0

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        self.asked += 1
        yield TextDelta("half a reply")
        yield UsageReport(Usage(input_tokens=1000, output_tokens=1000))

    async def close(self) -> None:
        """Nothing to give back."""


PRICE = Price(input=1_000_000, output=1_000_000)
"""A broken stream of `Costly` costs 2000."""


async def test_a_broken_stream_is_charged_at_the_price_and_stops_at_the_cost_limit() -> None:
    """R-075, R-092, O3, O4."""
    model = Costly()
    run = await embedded(agent_of(price=PRICE, limits=Limits(max_cost_microunits=1500)), model)
    assert model.asked < 3  # not all that a call may try: one reply may cross
    assert state_of(run.envelopes).spent.cost == 2000
    assert run.outcome.park is not None
    assert run.outcome.park.kind == "budget_exceeded"
    assert run.outcome.park.detail["limit"] == "max_cost_microunits"


async def test_a_model_call_that_failed_for_good_is_charged_at_the_price() -> None:
    """R-075, R-092, O3, O4."""

    async def loop(ctx: RunContext, task: str) -> Any:
        with suppress(ModelError):
            await ask(ctx)
        return (await ask(ctx)).text

    model = Costly()
    run = await embedded(agent_of(loop=loop, price=PRICE, limits=Limits(max_cost_microunits=6000)), model)
    assert model.asked == 3
    assert only(run.envelopes, ev.ModelCallFailed)[0].usage == Usage(input_tokens=1000, output_tokens=1000)
    assert state_of(run.envelopes).spent.cost == 6000
    assert run.outcome.park is not None
    assert run.outcome.park.detail["limit"] == "max_cost_microunits"


# Journals cut between a closing and the end it led to


def cuts_before_the_end(envelopes: Sequence[Envelope], first: int) -> range:
    """Every length that holds the event at `first` and not the end."""
    return range(first + 1, len(envelopes))


FINISH: list[tuple[dict[str, int], list[Any], str]] = [
    ({"max_tool_calls": 1}, [calls(("look", {})), calls(("nope", {}), ("look", {"place": "far"}))], "max_tool_calls"),
    ({"max_tool_calls": 1}, [calls(("look", {}), ("look", {"place": "far"}))], "max_tool_calls"),
    ({"max_model_repairs": 1}, [calls(("nope", {})), calls(("nope", {"x": 1}))], "invalid_decision"),
]


@pytest.mark.parametrize(("limits", "replies", "reason"), FINISH)
async def test_a_journal_cut_between_the_refusals_at_a_limit_and_the_end_ends_with_the_same_reason(
    limits: dict[str, int], replies: list[Any], reason: str
) -> None:
    """R-017, R-117, C3, C11: nothing of that batch runs, however often it is cut."""
    agent = agent_of(look, on_exhausted="finish", limits=Limits(**limits))
    whole = await embedded(agent, script(*replies, END))
    assert whole.outcome.terminal_reason == reason
    refused = [e.seq for e in whole.envelopes if e.kind == "tool_call_refused"]
    first = refused[-len(replies[-1].calls)]
    for kept in cuts_before_the_end(whole.envelopes, first):
        ran.clear()
        model = script(*replies, END)
        again = await embedded(agent, model, recorded=cut(whole, kept))
        assert (again.outcome.outcome, again.outcome.terminal_reason) == (whole.outcome.outcome, reason)
        assert (ran, model.requests) == ([], [])
        assert observed(again.envelopes) == observed(whole.envelopes)
        assert "limit" in str(again.outcome.answer)


@pytest.mark.parametrize(
    ("where", "ends"),
    [
        ("model", ("interrupted", "interrupted")),
        ("look", ("interrupted", "interrupted")),
        ("act", ("indeterminate", "effect_indeterminate")),
    ],
)
async def test_a_conservative_resume_cut_before_its_end_ends_the_same_way(where: str, ends: tuple[str, str]) -> None:
    """C1, C2, R-112, R-118: the closing stands, so no model and no tool is started over it."""
    name = "look" if where == "model" else where
    replies = [calls((name, {})), END]
    agent = agent_of(look, act, resume_mode="conservative")
    whole = await embedded(agent, script(*replies))
    kept = before(whole, "model_call_completed" if where == "model" else "tool_call_completed")
    closed = await embedded(agent, script(), recorded=cut(whole, kept))
    ran.clear()
    model = script(*replies)
    again = await embedded(agent, model, recorded=cut(closed, before(closed, "run_failed")))
    assert (again.outcome.outcome, again.outcome.terminal_reason) == ends
    assert again.outcome.answer == closed.outcome.answer
    assert (ran, model.requests) == ([], [])


async def test_in_conservative_mode_a_write_that_did_not_happen_leaves_the_run_interrupted_and_in_no_doubt() -> None:
    """C1, C2, S-064, O10."""
    agent = agent_of(act, resume_mode="conservative")
    whole = await embedded(agent, script(calls(("act", {})), END))
    resolved = extended(cut(whole, before(whole, "tool_call_completed")), ev.EffectResolved("1.0", "did_not_happen"))
    ran.clear()
    run = await embedded(agent, script(), recorded=resolved)
    assert (run.outcome.outcome, run.outcome.terminal_reason) == ("interrupted", "interrupted")
    assert ran == []
    assert state_of(run.envelopes).open == {}


# Requests that are not what they were


async def test_a_request_over_a_stale_view_is_refused_and_records_nothing() -> None:
    """S-014, S-028: the model would be shown another conversation than the one that is digested."""

    async def loop(ctx: RunContext, task: str) -> Any:
        view = ctx.transcript.view()
        await ctx.ask(assemble(ctx.agent, view))
        with pytest.raises(ConfigurationError, match="a view of 1 entries of a transcript that has 2"):
            await ctx.ask(assemble(ctx.agent, view))
        return (await ask(ctx)).text

    model = script(text("one"), text("two"))
    run = await embedded(agent_of(loop=loop), model)
    assert run.outcome.output == "two"
    assert [event.call for event in only(run.envelopes, ev.ModelCallRequested)] == ["1", "2"]
    assert [len(request.transcript) for request in model.requests] == [1, 2]


async def test_a_notice_of_another_kind_on_replay_is_a_divergence_and_one_worded_otherwise_is_none() -> None:
    """S-070, S-014: a later release may word a notice otherwise, but not send another."""

    def agent(notice: Notice | None) -> Any:
        async def loop(ctx: RunContext, task: str) -> Any:
            return (await ask(ctx, notice)).text

        return agent_of(loop=loop)

    whole = await embedded(agent(Notice(NoticeKind.CUT_REPLY, "Shorter.")), script(END))
    kept = cut(whole, before(whole, "proposal_received"))
    again = await embedded(agent(Notice(NoticeKind.CUT_REPLY, "Less of it.")), script(), recorded=kept)
    assert again.outcome.output == "Done."
    for other in (Notice(NoticeKind.EMPTY_REPLY, "Shorter."), None):
        with pytest.raises(DivergedError) as found:
            await embedded(agent(other), script(), recorded=kept)
        assert found.value.part == "notice"
    assert count(again.envelopes, "model_call_requested") == 1
