"""What a turn costs: two commits, and work in proportion to the turns."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.runtime.runs import agent_of, embedded, started

from perdure import Limits, RunContext, assemble, tool
from perdure.clock import SystemClock, SystemEntropy
from perdure.engine import Engine
from perdure.journal import events as ev
from perdure.journal.envelope import Envelope
from perdure.journal.fold import fold
from perdure.ports import IndexRow, Lease, Store
from perdure.runtime.journaling import RunJournal
from perdure.stores.url import open_store
from perdure.testing.replies import calls, text
from perdure.testing.scripted import ScriptedModel


class CountingStore:
    """Counts the pieces that are appended; else the store it stands before."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.pieces: list[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def append(self, lease: Lease, envelopes: Sequence[Envelope], index: IndexRow | None) -> Any:
        self.pieces.append([envelope.kind for envelope in envelopes])
        return self._store.append(lease, envelopes, index)


@tool
async def act(n: int) -> str:
    """Acts."""
    await asyncio.sleep(0)
    return f"did {n}"


def model(turns: int) -> ScriptedModel:
    return ScriptedModel([*[calls(("act", {"n": n})) for n in range(turns)], text("Done.")])


async def test_a_turn_with_one_call_makes_two_commits(tmp_path: Path) -> None:
    """S-063, O1: the intents of call and model; each carries the completion before it."""
    store = await open_store(f"sqlite:{tmp_path / 'p.db'}", clock=SystemClock(), entropy=SystemEntropy())
    counting: Any = CountingStore(store)
    async with Engine(counting, SystemClock(), SystemEntropy()) as engine:
        outcome = await (await started(engine, agent_of(act), model(20))).wait()
    assert outcome.output == "Done."
    assert (
        counting.pieces[1:5]
        == [
            ["model_call_completed", "tool_call_requested"],
            ["tool_call_completed", "model_call_requested"],
        ]
        * 2
    )
    assert len(counting.pieces) == 2 * 20 + 2


async def test_a_completion_is_handed_on_at_the_next_tick_though_nothing_asks_for_it(tmp_path: Path) -> None:
    """S-063: a loop that thinks for an hour does not keep an answer in memory alone."""
    store = await open_store(f"sqlite:{tmp_path / 'p.db'}", clock=SystemClock(), entropy=SystemEntropy())
    counting: Any = CountingStore(store)
    seen: list[list[str]] = []

    async def loop(ctx: RunContext, task: str) -> Any:
        await ctx.ask(assemble(ctx.agent, ctx.transcript.view()))
        await asyncio.sleep(0)
        seen.append(counting.pieces[-1])
        return "x"

    async with Engine(counting, SystemClock(), SystemEntropy()) as engine:
        await (await started(engine, agent_of(loop=loop), model(0))).wait()
    assert seen == [["model_call_completed"]]


class HeldSink:
    """Makes nothing durable until it is told to."""

    def __init__(self) -> None:
        self.pieces: list[asyncio.Future[None]] = []

    def append(self, envelopes: Sequence[Envelope], index: IndexRow | None) -> "asyncio.Future[None]":
        self.pieces.append(asyncio.get_running_loop().create_future())
        return self.pieces[-1]


async def test_a_cancelled_commit_leaves_its_piece_to_the_sink_and_to_others_who_wait() -> None:
    """S-063: a piece is shared, and whether it became durable must be known however one waiter ends."""
    run = await embedded(agent_of(act), model(1))
    state, _ = fold(run.outcome.run_id, run.envelopes[:2])
    sink = HeldSink()
    journal = RunJournal(state, run.envelopes[1].digest, sink, SystemClock(), SystemEntropy())
    journal.queue(ev.NowObserved("1.0", 1))
    one, other = (asyncio.ensure_future(journal.commit()) for _ in range(2))
    await asyncio.sleep(0)
    one.cancel()
    await asyncio.wait({one})
    assert one.cancelled()
    await asyncio.sleep(0)
    assert not other.done()
    assert not sink.pieces[0].done()
    sink.pieces[0].set_result(None)
    await other


async def test_n_turns_hash_what_n_turns_hold() -> None:
    """S-078, O12: once, and not again with every request."""
    sizes = {}
    for turns in (50, 100, 200):

        async def loop(ctx: RunContext, task: str) -> Any:
            while True:
                turn = await ctx.ask(assemble(ctx.agent, ctx.transcript.view()))
                if not turn.calls:
                    return ctx.transcript.hashed_bytes
                await ctx.use(turn.calls)

        agent = agent_of(act, loop=loop, limits=Limits(max_model_turns=None, max_tool_calls=None))
        sizes[turns] = (await embedded(agent, model(turns))).outcome.output
    assert sizes[200] - sizes[100] < 2.05 * (sizes[100] - sizes[50])
