"""Runs as an engine's users hold them: handles, readers, the models that are theirs, and a store that fails."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import apsw
import pydantic
import pytest
from tests.runtime.runs import (
    RUN,
    agent_of,
    before,
    cut,
    embedded,
    kinds,
    only,
    opened,
    script,
    started,
)

from perdure import (
    DefinitionChangedError,
    Outcome,
    Run,
    RunContext,
    StoreError,
    UsageError,
    assemble,
    run_embedded,
    tool,
)
from perdure.clock import SystemClock, SystemEntropy
from perdure.engine import Engine
from perdure.journal import events as ev
from perdure.journal.envelope import Envelope
from perdure.ports import IndexRow, Lease, Store, StoredRun
from perdure.prompting.request import ModelRequest
from perdure.runs import Driving
from perdure.stores.url import open_store
from perdure.testing.clocks import ManualClock, SeededEntropy
from perdure.testing.replies import calls, text
from perdure.testing.scripted import ScriptedModel

END = text("Done.")
LONG_S = 10
"""A test that takes longer than this hangs, in seconds."""


@tool
async def act(n: int = 0) -> str:
    """Acts."""
    return f"did {n}"


async def waits(ctx: RunContext, task: str) -> Any:
    return await ctx.wait("which?", schema={})


@asynccontextmanager
async def engine_over(directory: Path, wrapped: Callable[[Store], Any]) -> Any:
    """An engine over a wrapped store, and the wrapper."""
    store = await open_store(f"sqlite:{directory / 'perdure.db'}", clock=SystemClock(), entropy=SystemEntropy())
    wrapper = wrapped(store)
    async with Engine(wrapper, SystemClock(), SystemEntropy()) as engine:
        yield engine, wrapper


class AskedToGoOn(ScriptedModel):
    """Answers when it is let."""

    def __init__(self, *replies: Any) -> None:
        super().__init__(replies, chunk=0)
        self.go = asyncio.Event()

    async def stream(self, request: ModelRequest) -> Any:
        await self.go.wait()
        async for event in super().stream(request):
            yield event


# A store that fails


class FailingAtTheEnd:
    """Refuses the piece that holds the end of a run, a moment after it was handed on."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def append(self, lease: Lease, envelopes: Sequence[Envelope], index: IndexRow | None) -> Any:
        if "run_completed" not in kinds(envelopes):
            return self._store.append(lease, envelopes, index)
        loop = asyncio.get_running_loop()
        refused = loop.create_future()
        loop.call_later(0.01, refused.set_exception, StoreError("the disk is full", where="store"))
        return refused


async def test_a_store_that_fails_on_the_last_commit_is_what_a_waiter_is_told(tmp_path: Path) -> None:
    """S-013, O13: the store's error with its exit code, and no cancellation nobody asked for."""
    async with engine_over(tmp_path, FailingAtTheEnd) as (engine, _):
        run = await started(engine, agent_of(), script(END))
        with pytest.raises(StoreError, match="the disk is full") as found:
            await asyncio.wait_for(run.wait(), LONG_S)
        assert found.value.exit_code == 4
        assert kinds(await engine.journal(RUN))[-1] == "model_call_requested"


# Whose a model is


class Closing(ScriptedModel):
    """Counts how often it is closed."""

    closed = 0

    async def close(self) -> None:
        self.closed += 1


class ClosingBadly(ScriptedModel):
    """Cannot be closed."""

    async def close(self) -> None:
        raise RuntimeError("no way to close")


shared = Closing([END])
made: list[Closing] = []


def factory() -> Closing:
    made.append(Closing([END]))
    return made[-1]


def bad_factory() -> ClosingBadly:
    return ClosingBadly([END])


def named(attribute: str) -> str:
    """How an agent file names something of this module."""
    return f"{__name__}:{attribute}"


async def test_a_model_that_cannot_be_closed_changes_nothing_of_how_the_run_ended(tmp_path: Path) -> None:
    """S-016: the run ended, and nobody holds it."""
    async with opened(tmp_path) as engine:
        run = await engine.start(agent_of(), "the task", run_id=RUN, model=named("bad_factory"))
        assert (await run.wait()).status == "completed"
        shown = await engine.show(RUN)
        assert (shown["status"], shown["lease"]["held"]) == ("completed", False)
        assert engine.driving(RUN) is None


async def test_a_modules_own_client_stays_open_and_one_its_function_made_is_closed_once(tmp_path: Path) -> None:
    """S-079: what a run did not make, other runs may be using."""
    made.clear()
    async with opened(tmp_path) as engine:
        for number, name in enumerate(("shared", "shared", "factory")):
            run = await engine.start(agent_of(), "the task", run_id=f"run-{number}", model=named(name))
            assert (await run.wait()).output == "Done."
    assert shared.closed == 0
    assert [one.closed for one in made] == [1]


# Runs in memory


async def test_an_embedded_run_refuses_a_changed_definition() -> None:
    """S-071, C17: naming the part; nothing is asked."""
    whole = await embedded(agent_of(act), script(END))
    model = script(END)
    with pytest.raises(DefinitionChangedError) as found:
        await embedded(agent_of(), model, recorded=cut(whole, before(whole, "model_call_completed")))
    assert found.value.parts == ("tools",)
    assert model.requests == []


async def test_an_embedded_run_records_which_model_is_asked_from_here_on() -> None:
    """S-014, S-077."""

    class Other(ScriptedModel):
        target = "scripted:other"

    whole = await embedded(agent_of(), script(END))
    kept = cut(whole, before(whole, "model_call_requested"))
    again = await embedded(agent_of(), Other([END]), recorded=kept)
    assert [event.model for event in only(again.envelopes, ev.ModelBound)] == ["scripted:other"]
    same = await embedded(agent_of(), script(END), recorded=kept)
    assert only(same.envelopes, ev.ModelBound) == []


async def test_an_embedded_run_closes_the_client_it_made_and_no_other() -> None:
    """S-079: over a list as over a store."""
    made.clear()
    for name in ("factory", "shared"):
        run = await run_embedded(
            agent_of(), "the task", model=named(name), clock=ManualClock(), entropy=SeededEntropy()
        )
        assert run.outcome.output == "Done."
    assert [one.closed for one in made] == [1]
    assert shared.closed == 0


# Looking


class ReadingLate:
    """Does something once, between the reading of a journal and the answer to who asked for it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.then: Callable[[], Awaitable[Any]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def read(self, run_id: str, from_seq: int = 0, most: int | None = None) -> StoredRun | None:
        found = await self._store.read(run_id, from_seq, most)
        then, self.then = self.then, None
        if then is not None:
            await then()
        return found


async def test_a_run_that_ends_while_it_is_looked_at_is_never_shown_with_a_doubt(tmp_path: Path) -> None:
    """R-098, O10: what is shown is of one moment."""
    began, go = asyncio.Event(), asyncio.Event()

    @tool
    async def write() -> str:
        """Writes."""
        began.set()
        await go.wait()
        return "done"

    async with engine_over(tmp_path, ReadingLate) as (engine, store):
        run = await started(engine, agent_of(write), script(calls(("write", {})), END))

        async def finish() -> None:
            go.set()
            await run.wait()

        await asyncio.wait_for(began.wait(), LONG_S)
        store.then = finish
        shown = await asyncio.wait_for(engine.show(RUN), LONG_S)
    assert (shown["status"], shown["doubts"], shown["open_calls"]) == ("completed", [], [])
    assert shown["lease"]["held"] is False


async def test_runs_in_full_flight_are_never_shown_or_listed_with_a_doubt(tmp_path: Path) -> None:
    """R-098, O10."""
    agent = agent_of(act)
    models = [AskedToGoOn(*[calls(("act", {"n": n}))] * 2, END) for n in range(8)]
    seen: list[str] = []
    async with opened(tmp_path) as engine:
        runs = [await engine.start(agent, "x", run_id=f"run-{n}", model=model) for n, model in enumerate(models)]
        while any(engine.driving(run.id) is not None for run in runs):
            for run in runs:
                shown = await engine.show(run.id)
                assert (shown["doubts"], shown["park"]) == ([], None)
                seen.append(shown["status"])
            assert {record["park"] for record in await engine.runs()} == {None}
            for model in models:
                model.go.set()
        for run in runs:
            assert (await run.wait()).output == "Done."
    assert seen[:8] == ["running"] * 8


# Durable before a user's code runs


def durable_kinds(path: Path) -> list[str]:
    """What the store holds, as another reader of the file sees it."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        return [str(kind) for (kind,) in connection.execute("select kind from event order by rowid")]
    finally:
        connection.close()


async def test_what_was_recorded_is_durable_before_a_users_validator_of_an_argument_runs(tmp_path: Path) -> None:
    """S-063, R-009."""
    path, seen = tmp_path / "perdure.db", []

    def checked(word: str) -> str:
        seen.append(durable_kinds(path)[-1])
        return word

    @tool
    async def write(word: Annotated[str, pydantic.AfterValidator(checked)]) -> str:
        """Writes."""
        return word

    async with opened(tmp_path) as engine:
        outcome = await (await started(engine, agent_of(write), script(calls(("write", {"word": "x"})), END))).wait()
    assert outcome.output == "Done."
    assert seen[0] == "model_call_completed"


async def test_what_was_recorded_is_durable_before_an_answer_is_checked(tmp_path: Path) -> None:
    """S-063, S-043."""
    path, seen = tmp_path / "perdure.db", []

    class Sum(pydantic.BaseModel):
        """A sum."""

        total: int

        @pydantic.field_validator("total")
        @classmethod
        def looks(cls, total: int) -> int:
            seen.append(durable_kinds(path)[-1])
            return total

    async with opened(tmp_path) as engine:
        agent = agent_of(output=Sum)
        outcome = await (await started(engine, agent, script(calls(("answer", {"total": 7}))))).wait()
    assert outcome.output == {"total": 7}
    assert seen[0] == "model_call_completed"


async def test_what_was_recorded_is_durable_before_an_answer_of_a_loop_of_ones_own_is_checked(tmp_path: Path) -> None:
    """S-063, S-001."""
    path, seen = tmp_path / "perdure.db", []

    class Sum(pydantic.BaseModel):
        """A sum."""

        total: int

        @pydantic.field_validator("total")
        @classmethod
        def looks(cls, total: int) -> int:
            seen.append(durable_kinds(path)[-1])
            return total

    async def loop(ctx: RunContext, task: str) -> Any:
        return {"total": len((await ctx.ask(assemble(ctx.agent, ctx.transcript.view()))).text)}

    async with opened(tmp_path) as engine:
        outcome = await (await started(engine, agent_of(output=Sum, loop=loop), script(END))).wait()
    assert outcome.output == {"total": 5}
    assert seen[0] == "model_call_completed"


# Reading along


class SlowHost:
    """An engine for one handle, whose readings that find nothing from a seq on arrive late: after they were made."""

    def __init__(self, engine: Engine, from_seq: int) -> None:
        self._engine, self._from_seq = engine, from_seq
        self.empty, self.go = asyncio.Event(), asyncio.Event()

    async def read(self, run_id: str, from_seq: int = 0, most: int | None = None) -> StoredRun:
        found = await self._engine.read(run_id, from_seq, most)
        if not found.envelopes and from_seq == self._from_seq:
            self.empty.set()
            await self.go.wait()
        return found

    async def outcome(self, run_id: str) -> Outcome:
        return await self._engine.outcome(run_id)

    async def cancel(self, run_id: str, reason: str | None = None, *, by: str | None = None) -> None:
        await self._engine.cancel(run_id, reason, by=by)

    def driving(self, run_id: str) -> Driving | None:
        return self._engine.driving(run_id)


async def collect(run: Run, into: list[Envelope]) -> None:
    async for envelope in run.events():
        into.append(envelope)  # noqa: PERF401 - each is seen as it comes


async def until(kind: str, *readers: list[Envelope]) -> None:
    """Returns when every reader was given an event of that kind."""
    async with asyncio.timeout(LONG_S):
        while not all(kind in kinds(one) for one in readers):  # noqa: ASYNC110 - the readers set no event
            await asyncio.sleep(0.005)


async def test_two_readers_each_get_every_event_when_it_is_there(tmp_path: Path) -> None:
    """R-013: what one was told of, the other is told of too."""
    go = asyncio.Event()

    @tool
    async def write() -> str:
        """Writes in its own time."""
        await go.wait()
        return "done"

    model = AskedToGoOn(calls(("write", {})), END)
    async with opened(tmp_path) as engine:
        run = await started(engine, agent_of(write), model)
        host = SlowHost(engine, 3)
        quick: list[Envelope] = []
        slow: list[Envelope] = []
        readers = [
            asyncio.create_task(collect(run, quick)),
            asyncio.create_task(collect(Run(host, RUN, engine.driving(RUN)), slow)),
        ]
        try:
            await until("model_call_requested", quick, slow)
            # The slow one has looked and seen nothing, and is told so only once the quick one has more.
            await asyncio.wait_for(host.empty.wait(), LONG_S)
            model.go.set()
            await until("tool_call_requested", quick)
            host.go.set()
            await until("tool_call_requested", slow)
            go.set()
            await asyncio.wait_for(asyncio.gather(*readers), LONG_S)
        finally:
            for event in (model.go, host.go, go):
                event.set()
        whole = await engine.journal(RUN)
    assert tuple(quick) == tuple(slow) == whole


async def test_a_cancelled_reader_leaves_no_task_behind(tmp_path: Path) -> None:
    """R-013."""
    model = AskedToGoOn(END)
    async with opened(tmp_path) as engine:
        run = await started(engine, agent_of(), model)
        seen: list[Envelope] = []
        present = asyncio.all_tasks()
        reader = asyncio.create_task(collect(run, seen))
        await until("model_call_requested", seen)
        await asyncio.sleep(0.05)
        reader.cancel()
        await asyncio.wait([reader])
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - present
        model.go.set()
        assert (await run.wait()).output == "Done."
    assert left == set()


# Handles


async def test_an_old_handle_gives_the_final_outcome_after_an_answer_and_a_resume(tmp_path: Path) -> None:
    """S-011, S-032, O15: while the new drive is under way, and after it."""
    for then in ("at once", "later"):
        agent = agent_of(loop=waits)
        async with opened(tmp_path) as engine:
            old = await engine.start(agent, "x", run_id=then.replace(" ", "-"), model=script())
            assert (await old.wait()).status == "parked"
            await engine.answer(old.id, "0.0", 7)
            assert (await old.wait()).status == "idle"
            new = await engine.resume(old.id, agent, model=script())
            if then == "later":
                await new.wait()
            outcome = await old.wait()
            assert (outcome.status, outcome.output) == ("completed", 7)
            assert await new.wait() == outcome


async def test_there_is_nothing_to_add_to_where_a_limit_is_not_set(tmp_path: Path) -> None:
    """S-036, C28: a total is to be given; nothing is recorded."""
    async with opened(tmp_path) as engine:
        await (await started(engine, agent_of(loop=waits), script())).wait()
        whole = await engine.journal(RUN)
        with pytest.raises(UsageError, match="no limit max_total_tokens to add to"):
            await engine.limit(RUN, max_total_tokens="+5")
        assert await engine.journal(RUN) == whole
        await engine.limit(RUN, max_total_tokens=5)
        await engine.limit(RUN, max_total_tokens="+5")
        assert (await engine.show(RUN))["limits"]["max_total_tokens"]["limit"] == 10


@pytest.mark.parametrize("more", [-1, 0, 1])
async def test_a_journal_that_is_read_in_pieces_is_whole_wherever_the_last_one_ends(tmp_path: Path, more: int) -> None:
    """S-014: one event less than a piece of 2,000, as many, and one more; and a resume behind it."""

    async def loop(ctx: RunContext, task: str) -> str:
        for _ in range(2000 - 3 + more):
            await ctx.now()
        return str(await ctx.wait("well?", schema={}))

    agent = agent_of(loop=loop)
    async with opened(tmp_path) as engine:
        await (await engine.start(agent, "x", run_id=RUN, model=script())).wait()
        journal = await engine.journal(RUN)
        assert len(journal) == 2000 + more
        state = await engine.state(RUN)
        park = state.park()
        assert (state.events, park and park.call) == (2000 + more, f"0.{1997 + more}")
        await engine.answer(RUN, f"0.{1997 + more}", "done")
        outcome = await (await engine.resume(RUN, agent, model=script())).wait()
    assert outcome.answer == "done"
