"""Cancelling: it reaches what runs, every call gets one observation, and the run ends as cancelled."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.runs import RUN, agent_of, before, embedded, kinds, observed, only, opened, script, started, state_of

from perdure import CallContext, RunContext, assemble, tool
from perdure.contracts.messages import AssistantTurn
from perdure.engine import Engine
from perdure.errors import UnknownError
from perdure.journal import events as ev
from perdure.runtime.journaling import index_row
from perdure.stores.url import open_store
from perdure.testing.clocks import ManualClock, SeededEntropy
from perdure.testing.replies import calls, text
from perdure.testing.scripted import ScriptedModel

END = text("Done.")
noted: list[str] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    noted.clear()


async def wait_for(noted_words: str) -> None:
    for _ in range(500):
        if noted_words in noted:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{noted_words!r} was never noted: {noted}")


def hanging(effect: Any, blocking: bool = False) -> Any:
    if blocking:

        @tool(name="hang", effect=effect)
        def waits(call: CallContext) -> str:
            """Blocks until it is given up."""
            noted.append("began")
            while not call.cancelled:
                time.sleep(0.005)
            noted.append("given up")
            return "late"

        return waits

    @tool(name="hang", effect=effect)
    async def sleeps() -> str:
        """Hangs."""
        noted.append("began")
        try:
            await asyncio.sleep(3600)
        finally:
            noted.append("given up")
        return "late"

    return sleeps


@tool(effect="read")
async def look() -> str:
    """Looks."""
    noted.append("looked")
    return "seen"


@tool
async def act() -> str:
    """Acts."""
    noted.append("acted")
    return "done"


async def cancelled(engine: Engine, agent: Any, model: ScriptedModel, when: str) -> Any:
    run = await started(engine, agent, model)
    await wait_for(when)
    await run.cancel("enough", by="ada")
    return await run.wait()


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize(
    ("effect", "reason"), [("read", "interrupted"), ("idempotent", "unknown"), ("write", "unknown")]
)
async def test_a_running_call_is_told_and_closed_and_each_call_of_its_batch_gets_one_observation(
    effect: Any, reason: str, blocking: bool, tmp_path: Path
) -> None:
    """R-012, R-016, O10, O13, C2."""
    batch = calls(("look", {}), ("hang", {}), ("act", {}), ("look", {}))
    async with opened(tmp_path) as engine:
        outcome = await cancelled(engine, agent_of(look, act, hanging(effect, blocking)), script(batch, END), "began")
        journal = await engine.journal(RUN)
        assert not (await engine.show(RUN))["lease"]["held"]
    await wait_for("given up")
    assert (outcome.status, outcome.outcome, outcome.terminal_reason) == ("cancelled", "cancelled", "user_cancelled")
    assert "enough" in outcome.answer
    assert noted.count("looked") == 1
    assert "acted" not in noted
    assert [event.reason for event in only(journal, ev.ToolCallFailed)] == [reason]
    shown = observed(journal)
    assert sorted(shown) == ["1.0", "1.1", "1.2", "1.3"]
    assert shown["1.2"] == shown["1.3"] == "Not run: the run was cancelled. Nothing of this call happened."
    assert kinds(journal)[-2:] == ["cancel_requested", "run_cancelled"]
    assert only(journal, ev.CancelRequested) == [ev.CancelRequested("enough", "ada")]
    assert state_of(journal).open == {}
    unresolved = only(journal, ev.RunCancelled)[0].unresolved
    assert unresolved == (() if effect == "read" else ("1.1",))
    assert effect == "read" or "1.1" in outcome.answer


async def test_a_cancel_during_a_model_call_ends_the_run_without_waiting_for_it(tmp_path: Path) -> None:
    """R-012, R-016, O13."""
    async with opened(tmp_path) as engine:
        run = await started(engine, agent_of(look), ScriptedModel([END], delay_ms=60_000))
        await asyncio.sleep(0.05)
        start = time.monotonic()
        await run.cancel()
        outcome = await run.wait()
        assert time.monotonic() - start < 5
        assert outcome.status == "cancelled"
        assert kinds(await engine.journal(RUN))[-2:] == ["cancel_requested", "run_cancelled"]


async def test_parallel_reads_are_all_told_and_all_closed(tmp_path: Path) -> None:
    """R-016, C12."""

    @tool(effect="read", parallel=True)
    async def weigh(n: int) -> str:
        """Hangs."""
        noted.append(f"began {n}")
        await asyncio.sleep(3600)
        return "x"

    async with opened(tmp_path) as engine:
        batch = calls(*[("weigh", {"n": n}) for n in range(3)])
        await cancelled(engine, agent_of(weigh), script(batch, END), "began 2")
        journal = await engine.journal(RUN)
    assert [event.reason for event in only(journal, ev.ToolCallFailed)] == ["interrupted"] * 3
    assert state_of(journal).open == {}


async def test_a_cancel_before_the_drive_took_its_first_step_ends_the_run_and_gives_the_lease_back(
    tmp_path: Path,
) -> None:
    """R-012."""
    async with opened(tmp_path) as engine:
        run = await started(engine, agent_of(look), ScriptedModel([END], delay_ms=60_000))
        await run.cancel("at once")  # not in a task of its own, which would let the drive begin
        assert (await run.wait()).status == "cancelled"
        assert not (await engine.show(RUN))["lease"]["held"]


async def test_a_loop_waiting_for_something_of_its_own_is_cancelled_too(tmp_path: Path) -> None:
    """R-012."""

    async def loop(ctx: RunContext, task: str) -> Any:
        noted.append("began")
        await asyncio.sleep(3600)

    async with opened(tmp_path) as engine:
        outcome = await cancelled(engine, agent_of(loop=loop), script(), "began")
    assert outcome.status == "cancelled"


async def test_a_loop_that_swallows_its_cancellation_begins_nothing_new(tmp_path: Path) -> None:
    """R-012."""

    async def ask(ctx: RunContext) -> AssistantTurn:
        return await ctx.ask(assemble(ctx.agent, ctx.transcript.view()))

    async def loop(ctx: RunContext, task: str) -> Any:
        noted.append("began")
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            noted.append("swallowed")
        return (await ask(ctx)).text

    model = script(END)
    async with opened(tmp_path) as engine:
        outcome = await cancelled(engine, agent_of(loop=loop), model, "began")
    assert outcome.status == "cancelled"
    assert model.requests == []


async def test_a_cancel_said_twice_counts_once(tmp_path: Path) -> None:
    """R-012."""
    async with opened(tmp_path) as engine:
        run = await started(engine, agent_of(hanging("read")), script(calls(("hang", {})), END))
        await wait_for("began")
        await asyncio.gather(run.cancel("first"), run.cancel("second"))
        assert (await run.wait()).status == "cancelled"
        assert only(await engine.journal(RUN), ev.CancelRequested) == [ev.CancelRequested("first")]


async def test_a_waiting_run_that_nobody_drives_is_cancelled_or_abandoned_at_once(tmp_path: Path) -> None:
    """S-066, R-012, O13."""

    async def loop(ctx: RunContext, task: str) -> Any:
        return await ctx.wait("well?", schema={})

    agent = agent_of(loop=loop)
    async with opened(tmp_path) as engine:
        for run_id in ("a", "b"):
            await (await engine.start(agent, "x", run_id=run_id, model=script())).wait()
        await engine.cancel("a", "no longer needed")
        outcome = await engine.outcome("a")
        assert (outcome.status, outcome.terminal_reason) == ("cancelled", "user_cancelled")
        assert "no longer needed" in str(outcome.answer)
        await engine.abandon("b", by="ada")
        outcome = await engine.outcome("b")
        assert (outcome.status, outcome.terminal_reason) == ("abandoned", "abandoned")
        for end in (engine.cancel, engine.abandon):
            with pytest.raises(UnknownError, match="ended already"):
                await end("a")


@pytest.mark.parametrize("verb", ["abandon", "cancel"])
@pytest.mark.parametrize(("effect", "named"), [("read", ()), ("idempotent", ("1.0",)), ("write", ("1.0",))])
async def test_an_end_from_outside_names_every_call_whose_effect_may_have_happened(
    tmp_path: Path, verb: str, effect: Any, named: tuple[str, ...]
) -> None:
    """S-066, O10, C23: as the end of a run that is cancelled while it is driven does."""

    @tool(name="act", effect=effect)
    async def acts() -> str:
        """Acts."""
        return "acted"

    whole = await embedded(agent_of(acts), script(calls(("act", {})), END))
    kept = whole.envelopes[: before(whole, "tool_call_completed")]
    store = await open_store(f"sqlite:{tmp_path / 'perdure.db'}", clock=ManualClock(), entropy=SeededEntropy(4))
    await store.release(await store.create(RUN, whole.key, kept, index_row(state_of(kept))))
    await store.close()
    async with opened(tmp_path) as engine:
        await getattr(engine, verb)(RUN)
        outcome = await engine.outcome(RUN)
        ended = only(await engine.journal(RUN), ev.RunAbandoned if verb == "abandon" else ev.RunCancelled)[0]
    assert ended.unresolved == named
    assert ("may have happened: 1.0" in str(outcome.answer)) == bool(named)
    assert outcome.output is None
