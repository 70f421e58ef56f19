"""Runs that wait: for an answer, for a time, and for the process to come back."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.runs import RUN, agent_of, asked, count, kinds, only, opened, script, started

from perdure import ConfigurationError, InvalidAnswerError, RunContext, Sleep, Suspend, assemble, tool
from perdure.errors import PerdureError, UnknownError
from perdure.journal import events as ev
from perdure.testing.clocks import DAWN_NS, ManualClock
from perdure.testing.replies import calls, text
from perdure.testing.scripted import ScriptedModel

DAWN = datetime.fromtimestamp(DAWN_NS / 10**9, UTC)
END = text("Done.")
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


@tool(effect="read")
async def question() -> Suspend:
    """Asks."""
    return Suspend("may we?", SCHEMA, kind="webhook")


@tool(effect="read")
async def rest() -> Sleep:
    """Rests an hour."""
    return Sleep(DAWN + timedelta(hours=1))


async def test_a_question_parks_with_reason_kind_and_schema_and_its_answer_becomes_the_result(tmp_path: Path) -> None:
    """S-012, S-054, O15, C18: the kind is carried unchanged."""
    agent = agent_of(question)
    async with opened(tmp_path) as engine:
        outcome = await (await started(engine, agent, script(calls(("question", {})), END))).wait()
        park = outcome.park
        assert park is not None
        assert (park.kind, park.call) == ("suspended", "1.0")
        assert park.detail == {"kind": "webhook", "reason": "may we?", "schema": SCHEMA}
        assert "perdure answer run-1 1.0" in park.next
        await engine.answer(RUN, "1.0", {"ok": True}, by="ada", key="k-1")
        model = script(calls(("question", {})), END)
        outcome = await (await engine.resume(RUN, agent, model=model)).wait()
        resumed = only(await engine.journal(RUN), ev.Resumed)
    assert outcome.output == "Done."
    assert asked(model)[0][-1] == 'results: 1.0 question completed: {"ok":true}'
    assert [(event.value, event.by, event.key) for event in resumed] == [({"ok": True}, "ada", "k-1")]


@pytest.mark.parametrize("value", [None, {"ok": "yes"}, {}, 7, {1, 2}])
async def test_an_answer_that_does_not_fit_is_refused_and_records_nothing(value: Any, tmp_path: Path) -> None:
    """S-076: checked against the recorded schema before it is recorded."""
    async with opened(tmp_path) as engine:
        await (await started(engine, agent_of(question), script(calls(("question", {})), END))).wait()
        before_it = await engine.journal(RUN)
        with pytest.raises(PerdureError):
            await engine.answer(RUN, "1.0", value)
        assert await engine.journal(RUN) == before_it


async def test_the_first_answer_wins_and_the_second_is_told_so(tmp_path: Path) -> None:
    """S-076."""
    async with opened(tmp_path) as engine:
        await (await started(engine, agent_of(question), script(calls(("question", {})), END))).wait()
        await engine.answer(RUN, "1.0", {"ok": True})
        with pytest.raises(InvalidAnswerError):
            await engine.answer(RUN, "1.0", {"ok": False})
        with pytest.raises(InvalidAnswerError, match="waits for no answer"):
            await engine.answer(RUN, "9.9", {"ok": False})
        with pytest.raises(UnknownError):
            await engine.answer("run-9", "1.0", {"ok": False})
        assert count(await engine.journal(RUN), "resumed") == 1


async def test_null_is_an_answer_where_the_schema_takes_it(tmp_path: Path) -> None:
    """S-076."""

    async def loop(ctx: RunContext, task: str) -> Any:
        return {"got": await ctx.wait("well?", schema={})}

    async with opened(tmp_path) as engine:
        await (await started(engine, agent_of(loop=loop), script())).wait()
        await engine.answer(RUN, "0.0", None)
        outcome = await (await engine.resume(RUN, agent_of(loop=loop), model=script())).wait()
    assert outcome.output == {"got": None}


async def test_a_run_resumed_before_its_answer_waits_on_and_records_nothing(tmp_path: Path) -> None:
    """S-032, O15."""
    agent = agent_of(question)
    async with opened(tmp_path) as engine:
        await (await started(engine, agent, script(calls(("question", {})), END))).wait()
        before_it = await engine.journal(RUN)
        for _ in range(7):
            outcome = await (await engine.resume(RUN, agent, model=script(calls(("question", {})), END))).wait()
            assert outcome.park is not None
            assert outcome.park.kind == "suspended"
        assert await engine.journal(RUN) == before_it


async def test_a_sleep_is_durable_and_wakes_once(tmp_path: Path) -> None:
    """S-012, S-022, S-054, O15: on whatever machine comes by after its time, also a much later one."""
    clock, agent = ManualClock(), agent_of(rest)
    async with opened(tmp_path, clock) as engine:
        outcome = await (await started(engine, agent, script(calls(("rest", {})), END))).wait()
        assert outcome.park is not None
        assert outcome.park.detail == {"wake_at": "2023-11-14T23:13:20.000000000Z"}
    clock.advance(3599)
    async with opened(tmp_path, clock) as engine:
        before_it = await engine.journal(RUN)
        runs, problems = await engine.recover(agent)
        assert (runs, problems) == ([], {})
        outcome = await (await engine.resume(RUN, agent, model=script(calls(("rest", {})), END))).wait()
        assert outcome.status == "parked"
        assert await engine.journal(RUN) == before_it
    clock.advance(100 * 3600)
    async with opened(tmp_path, clock) as engine:
        model = script(calls(("rest", {})), END)
        outcome = await (await engine.resume(RUN, agent, model=model)).wait()
        assert count(await engine.journal(RUN), "woken") == 1
    assert outcome.output == "Done."
    assert "2023-11-14T23:13:20+00:00" in asked(model)[0][-1]


async def test_what_recover_picks_up_is_what_can_go_on(tmp_path: Path) -> None:
    """R-183, O15: not the parked, not the ended; the sleeping once their time has come."""

    async def loop(ctx: RunContext, task: str) -> Any:
        if task == "asks":
            await ctx.wait("well?", schema={})
        if task == "sleeps":
            await ctx.sleep(timedelta(hours=1))
        return "up"

    clock, agent = ManualClock(), agent_of(loop=loop)
    async with opened(tmp_path, clock) as engine:
        for task in ("asks", "sleeps", "ends"):
            await (await engine.start(agent, task, run_id=task, model=script())).wait()
        assert (await engine.recover(agent))[0] == []
        clock.advance(3600)

        due, problems = await engine.recover(agent_of(loop=loop, model=script()))
        assert problems == {}
        assert [run.id for run in due] == ["sleeps"]
        assert (await due[0].wait()).output == "up"


async def test_recover_says_why_a_run_could_not_be_picked_up(tmp_path: Path) -> None:
    """R-183, C17."""
    clock = ManualClock()

    async def loop(ctx: RunContext, task: str) -> Any:
        await ctx.sleep(timedelta(hours=1))

    async with opened(tmp_path, clock) as engine:
        await (await started(engine, agent_of(loop=loop), script())).wait()
        clock.advance(3600)
        runs, problems = await engine.recover(agent_of(rest, loop=loop, model=script()))
    assert runs == []
    assert "tools" in str(problems[RUN])


async def test_a_wait_for_what_cannot_be_checked_is_refused_before_it_is_recorded(tmp_path: Path) -> None:
    """S-076, S-075."""

    async def loop(ctx: RunContext, task: str) -> Any:
        with pytest.raises(ConfigurationError):
            await ctx.wait("well?", schema={"type": "nonsense"})
        return "x"

    async with opened(tmp_path) as engine:
        await (await started(engine, agent_of(loop=loop), script())).wait()
        assert count(await engine.journal(RUN), "suspended") == 0


async def test_a_call_that_waits_holds_back_what_follows_in_its_batch(tmp_path: Path) -> None:
    """C12, O15."""
    ran: list[str] = []

    @tool
    async def act() -> str:
        """Acts."""
        ran.append("acted")
        return "x"

    agent = agent_of(question, act)
    batch = calls(("act", {}), ("question", {}), ("act", {}))
    async with opened(tmp_path) as engine:
        await (await started(engine, agent, script(batch, END))).wait()
        assert ran == ["acted"]
        await engine.answer(RUN, "1.1", {"ok": True})
        assert (await (await engine.resume(RUN, agent, model=script(batch, END))).wait()).output == "Done."
    assert ran == ["acted", "acted"]


async def test_an_engine_that_closes_parks_its_runs_in_good_order(tmp_path: Path) -> None:
    """O15, R-012: the call in flight settles, the lease is given up, nothing is cancelled."""
    import asyncio

    began = asyncio.Event()

    @tool
    async def act(n: int) -> str:
        """Takes a moment."""
        began.set()
        await asyncio.sleep(0.05)
        return "acted"

    replies = [calls(("act", {"n": 1})), calls(("act", {"n": 2})), END]
    async with opened(tmp_path) as engine:
        await started(engine, agent_of(act), script(*replies))
        await began.wait()
    async with opened(tmp_path) as engine:
        journal = await engine.journal(RUN)
        assert kinds(journal)[-1] == "tool_call_completed"
        assert (await engine.outcome(RUN)).status == "idle"
        assert (await (await engine.resume(RUN, agent_of(act), model=script(*replies))).wait()).output == "Done."


async def test_a_stop_is_taken_before_anything_new_begins(tmp_path: Path) -> None:
    """O15: the model call in flight ends, and is not followed by its tools."""
    import asyncio

    ran: list[str] = []

    @tool
    async def act() -> str:
        """Acts."""
        ran.append("acted")
        return "x"

    async with opened(tmp_path) as engine:
        run = await started(engine, agent_of(act), ScriptedModel([calls(("act", {})), END], delay_ms=30))
        await asyncio.sleep(0.01)
        engine.stop()
        outcome = await run.wait()
        assert outcome.status == "idle"
        assert outcome.park is None
        assert kinds(await engine.journal(RUN))[-1] == "model_call_completed"
    assert ran == []


async def test_history_then_live_and_only_what_is_durable(tmp_path: Path) -> None:
    """R-183, R-184: a reader can leave and come back at any place."""
    replies = [calls(("look", {})), END]

    @tool(effect="read")
    async def look() -> str:
        """Looks."""
        return "seen"

    async with opened(tmp_path) as engine:
        run = await started(engine, agent_of(look), ScriptedModel(replies, delay_ms=10))
        live = [envelope async for envelope in run.events()]
        assert tuple(live) == await engine.journal(RUN)
        assert live[-1].kind == "run_completed"
        assert [envelope.seq async for envelope in run.events(from_seq=5)] == list(range(5, len(live)))


async def test_deltas_go_to_an_observer_and_never_into_the_journal(tmp_path: Path) -> None:
    """R-184, S-078, R-003."""
    heard: list[tuple[str, str, str]] = []
    async with opened(tmp_path) as engine:
        engine.observer = lambda run, call, event: heard.append((run, call, type(event).__name__))
        await (await started(engine, agent_of(), ScriptedModel([text("a long reply in pieces")], chunk=4))).wait()
        journal = await engine.journal(RUN)
    assert [one for one in heard if one[2] == "TextDelta"] == [(RUN, "1", "TextDelta")] * 6
    assert "Delta" not in " ".join(kinds(journal))
    assert count(journal, "model_call_completed") == 1


async def test_prompts_are_not_stored(tmp_path: Path) -> None:
    """S-078: a request event holds digests, and only those of the parts that changed."""

    @tool(effect="read")
    async def look() -> str:
        """Looks."""
        return "seen"

    async with opened(tmp_path) as engine:
        await (await started(engine, agent_of(look), script(calls(("look", {})), END))).wait()
        requested = only(await engine.journal(RUN), ev.ModelCallRequested)
        payloads = [one.payload or b"" for one in await engine.journal(RUN) if one.kind == "model_call_requested"]
    assert sorted(requested[0].parts) == ["settings", "system", "tools"]
    assert requested[1].parts == {}
    assert requested[0].transcript != requested[1].transcript
    assert all(b"Do it." not in payload and b"the task" not in payload for payload in payloads)


async def test_a_loop_that_assembles_another_prompt_records_only_the_part_that_changed(tmp_path: Path) -> None:
    """S-078, O12."""
    from perdure import ModelRequest

    async def loop(ctx: RunContext, task: str) -> Any:
        first = assemble(ctx.agent, ctx.transcript.view())
        await ctx.ask(first)
        await ctx.ask(ModelRequest("Other.", first.tools, ctx.transcript.view(), first.settings))
        return "x"

    async with opened(tmp_path) as engine:
        await (await started(engine, agent_of(loop=loop), script(END, END))).wait()
        requested = only(await engine.journal(RUN), ev.ModelCallRequested)
    assert list(requested[1].parts) == ["system"]
