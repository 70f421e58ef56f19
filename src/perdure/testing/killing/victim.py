"""One drive of the errand in a process that may be killed: it settles what the one before it left in doubt by looking
at the world, then drives the run on.

As a program: `python -m perdure.testing.killing.victim JSON`, with the fields of `Part`.
"""

import asyncio
import json
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from perdure.clock import SystemClock, SystemEntropy
from perdure.engine import Engine
from perdure.errors import PerdureError, UnknownError
from perdure.journal.envelope import Envelope
from perdure.ports import IndexRow, Lease
from perdure.runs import Run
from perdure.stores.url import open_store
from perdure.testing.disks import KillAtSync, tapped
from perdure.testing.killing.errand import ASKED, DONE, LOST, SETTLED, Ledger, Line, errand_agent, result, script
from perdure.testing.killing.marking import MarkedEffects, MarkedModel, MarkedStore, WatchedTool
from perdure.testing.killing.marks import Marks
from perdure.testing.scripted import ScriptedModel

ENDED, PARKED, REFUSED, WRONG = 0, 3, 4, 5
"""How a drive ends that is not killed. WRONG: the run or its journal is not as it must be; the output says how."""
LATE_INTENT, RERUN_WRITES = "late-intent", "rerun-writes"
SABOTAGES = (LATE_INTENT, RERUN_WRITES)
"""Ways to break the promise on purpose, which a campaign must find: intents that are said to be durable and are not
yet; writes in doubt that are done again without a look at the world."""
_LATE_S = 0.02
_MODEL_DELAY_MS = 2


class Part(msgspec.Struct, frozen=True):
    """What a victim is told."""

    directory: str
    """Of the campaign: `perdure.db` and `ledger` are there."""
    page: str
    """The marks' file."""
    run_id: str
    seed: int
    sync: int | None = None
    """Die at that sync of the store, before it is done, or after it."""
    after: bool = False
    sabotage: str | None = None


def drive(part: Part) -> int:
    """Drives the run; returns how it ended."""
    with ExitStack() as stack:
        if part.sync is not None:
            stack.enter_context(tapped(KillAtSync(part.sync, after=part.after)))
        marks = stack.enter_context(Marks(Path(part.page)))
        try:
            return asyncio.run(_Victim(part, marks).drive())
        except PerdureError as error:
            print(f"{part.run_id}: {type(error).__name__}: {error}")
            return REFUSED


class _Victim:
    def __init__(self, part: Part, marks: Marks) -> None:
        self._part, self._marks = part, marks
        self._ledger = Ledger(Path(part.directory, "ledger"))
        self._chance = random.Random(part.seed)

    async def drive(self) -> int:
        """See `drive`."""
        clock, entropy = SystemClock(), SystemEntropy()
        store: Any = await open_store(f"sqlite:{self._part.directory}/perdure.db", clock=clock, entropy=entropy)
        if self._part.sabotage == LATE_INTENT:
            store = _LateStore(store)
        marked: Any = MarkedStore(store, self._marks)
        async with Engine(marked, clock, entropy) as engine:
            outcome = await (await self._driven(engine)).wait()
        self._marks.live = False
        if outcome.status == "parked":
            return PARKED
        if (outcome.status, outcome.answer) != ("completed", DONE):
            print(f"it ended {outcome.status}, {outcome.terminal_reason}, {outcome.answer!r}")
            return WRONG
        return ENDED

    async def _driven(self, engine: Engine) -> Run:
        agent = errand_agent(self._ledger, self._chance)
        agent = replace(agent, tools=[WatchedTool(one, MarkedEffects(self._marks)) for one in agent.tools])
        model = MarkedModel(ScriptedModel(script, chunk=0, delay_ms=_MODEL_DELAY_MS), self._marks, self._asked)
        run_id = self._part.run_id
        try:
            await self._settle(engine)
            run = await engine.resume(run_id, agent, model=model)
        except UnknownError:
            run = await engine.start(agent, "go", run_id=run_id, model=model)
        self._marks.live = True
        return run

    def _asked(self, number: int) -> None:
        self._ledger.note(Line(self._part.run_id, ASKED, number, "", None))

    async def _settle(self, engine: Engine) -> None:
        """Looks for what the journal lost, and says of a write in doubt what really became of it.

        Raises:
            UnknownError: the run was never started.
        """
        run_id = self._part.run_id
        happened = [line for line in self._ledger.of(run_id) if line.what not in {ASKED, LOST, SETTLED}]
        events = (await engine.read(run_id)).envelopes
        if len(events) < self._marks.durable:
            self._lost(f"{self._marks.durable} events were durable, {len(events)} are there")
        intents = {json.loads(one.payload or b"{}")["call"] for one in events if one.kind == "tool_call_requested"}
        for line in happened:
            if line.call not in intents:
                self._lost(f"{line.what} {line.number} happened, and the journal has no intent of call {line.call}")
        park = (await engine.state(run_id)).park()
        if park is None or park.kind != "needs_reconciliation":
            return
        self._ledger.note(Line(run_id, SETTLED, 0, str(park.call), None))
        if self._part.sabotage != RERUN_WRITES and any(line.call == park.call for line in happened):
            done = result(park.detail["tool"], park.detail["arguments"]["number"])
            await engine.resolve(run_id, str(park.call), "happened", result=done)
        else:
            await engine.resolve(run_id, str(park.call), "did_not_happen")

    def _lost(self, problem: str) -> None:
        self._ledger.note(Line(self._part.run_id, LOST, 0, problem, None))


class _LateStore:
    """Says of what it is handed that it is durable, and hands it on a while later."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._last: asyncio.Future[None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def append(self, lease: Lease, envelopes: Sequence[Envelope], index: IndexRow | None) -> "asyncio.Future[None]":
        """As `Store.append`, but for the promise."""
        loop = asyncio.get_running_loop()
        said = loop.create_future()
        said.set_result(None)
        loop.call_later(_LATE_S, self._store.append, lease, envelopes, index)
        return said

    async def release(self, lease: Lease) -> None:
        """As `Store.release`, once everything was handed on."""
        await asyncio.sleep(2 * _LATE_S)
        await self._store.release(lease)


if __name__ == "__main__":
    sys.exit(drive(msgspec.json.decode(sys.argv[1], type=Part)))
