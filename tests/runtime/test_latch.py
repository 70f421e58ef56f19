"""The latch: a loop may do what it likes with a park or a refusal, the engine goes by what happened."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.runs import RUN, agent_of, before, cut, embedded, kinds, opened, script, started

from perdure import ConcurrentUseError, Limits, Parked, RunContext, assemble, tool
from perdure.contracts.messages import AssistantTurn
from perdure.engine import Engine
from perdure.errors import DefinitionChangedError, DivergedError, LeaseHeldError, RefusedError
from perdure.testing.replies import calls, text
from perdure.testing.scripted import ScriptedModel

END = text("Done.")


@tool(effect="read")
async def look(place: str = "here") -> str:
    """Looks."""
    return f"seen {place}"


async def ask(ctx: RunContext) -> AssistantTurn:
    return await ctx.ask(assemble(ctx.agent, ctx.transcript.view()))


# A park


async def swallows(ctx: RunContext) -> Any:
    try:
        await ctx.wait("which?", schema={})
    except BaseException:  # noqa: BLE001 - what is tested
        return "made up"


async def raises_another(ctx: RunContext) -> Any:
    try:
        await ctx.wait("which?", schema={})
    except BaseException as parked:
        raise ValueError("something else") from parked


async def groups(ctx: RunContext) -> Any:
    async with asyncio.TaskGroup() as group:
        group.create_task(ctx.wait("which?", schema={}))


async def goes_on(ctx: RunContext) -> Any:
    for _ in range(3):
        try:
            await ctx.wait("which?", schema={})
        except Parked:
            continue
    return "made up"


async def goes_on_elsewhere(ctx: RunContext) -> Any:
    with suppress(Parked):
        await ctx.wait("which?", schema={})
    with pytest.raises(Parked):
        await ask(ctx)
    with pytest.raises(Parked):
        await ctx.now()
    with pytest.raises(Parked):
        await ctx.do("x", lambda: 1)
    return "made up"


@pytest.mark.parametrize("loop", [swallows, raises_another, groups, goes_on, goes_on_elsewhere])
async def test_a_loop_that_swallows_a_park_parks_all_the_same(loop: Any) -> None:
    """S-011, S-032: whatever it returned, raised, grouped or swallowed."""

    async def run(ctx: RunContext, task: str) -> Any:
        return await loop(ctx)

    parked = await embedded(agent_of(loop=run), script(END))
    assert parked.outcome.park is not None
    assert parked.outcome.park.kind == "suspended"
    assert kinds(parked.envelopes) == ["run_started", "drive_started", "suspended"]


async def test_every_further_call_raises_the_very_same_signal() -> None:
    """S-011."""
    caught: list[BaseException] = []

    async def loop(ctx: RunContext, task: str) -> Any:
        for _ in range(3):
            try:
                await ctx.wait("which?", schema={})
            except Parked as parked:
                caught.append(parked)

    await embedded(agent_of(loop=loop), script())
    assert caught[0] is caught[1] is caught[2]


async def test_a_park_is_no_exception_that_except_exception_catches() -> None:
    """S-011."""
    assert not issubclass(Parked, Exception)


async def test_a_guard_ends_the_run_though_the_loop_goes_on() -> None:
    """C8, O13."""

    async def loop(ctx: RunContext, task: str) -> Any:
        for _ in range(9):
            try:
                await ctx.use((await ask(ctx)).calls)
            except Parked:
                continue
        return "made up"

    run = await embedded(agent_of(look, loop=loop), script(*[calls(("look", {}))] * 9))
    assert run.outcome.terminal_reason == "no_progress"


# One caller at a time


async def test_a_second_call_while_one_is_open_is_refused_and_records_nothing() -> None:
    """S-001: before anything is recorded; the first goes on."""

    async def loop(ctx: RunContext, task: str) -> Any:
        first = asyncio.ensure_future(ask(ctx))
        await asyncio.sleep(0)
        for second in (ctx.now, ctx.entropy, ctx.check_limits):
            with pytest.raises(ConcurrentUseError, match="ask is open"):
                await second()
        return (await first).text

    run = await embedded(agent_of(loop=loop), ScriptedModel([END], delay_ms=5))
    assert run.outcome.output == "Done."
    assert kinds(run.envelopes) == [
        "run_started",
        "drive_started",
        "model_call_requested",
        "model_call_completed",
        "proposal_received",
        "run_completed",
    ]


async def test_concurrency_inside_a_loop_is_a_batch() -> None:
    """S-001: two tasks that each ask collide."""

    async def loop(ctx: RunContext, task: str) -> Any:
        results = await asyncio.gather(ask(ctx), ask(ctx), return_exceptions=True)
        return [type(result).__name__ for result in results]

    run = await embedded(agent_of(loop=loop), ScriptedModel([END, END], delay_ms=5))
    assert run.outcome.output == ["AssistantTurn", "ConcurrentUseError"]


# Refusals


async def test_a_divergence_records_nothing_even_when_the_loop_swallows_it(tmp_path: Path) -> None:
    """S-070, S-013: the run stays as it was, event for event and byte for byte."""
    seen: list[str] = []

    async def loop(ctx: RunContext, task: str) -> Any:
        await ask(ctx)
        if not seen:
            seen.append("first")
            return await ctx.wait("which?", schema={})
        try:
            await ctx.do("other", lambda: 1)
        except DivergedError as error:
            seen.append(f"{error.call} {error.part} | {error.recorded} | {error.asked}")
            first = error
        with pytest.raises(DivergedError) as again:
            await ctx.wait("which?", schema={})
        seen.append(f"the same one: {again.value is first}")
        return "made up"

    agent = agent_of(loop=loop)
    async with opened(tmp_path) as engine:
        await (await started(engine, agent, script(END))).wait()
        whole = await engine.journal(RUN)
        with pytest.raises(DivergedError) as found:
            await (await engine.resume(RUN, agent, model=script(END))).wait()
        assert await engine.journal(RUN) == whole
        assert (await engine.outcome(RUN)).status == "parked"
    assert seen[1:] == ["1.0 request | suspended at 1.0 | tool_call_requested at 1.0 (other)", "the same one: True"]
    assert found.value.exit_code == 4
    assert found.value.code == "divergence"


async def test_a_loop_that_ends_early_does_not_throw_recorded_work_away(tmp_path: Path) -> None:
    """S-070: an end where more is recorded is a divergence, and so is an error there."""

    async def asks(ctx: RunContext, task: str) -> Any:
        return (await ask(ctx)).text

    async def ends(ctx: RunContext, task: str) -> Any:
        return "early"

    async def breaks(ctx: RunContext, task: str) -> Any:
        raise ValueError("early")

    def agent(loop: Any) -> Any:
        loop.__qualname__ = "loop"
        return agent_of(loop=loop)

    whole = await embedded(agent(asks), script(END))
    for loop in (ends, breaks):
        with pytest.raises(RefusedError, match="model_call_requested"):
            await embedded(agent(loop), script(), recorded=cut(whole, before(whole, "run_completed")))


async def test_a_different_prompt_tool_or_policy_is_a_changed_definition_that_names_the_part(tmp_path: Path) -> None:
    """S-071, C17: nothing is asked and nothing recorded."""

    @tool(name="look", effect="read")
    async def other(place: str = "here") -> str:
        """Looks in another way."""
        return "other"

    async def loop(ctx: RunContext, task: str) -> Any:
        return "x"

    agent = agent_of(look, limits=Limits(max_model_turns=1))
    changed = {
        "tools": agent_of(other, limits=Limits(max_model_turns=1)),
        "policy": agent_of(look, limits=Limits(max_model_turns=9)),
        "loop": agent_of(look, limits=Limits(max_model_turns=1), loop=loop),
        "output": agent_of(look, limits=Limits(max_model_turns=1), output_schema={"type": "object"}),
    }
    async with opened(tmp_path) as engine:
        await (await started(engine, agent, script(calls(("look", {})), END))).wait()
        whole = await engine.journal(RUN)
        await engine.limit(RUN, max_model_turns=9)
        lifted = await engine.journal(RUN)
        assert lifted[: len(whole)] == whole
        model = script(calls(("look", {})), END)
        for part, another in changed.items():
            with pytest.raises(DefinitionChangedError, match=part) as found:
                await engine.resume(RUN, another, model=model)
            assert part in found.value.parts
            assert found.value.exit_code == 4
        assert model.requests == []
        assert await engine.journal(RUN) == lifted


async def test_labels_and_the_model_are_no_part_of_the_definition(tmp_path: Path) -> None:
    """S-077, C17."""

    async def loop(ctx: RunContext, task: str) -> Any:
        return [await ctx.wait("which?", schema={}), (await ask(ctx)).text]

    class Other(ScriptedModel):
        target = "scripted:other"

    async with opened(tmp_path) as engine:
        run = await engine.start(agent_of(loop=loop, labels={"a": "1"}), "x", run_id=RUN, model=script(END))
        await run.wait()
        await engine.answer(RUN, "0.0", 1)
        again = await engine.resume(RUN, agent_of(loop=loop, labels={"b": "2"}), model=Other([END]))
        assert (await again.wait()).output == [1, "Done."]
        assert "model_bound" in kinds(await engine.journal(RUN))


async def test_two_drivers_of_one_run_in_one_process_are_one_too_many(tmp_path: Path) -> None:
    """R-012: the second asks nothing."""
    agent = agent_of(look)
    engine: Engine
    async with opened(tmp_path) as engine:
        run = await started(engine, agent, ScriptedModel([END], delay_ms=50))
        model = script(END)
        with pytest.raises(LeaseHeldError):
            await engine.resume(RUN, agent, model=model)
        assert model.requests == []
        assert (await run.wait()).output == "Done."


async def test_a_run_that_ended_is_not_driven_again(tmp_path: Path) -> None:
    """S-070, S-016: resuming it gives its end back."""
    async with opened(tmp_path) as engine:
        await (await started(engine, agent_of(), script(END))).wait()
        whole = await engine.journal(RUN)
        model = script(END)
        outcome = await (await engine.resume(RUN, agent_of(), model=model)).wait()
        assert outcome.output == "Done."
        assert model.requests == []
        assert await engine.journal(RUN) == whole


async def test_the_recorded_input_wins_over_what_is_given() -> None:
    """S-006."""
    from perdure import run_embedded
    from perdure.testing.clocks import ManualClock, SeededEntropy

    async def loop(ctx: RunContext, task: str) -> Any:
        await ask(ctx)
        return task

    whole = await embedded(agent_of(loop=loop), script(END))
    again = await run_embedded(
        agent_of(loop=loop),
        "another task",
        model=script(END),
        recorded=cut(whole, before(whole, "proposal_received")),
        clock=ManualClock(),
        entropy=SeededEntropy(),
    )
    assert again.outcome.output == "the task"
