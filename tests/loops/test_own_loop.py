"""A loop of the user's own: what the context gives it, over a list journal."""

import ast
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.runs import agent_of, asked, before, count, cut, embedded, kinds, observed, only, script

from perdure import (
    CallContext,
    CallFailedError,
    ConfigurationError,
    ModelError,
    ObservationStatus,
    RunContext,
    Suspend,
    ToolCall,
    ValueFormError,
    assemble,
    react,
    tool,
)
from perdure.journal import events as ev
from perdure.testing.clocks import DAWN_NS, ManualClock
from perdure.testing.replies import calls, fault, text
from perdure.testing.scripted import ScriptedModel

DAWN = datetime.fromtimestamp(DAWN_NS / 10**9, UTC)


@tool(effect="read")
async def look(place: str = "here") -> str:
    """Looks."""
    return f"seen {place}"


async def ask(ctx: RunContext) -> Any:
    return await ctx.ask(assemble(ctx.agent, ctx.transcript.view()))


def test_the_loops_swept_by_the_crash_tests_use_the_public_api_only() -> None:
    """S-001, R-001."""
    tree = ast.parse((Path(__file__).parents[1] / "crash" / "errands.py").read_text("utf-8"))
    imported = {
        node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module is not None
    } | {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    ours = {name for name in imported if name.startswith("perdure") and not name.startswith("perdure.testing")}
    assert ours == {"perdure"}


def test_the_built_in_loop_imports_nothing_but_the_context_and_pure_layers() -> None:
    """S-001, R-001, R-016."""
    from perdure.loops import react

    tree = ast.parse(Path(react.__file__).read_text("utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {str(name).split(".")[1] for name in imported} <= {"contracts", "prompting", "runtime"}
    assert "perdure.runtime.context" in imported


async def test_loops_run_one_after_the_other_share_one_head_and_one_end() -> None:
    """S-008, S-009, R-018: the built-in loop, called by another, leaves the end to its caller."""

    async def loop(ctx: RunContext, task: str) -> Any:
        first = await react(ctx, task)
        await ctx.do("between", lambda: "x")
        return [first, await react(ctx, task)]

    replies = [calls(("look", {})), text("one"), calls(("look", {"place": "there"})), text("two")]
    run = await embedded(agent_of(look, loop=loop), script(*replies))
    assert run.outcome.output == ["one", "two"]
    assert [kind for kind in kinds(run.envelopes) if kind.startswith(("run_", "proposal"))] == [
        "run_started",
        "proposal_received",
        "run_completed",
    ]
    for kept in range(1, len(run.envelopes)):
        again = await embedded(agent_of(look, loop=loop), script(*replies), recorded=cut(run, kept))
        assert again.outcome.output == ["one", "two"]


async def test_now_and_entropy_are_read_once_and_replayed() -> None:
    """S-003 to S-005, C6: on replay neither the clock nor chance is touched."""
    clock = ManualClock()

    async def loop(ctx: RunContext, task: str) -> Any:
        first = await ctx.now()
        number = await ctx.entropy()
        await ask(ctx)
        return [first, number]

    run = await embedded(agent_of(loop=loop), script(text("x")), clock=clock)
    assert run.outcome.output[0] == "2023-11-14T22:13:20+00:00"
    assert 0 <= run.outcome.output[1] < 2**64
    clock.advance(1000)
    again = await embedded(
        agent_of(loop=loop), script(text("x")), recorded=cut(run, before(run, "model_call_requested")), clock=clock
    )
    assert again.outcome.output == run.outcome.output


async def test_an_unread_clock_leaves_no_event() -> None:
    """C6, S-003: the readings every event carries are enough for limits."""
    run = await embedded(agent_of(look), script(text("Done.")))
    assert count(run.envelopes, "now_observed") == 0
    assert all(envelope.recorded_at == DAWN_NS for envelope in run.envelopes)


async def test_an_inline_call_is_recorded_and_replayed_like_any_other() -> None:
    """S-016, S-054, S-055."""
    ran: list[int] = []

    def double(n: int) -> int:
        ran.append(n)
        return 2 * n

    async def loop(ctx: RunContext, task: str) -> Any:
        value = await ctx.do("double", double, 4)
        await ask(ctx)
        return value

    run = await embedded(agent_of(loop=loop), script(text("x")))
    assert run.outcome.output == 8
    again = await embedded(
        agent_of(loop=loop), script(text("x")), recorded=cut(run, before(run, "model_call_requested"))
    )
    assert again.outcome.output == 8
    assert ran == [4]
    assert again.outcome.usage.tool_calls == 1


async def test_an_inline_call_gets_its_context_and_its_key() -> None:
    """S-050 to S-052."""
    seen: list[Any] = []

    async def send(to: str, call: CallContext) -> str:
        seen.append((call.call_id, call.idempotency_key, call.attempt))
        return to

    async def loop(ctx: RunContext, task: str) -> Any:
        await ctx.do("send", send, "a", effect="idempotent")
        return await ctx.do("send", send, "a", effect="read")

    run = await embedded(agent_of(loop=loop), script())
    assert run.outcome.output == "a"
    assert seen[0][0] == "0.0"
    assert len(seen[0][1]) == 32
    assert seen[1] == ("0.1", None, 1)


async def test_an_inline_call_that_fails_says_so_the_same_way_live_and_on_replay() -> None:
    """S-014, S-015."""
    told: list[str] = []

    def fails() -> None:
        raise ValueError("no rate today")

    async def loop(ctx: RunContext, task: str) -> Any:
        try:
            await ctx.do("rate", fails)
        except CallFailedError as error:
            told.append(f"{error} {error.unknown}")
        return (await ask(ctx)).text

    run = await embedded(agent_of(loop=loop), script(text("x")))
    await embedded(agent_of(loop=loop), script(text("x")), recorded=cut(run, before(run, "model_call_requested")))
    assert told == ["call 0.0 (rate): ValueError: no rate today False"] * 2


async def test_a_large_value_of_an_inline_call_reaches_the_loop_whole(tmp_path: Path) -> None:
    """S-055: what is stored apart for a model is not what a loop asked for."""
    from tests.runtime.runs import opened, started

    async def loop(ctx: RunContext, task: str) -> Any:
        return len(await ctx.do("big", lambda: "x" * 100_000))

    async with opened(tmp_path) as engine:
        outcome = await (await started(engine, agent_of(loop=loop), script())).wait()
    assert outcome.output == 100_000


async def test_an_inline_call_may_ask_to_be_answered_later(tmp_path: Path) -> None:
    """S-054."""
    from tests.runtime.runs import RUN, opened, started

    async def loop(ctx: RunContext, task: str) -> Any:
        return await ctx.do("ask", lambda: Suspend("which?", {"type": "integer"}))

    async with opened(tmp_path) as engine:
        agent = agent_of(loop=loop)
        outcome = await (await started(engine, agent, script())).wait()
        assert outcome.park is not None
        await engine.answer(RUN, outcome.park.call or "", 7)
        assert (await (await engine.resume(RUN, agent, model=script())).wait()).output == 7


async def test_arguments_without_a_json_form_are_refused_before_anything_is_recorded() -> None:
    """S-069."""

    async def loop(ctx: RunContext, task: str) -> Any:
        with pytest.raises(ValueFormError):
            await ctx.do("x", print, {1, 2})
        with pytest.raises(ConfigurationError, match="effect"):
            await ctx.do("x", print, effect="maybe")
        return "fine"

    run = await embedded(agent_of(loop=loop), script())
    assert run.outcome.output == "fine"
    assert count(run.envelopes, "tool_call_requested") == 0


async def test_a_batch_can_be_used_in_parts_and_a_call_of_the_loops_own_is_not_shown_to_the_model() -> None:
    """S-001: calls are told apart by turn and place."""

    async def loop(ctx: RunContext, task: str) -> Any:
        turn = await ask(ctx)
        await ctx.use(turn.calls[1:])
        own = await ctx.use([ToolCall("look", {"place": "own"})])
        await ctx.use(turn.calls[:1])
        await ask(ctx)
        return [one.call for one in own]

    model = script(calls(("look", {"place": "a"}), ("look", {"place": "b"})), text("x"))
    run = await embedded(agent_of(look, loop=loop), model)
    assert run.outcome.output == ["1.2"]
    assert asked(model)[1][2:] == ["results: 1.1 look completed: seen b", "results: 1.0 look completed: seen a"]


async def test_a_call_the_loop_leaves_out_is_answered_all_the_same() -> None:
    """H03 (a): no request goes out with an unanswered call."""

    async def loop(ctx: RunContext, task: str) -> Any:
        turn = await ask(ctx)
        await ctx.use(turn.calls[:1])
        return (await ask(ctx)).text

    model = script(calls(("look", {"place": "a"}), ("look", {"place": "b"})), text("x"))
    run = await embedded(agent_of(look, loop=loop), model)
    assert "1.1 look refused: Not run" in asked(model)[1][-1]
    again = await embedded(
        agent_of(look, loop=loop), script(*[text("x")] * 2), recorded=cut(run, before(run, "model_call_requested", 1))
    )
    assert kinds(again.envelopes)[-2:] == ["proposal_received", "run_completed"]


async def test_a_changed_path_is_remembered_for_the_run() -> None:
    """S-014: code may change under a waiting run."""

    async def old(ctx: RunContext, task: str) -> Any:
        await ask(ctx)
        return "old"

    async def new(ctx: RunContext, task: str) -> Any:
        changed = await ctx.patched("better")
        await ask(ctx)
        assert await ctx.patched("better") is changed
        return "new" if changed else "old"

    def agent(loop: Any) -> Any:
        loop.__qualname__ = "loop"
        return agent_of(loop=loop)

    first = await embedded(agent(new), script(text("x")))
    assert first.outcome.output == "new"
    assert count(first.envelopes, "patch_observed") == 1
    began_before = await embedded(agent(old), script(text("x")))
    kept = cut(began_before, before(began_before, "proposal_received"))
    resumed = await embedded(agent(new), script(text("x")), recorded=kept)
    assert resumed.outcome.output == "old"
    assert count(resumed.envelopes, "patch_observed") == 0


async def test_a_model_error_looks_the_same_live_and_on_replay() -> None:
    """S-013, S-014, S-015."""
    told: list[str] = []

    async def loop(ctx: RunContext, task: str) -> Any:
        try:
            await ask(ctx)
        except ModelError as error:
            told.append(f"{type(error).__name__} {error.kind} {error}")
        return (await ask(ctx)).text

    def model() -> ScriptedModel:
        broken = [fault("auth")]
        return ScriptedModel(lambda _: broken.pop() if broken else text("x"))

    run = await embedded(agent_of(loop=loop), model())
    assert run.outcome.output == "x"
    kept = cut(run, before(run, "model_call_requested", 1))
    again = await embedded(agent_of(loop=loop), script(text("x")), recorded=kept)
    assert again.outcome.output == "x"
    assert told[0] == told[1]
    assert told[0].startswith("ModelError auth call 1")


async def test_a_model_that_cannot_be_asked_ends_the_run_with_a_reason() -> None:
    """S-011, S-013, R-012, O13."""
    run = await embedded(agent_of(), script(fault("auth")))
    assert (run.outcome.status, run.outcome.terminal_reason) == ("failed", "model_error")
    assert "scripted fault auth" in str(run.outcome.answer)


async def test_a_loop_that_raises_ends_the_run_with_a_reason() -> None:
    """S-011, R-012, O13."""

    async def loop(ctx: RunContext, task: str) -> Any:
        raise KeyError("lost")

    run = await embedded(agent_of(loop=loop), script())
    assert (run.outcome.status, run.outcome.terminal_reason) == ("failed", "loop_error")
    assert "KeyError" in str(run.outcome.answer)


async def test_a_value_that_cannot_be_stored_is_no_end_in_success() -> None:
    """S-069, O13."""

    async def loop(ctx: RunContext, task: str) -> Any:
        return {1, 2}

    run = await embedded(agent_of(loop=loop), script())
    assert (run.outcome.status, run.outcome.terminal_reason) == ("failed", "loop_error")


async def test_a_sleep_needs_a_time_zone_and_one_in_the_past_goes_on_at_once() -> None:
    """S-022."""

    async def loop(ctx: RunContext, task: str) -> Any:
        with pytest.raises(ConfigurationError, match="time zone"):
            await ctx.sleep_until(datetime(2020, 1, 1))  # noqa: DTZ001 - what is refused
        await ctx.sleep_until(DAWN - timedelta(days=1))
        await ctx.sleep(timedelta(0))
        return "up"

    run = await embedded(agent_of(loop=loop), script())
    assert run.outcome.output == "up"
    assert kinds(run.envelopes)[2:6] == ["sleep_started", "woken", "sleep_started", "woken"]


async def test_a_woken_tools_result_is_drawn_from_the_recorded_instant() -> None:
    """S-022."""
    from perdure import Sleep

    @tool(effect="read")
    async def rest() -> Sleep:
        """Rests."""
        return Sleep(DAWN - timedelta(hours=1))

    model = script(calls(("rest", {})), text("Done."))
    await embedded(agent_of(rest), model)
    assert "2023-11-14T21:13:20+00:00" in asked(model)[1][-1]


async def test_the_answer_tool_is_for_the_loop_to_take_or_not() -> None:
    """S-043: another loop may go on after an answer."""

    async def loop(ctx: RunContext, task: str) -> Any:
        seen = await ctx.use((await ask(ctx)).calls)
        assert seen[0].status is ObservationStatus.ANSWER
        seen = await ctx.use((await ask(ctx)).calls)
        return seen[0].output

    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    run = await embedded(
        agent_of(loop=loop, output_schema=schema), script(calls(("answer", {"n": 1})), calls(("answer", {"n": 2})))
    )
    assert run.outcome.output == {"n": 2}
    assert observed(run.envelopes) == {}
    assert only(run.envelopes, ev.ProposalReceived)[0].output == {"n": 2}
