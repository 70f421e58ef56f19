"""How calls and runs end: cancels that meet an end, texts that cannot be stored, what the journal holds of them."""

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.runs import (
    RUN,
    agent_of,
    asked,
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

from perdure import RunContext, Sleep, StopReason, Suspend, ToolFailed, Unknown, assemble, tool
from perdure.clock import SystemClock, SystemEntropy
from perdure.contracts.contract import canonical
from perdure.engine import Engine
from perdure.journal import events as ev
from perdure.journal.envelope import Envelope
from perdure.ports import IndexRow, Lease, Store
from perdure.runtime.journaling import index_row
from perdure.stores.url import open_store
from perdure.testing.clocks import DAWN_NS, ManualClock, SeededEntropy
from perdure.testing.replies import Reply, calls, text

DAWN = datetime.fromtimestamp(DAWN_NS / 10**9, UTC)
END = text("Done.")
LONG_S = 10
"""A test that takes longer than this hangs, in seconds."""
ran: list[str] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    ran.clear()


class Holding:
    """Stores everything, and holds the answer to what a test names until it is let go."""

    def __init__(self, store: Store, held: str) -> None:
        self._store, self._held = store, held
        self.reached, self.go = asyncio.Event(), asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def append(self, lease: Lease, envelopes: Sequence[Envelope], index: IndexRow | None) -> Any:
        stored = self._store.append(lease, envelopes, index)
        if self._held not in kinds(envelopes):
            return stored
        self.reached.set()
        return asyncio.ensure_future(self._later(stored))

    async def _later(self, stored: Any) -> None:
        await stored
        await self.go.wait()

    async def put_artifact(self, run_id: str, data: bytes) -> str:
        digest = await self._store.put_artifact(run_id, data)
        if self._held == "artifact":
            self.reached.set()
            await self.go.wait()
        return digest


@asynccontextmanager
async def held_at(directory: Path, held: str) -> Any:
    """An engine over a store that holds what is named, and that store."""
    store = await open_store(f"sqlite:{directory / 'perdure.db'}", clock=SystemClock(), entropy=SystemEntropy())
    holding: Any = Holding(store, held)
    async with Engine(holding, SystemClock(), SystemEntropy()) as engine:
        yield engine, holding


# Cancels that come late


async def test_a_cancel_while_the_end_is_being_committed_leaves_the_run_completed(tmp_path: Path) -> None:
    """R-012, O13: what has ended is not cut off, and who waits for it gets its outcome."""
    async with held_at(tmp_path, "run_completed") as (engine, store):
        run = await started(engine, agent_of(), script(END))
        waiting = asyncio.create_task(run.wait())
        await asyncio.wait_for(store.reached.wait(), LONG_S)
        cancelling = asyncio.create_task(run.cancel("too late"))
        await asyncio.sleep(0.02)
        store.go.set()
        await asyncio.wait_for(cancelling, LONG_S)
        outcome = await waiting
        assert (outcome.status, outcome.output) == ("completed", "Done.")
        assert await run.wait() == outcome
        assert kinds(await engine.journal(RUN))[-1] == "run_completed"


async def test_a_cancel_of_a_drive_that_is_already_parking_settles_the_run_as_cancelled(tmp_path: Path) -> None:
    """R-012, S-066, O13."""
    parking, go = asyncio.Event(), asyncio.Event()

    async def loop(ctx: RunContext, task: str) -> Any:
        try:
            return await ctx.wait("which?", schema={})
        finally:
            parking.set()
            await go.wait()
            ran.append("tidied up")

    async with opened(tmp_path) as engine:
        run = await started(engine, agent_of(loop=loop), script())
        await asyncio.wait_for(parking.wait(), LONG_S)
        cancelling = asyncio.create_task(run.cancel("enough", by="ada"))
        await asyncio.sleep(0.02)
        go.set()
        await asyncio.wait_for(cancelling, LONG_S)
        assert ran == ["tidied up"]
        assert (await run.wait()).status == "cancelled"
        journal = await engine.journal(RUN)
        assert kinds(journal)[-3:] == ["suspended", "cancel_requested", "run_cancelled"]
        assert only(journal, ev.CancelRequested) == [ev.CancelRequested("enough", "ada")]


async def test_a_cancel_while_a_large_result_is_being_stored_keeps_the_result(tmp_path: Path) -> None:
    """R-016, O10: the write has ended, so it is in no doubt."""
    large = "x" * 70_000

    @tool
    async def act() -> str:
        """Acts and tells much."""
        ran.append("acted")
        return large

    async with held_at(tmp_path, "artifact") as (engine, store):
        run = await started(engine, agent_of(act), script(calls(("act", {})), END))
        await asyncio.wait_for(store.reached.wait(), LONG_S)
        cancelling = asyncio.create_task(run.cancel("enough"))
        await asyncio.sleep(0.02)
        store.go.set()
        await asyncio.wait_for(cancelling, LONG_S)
        assert (await run.wait()).status == "cancelled"
        journal = await engine.journal(RUN)
        assert count(journal, "tool_call_failed") == 0
        completed = only(journal, ev.ToolCallCompleted)[0]
        assert await store.get_artifact(RUN, completed.artifact) == canonical(large)
        assert only(journal, ev.RunCancelled)[0].unresolved == ()


async def test_a_loops_own_time_limit_while_a_large_result_is_being_stored_keeps_the_result(tmp_path: Path) -> None:
    """R-016, S-011, O10: the loop is told of its time limit, and a resume finds the call ended."""

    @tool
    async def act() -> str:
        """Acts and tells much."""
        ran.append("acted")
        return "x" * 70_000

    limits: list[asyncio.Timeout] = []

    async def loop(ctx: RunContext, task: str) -> Any:
        turn = await ctx.ask(assemble(ctx.agent, ctx.transcript.view()))
        try:
            async with asyncio.timeout(None) as limit:
                limits.append(limit)
                return len((await ctx.use(turn.calls))[0].text)
        except TimeoutError:
            ran.append("out of time")

    async with held_at(tmp_path, "artifact") as (engine, store):
        agent = agent_of(act, loop=loop)
        run = await started(engine, agent, script(calls(("act", {}))))
        await asyncio.wait_for(store.reached.wait(), LONG_S)
        limits[0].reschedule(asyncio.get_running_loop().time())
        await asyncio.sleep(0.02)
        store.go.set()
        assert (await asyncio.wait_for(run.wait(), LONG_S)).status == "idle"
        assert ran == ["acted", "out of time"]
        assert kinds(await engine.journal(RUN))[-1] == "tool_call_completed"
        outcome = await (await engine.resume(RUN, agent, model=script())).wait()
        assert outcome.status == "completed"
        assert ran == ["acted", "out of time"]


async def test_a_tool_that_swallows_its_cancellation_holds_a_cancel_no_longer_than_the_grace(tmp_path: Path) -> None:
    """R-012, R-016: a tool without a time limit, too."""
    began, release = asyncio.Event(), asyncio.Event()

    @tool(effect="read")
    async def stubborn() -> str:
        """Goes on whatever it is told."""
        began.set()
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                ran.append("swallowed")
        return "late"

    async with opened(tmp_path) as engine:
        run = await started(engine, agent_of(stubborn), script(calls(("stubborn", {})), END))
        await asyncio.wait_for(began.wait(), LONG_S)
        cancelling = asyncio.create_task(run.cancel())
        done, _ = await asyncio.wait({cancelling}, timeout=LONG_S)
        release.set()
        assert done == {cancelling}
        assert (await run.wait()).status == "cancelled"
        assert ran == ["swallowed"]
        assert [event.reason for event in only(await engine.journal(RUN), ev.ToolCallFailed)] == ["interrupted"]


async def test_a_journal_cut_between_the_request_to_cancel_and_the_end_ends_cancelled(tmp_path: Path) -> None:
    """R-012, R-118, O13: the request stands, with its reason, and is not made again."""
    run = await embedded(agent_of(), script(END))
    asks = extended(cut(run, before(run, "model_call_requested")), ev.CancelRequested("enough", "ada"))
    url = f"sqlite:{tmp_path / 'perdure.db'}"
    store = await open_store(url, clock=ManualClock(), entropy=SeededEntropy(77))
    await store.release(await store.create(RUN, run.key, asks.envelopes, index_row(state_of(asks.envelopes))))
    await store.close()
    model = script(END)
    async with Engine.open(url) as engine:
        outcome = await (await engine.resume(RUN, agent_of(), model=model)).wait()
        journal = await engine.journal(RUN)
    assert (outcome.status, outcome.terminal_reason) == ("cancelled", "user_cancelled")
    assert "enough" in str(outcome.answer)
    assert model.requests == []
    assert count(journal, "cancel_requested") == 1
    assert kinds(journal)[-1] == "run_cancelled"


async def test_such_a_journal_ends_cancelled_over_a_list_too() -> None:
    """R-012, R-002: one kernel."""
    run = await embedded(agent_of(), script(END))
    asks = extended(cut(run, before(run, "model_call_requested")), ev.CancelRequested("enough", "ada"))
    model = script(END)
    again = await embedded(agent_of(), model, recorded=asks)
    assert (again.outcome.status, again.outcome.terminal_reason) == ("cancelled", "user_cancelled")
    assert model.requests == []
    assert kinds(again.envelopes)[-1] == "run_cancelled"
    assert count(again.envelopes, "cancel_requested") == 1


# Texts that UTF-8 cannot hold


@tool
async def fails() -> str:
    """Fails with half a character."""
    raise ToolFailed("half \ud83d of it" + "." * 2_000)


@tool
async def returns_failure() -> Any:
    """Gives a failure back."""
    return ToolFailed("half \udfff of it")


@tool
async def cannot_say() -> Any:
    """Does not know, and not why."""
    return Unknown(None)  # type: ignore[arg-type]


@tool
async def cannot_say_well() -> Any:
    """Does not know, in half a character."""
    return Unknown("half \udfff of it")


@pytest.mark.parametrize(
    ("function", "reason", "message"),
    [
        (fails, "handler", "half \ufffd of it"),
        (returns_failure, "handler", "half \ufffd of it"),
        (cannot_say, "unknown", "None"),
        (cannot_say_well, "unknown", "half \ufffd of it"),
    ],
)
async def test_a_failure_whose_text_cannot_be_stored_is_recorded_all_the_same_and_shown_bounded(
    function: Any, reason: str, message: str
) -> None:
    """S-069, S-014: half a character becomes U+FFFD, and the run goes on."""
    run = await embedded(agent_of(function), script(calls((function.descriptor.name, {})), END))
    assert run.outcome.output == "Done."
    failed = only(run.envelopes, ev.ToolCallFailed)[0]
    assert failed.reason == reason
    assert failed.message.startswith(message)
    assert message in failed.observation
    assert len(failed.observation) < 1_000


async def test_a_loops_error_whose_text_cannot_be_stored_ends_the_run_with_a_bounded_reason() -> None:
    """S-069, S-011, O13."""

    async def loop(ctx: RunContext, task: str) -> Any:
        raise ValueError("\udc80" * 20_000)

    run = await embedded(agent_of(loop=loop), script())
    assert (run.outcome.status, run.outcome.terminal_reason) == ("failed", "loop_error")
    assert "ValueError: \ufffd" in str(run.outcome.answer)
    assert len(str(run.outcome.answer)) <= 4_000


# What a model reads stands in the journal


async def test_the_text_of_a_woken_sleep_stands_in_the_completion_and_replay_takes_it_from_there() -> None:
    """S-022, S-014."""

    @tool(effect="read")
    async def rest() -> Sleep:
        """Rests."""
        return Sleep(DAWN - timedelta(hours=1))

    model = script(calls(("rest", {})), END)
    whole = await embedded(agent_of(rest), model)
    completed = only(whole.envelopes, ev.ToolCallCompleted)[0]
    assert completed.observation == "The tool asked to wait until 2023-11-14T21:13:20+00:00; that time has come."
    assert asked(model)[1][-1] == f"results: 1.0 rest completed: {completed.observation}"
    # As an older release may have worded it.
    worded = ev.ToolCallCompleted("1.0", observation="In older words.", sleep_until=completed.sleep_until)
    model = script(calls(("rest", {})), END)
    await embedded(agent_of(rest), model, recorded=extended(cut(whole, before(whole, "tool_call_completed")), worded))
    assert asked(model)[0][-1] == "results: 1.0 rest completed: In older words."


async def test_the_text_of_a_blank_answer_stands_in_the_answers_event_and_replay_takes_it_from_there(
    tmp_path: Path,
) -> None:
    """S-054, S-014."""

    @tool(effect="read")
    async def question() -> Suspend:
        """Asks."""
        return Suspend("which?", {"type": "string"})

    agent, replies = agent_of(question), [calls(("question", {})), END]
    parked = await embedded(agent, script(*replies))
    async with opened(tmp_path) as engine:
        await (await started(engine, agent, script(*replies))).wait()
        await engine.answer(RUN, "1.0", " ")
        model = script(*replies)
        await (await engine.resume(RUN, agent, model=model)).wait()
        resumed = only(await engine.journal(RUN), ev.Resumed)[0]
    assert (resumed.value, resumed.observation) == (" ", "(the tool ran and returned no output)")
    assert asked(model)[0][-1] == f"results: 1.0 question completed: {resumed.observation}"
    # As an older release may have worded it.
    model = script(*replies)
    worded = ev.Resumed("1.0", " ", observation="In older words.")
    await embedded(agent, model, recorded=extended(parked, worded))
    assert asked(model)[0][-1] == "results: 1.0 question completed: In older words."


# What is no answer, and what is not done a third time


async def test_a_reply_cut_by_the_content_filter_is_asked_again_and_is_not_the_answer() -> None:
    """S-039, C9, C10: it costs a repair, as a reply cut by the output limit does."""
    model = script(Reply(text="Half of", stop=StopReason.REFUSED), END)
    run = await embedded(agent_of(), model)
    assert run.outcome.output == "Done."
    notice = only(run.envelopes, ev.ModelCallRequested)[1].notice
    assert notice.kind == "filtered_reply"
    assert asked(model)[1][-1] == f"user: {notice.text}"
    assert "content filter" in notice.text
    assert state_of(run.envelopes).spent.model_repairs == 1


async def test_a_loop_of_ones_own_is_told_that_a_filtered_reply_is_unusable() -> None:
    """S-001."""
    from perdure import unusable

    async def loop(ctx: RunContext, task: str) -> Any:
        turn = await ctx.ask(assemble(ctx.agent, ctx.transcript.view()))
        notice = unusable(turn, ctx.agent)
        return None if notice is None else str(notice.kind)

    run = await embedded(agent_of(loop=loop), script(Reply(text="Half of", stop=StopReason.REFUSED)))
    assert run.outcome.output == "filtered_reply"


async def test_parallel_reads_that_must_not_be_repeated_are_guarded_at_the_third_of_one_batch() -> None:
    """C8, V-021: the guard counts calls that have settled, so these do not overlap."""

    @tool(effect="read", parallel=True, repeatable=False)
    async def poll() -> str:
        """Reads what each reading uses up."""
        ran.append("polled")
        return "x"

    run = await embedded(agent_of(poll), script(calls(*[("poll", {})] * 3), END))
    assert ran == ["polled"] * 2
    assert run.outcome.terminal_reason == "repeated_action"
    assert observed(run.envelopes)["1.2"].startswith("Not run: the same call")
