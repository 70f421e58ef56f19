"""Disks that are full, broken, slow or lying, under runs that act: nothing acts after a failed commit."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apsw
import pytest

from perdure import Agent, CallContext, Engine, Limits, tool
from perdure.clock import SystemClock, SystemEntropy
from perdure.errors import LeaseHeldError, PerdureError, StoreError
from perdure.prompting.request import ModelRequest
from perdure.runs import indexed
from perdure.stores.url import open_store
from perdure.stores.verify import verify
from perdure.testing.crashing import Abandonable
from perdure.testing.disks import CountSyncs, FailingDisk, LosingDisk, SlowDisk, tapped
from perdure.testing.scripted import Reply, ScriptedModel, calls, text

TURNS = 12
FULL_DISK = [sys.executable, "-m", "tests.crash.full_disk"]
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class World:
    """What happened, and when, on the steady clock."""

    padding: int = 1
    acts: list[tuple[int, str]] = field(default_factory=list)
    painted: Counter[tuple[str, int]] = field(default_factory=Counter)
    orders: dict[tuple[str, int], set[str | None]] = field(default_factory=dict)

    def act(self, what: str) -> None:
        self.acts.append((time.monotonic_ns(), what))

    def agent(self) -> Agent:
        @tool(effect="read")
        async def look(number: int) -> str:
            """Looks."""
            return f"seen {number} " * self.padding

        @tool(effect="idempotent")
        async def order(number: int, call: CallContext) -> str:
            """Orders."""
            self.act(f"order {number} of {call.run_id}")
            self.orders.setdefault((call.run_id, number), set()).add(call.idempotency_key)
            return "ordered"

        @tool(effect="write")
        async def paint(number: int, call: CallContext) -> str:
            """Paints."""
            self.act(f"paint {number} of {call.run_id}")
            self.painted[call.run_id, number] += 1
            return "painted"

        return Agent(name="disk", tools=[look, order, paint], limits=Limits(max_tool_calls=1000, max_model_turns=100))

    def model(self) -> ScriptedModel:
        def reply(request: ModelRequest) -> Reply:
            number = request.transcript.turns
            self.act(f"asked {number}")
            if number == TURNS:
                return text("done")
            return calls(*((name, {"number": number}) for name in ("look", "order", "paint")))

        return ScriptedModel(reply, chunk=0)

    async def to_the_end(self, url: str, *runs: str) -> None:
        """Resumes each run on a sound disk until it has ended, settling doubts by what happened."""
        async with Engine.open(url, create=False) as engine:
            for run_id in runs:
                for _ in range(10):
                    outcome = await (await engine.resume(run_id, self.agent(), model=self.model())).wait()
                    if outcome.status != "parked":
                        break
                    assert outcome.park is not None
                    number = outcome.park.detail["arguments"]["number"]
                    happened = self.painted[run_id, number] > 0
                    verdict: Any = "happened" if happened else "did_not_happen"
                    await engine.resolve(
                        run_id, str(outcome.park.call), verdict, result="painted" if happened else None
                    )
                assert outcome.answer == "done"

    def complete(self, *runs: str) -> None:
        """Every write happened once, every keyed one under one key."""
        assert self.painted == Counter({(run_id, number): 1 for run_id in runs for number in range(TURNS)})
        assert {key: len(found) for key, found in self.orders.items()} == dict.fromkeys(self.painted, 1)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:{tmp_path / 'perdure.db'}"


async def started(engine: Engine, world: World, run_id: str) -> Any:
    return await engine.start(world.agent(), "go", run_id=run_id, model=world.model())


FAULTS = [
    pytest.param("write", apsw.FullError, id="full"),
    pytest.param("write", apsw.IOError, id="error at a write"),
    pytest.param("sync", apsw.IOError, id="error at a sync"),
    pytest.param("write", apsw.ReadOnlyError, id="turned read-only"),
]


@pytest.mark.parametrize("after", [0, 3, 8, 21])
@pytest.mark.parametrize(("operation", "error"), FAULTS)
async def test_nothing_acts_after_a_failed_commit_and_nothing_is_lost(
    url: str, operation: Any, error: type[apsw.Error], after: int
) -> None:
    """O1, O17: no model is asked and no tool acts; the drive ends with StoreError; on a sound disk the run ends, with
    every plain write once."""
    world, disk = World(), FailingDisk(operation, error, after=after)
    async with Engine.open(url):
        pass
    begun = True
    with tapped(disk):
        async with Engine.open(url) as engine:
            try:
                run = await started(engine, world, "r")
                with pytest.raises(StoreError):
                    await run.wait()
            except StoreError:  # the very first commit failed: there is no run
                begun = False
    assert disk.failed_at_ns is not None, "the disk never failed"
    assert [what for at, what in world.acts if at > disk.failed_at_ns] == []
    if not begun:
        assert world.acts == []
        return
    await world.to_the_end(url, "r")
    world.complete("r")
    report = await verify(Path(url.removeprefix("sqlite:")), fold_problem=indexed)
    assert report.ok, report


@pytest.mark.parametrize(("operation", "error"), [("write", apsw.FullError), ("sync", apsw.IOError)])
async def test_a_log_that_cannot_be_carried_over_into_the_file_loses_nothing(
    url: str, operation: Any, error: type[apsw.Error]
) -> None:
    """O17: the run goes on in the log, or stops; on a sound disk it ends, with every plain write once."""
    world, disk = World(padding=200_000), FailingDisk(operation, error, kind="main")
    async with Engine.open(url):
        pass
    stopped = False
    with tapped(disk):
        async with Engine.open(url) as engine:
            try:
                await (await started(engine, world, "r")).wait()
            except StoreError:
                stopped = True
            assert disk.failed_at_ns is not None, "the log was not carried over while the run went on"
    if stopped:
        assert [what for at, what in world.acts if at > disk.failed_at_ns] == []
    await world.to_the_end(url, "r")
    world.complete("r")
    report = await verify(Path(url.removeprefix("sqlite:")), fold_problem=indexed)
    assert report.ok, report


async def test_every_run_of_a_process_ends_when_its_store_fails_and_each_goes_on_elsewhere(url: str) -> None:
    """O17: whatever acted has its intent in the store."""
    world, disk = World(), FailingDisk("sync", apsw.IOError, after=12)
    names = ["one", "two", "three"]
    with tapped(disk):
        async with Engine.open(url) as engine:
            runs = [await started(engine, world, name) for name in names]
            ended = await asyncio.gather(*(run.wait() for run in runs), return_exceptions=True)
            assert [type(one) for one in ended] == [StoreError] * 3
            with pytest.raises(StoreError):
                await started(engine, world, "four")
    assert not any("four" in what for _, what in world.acts)
    async with Engine.open(url, create=False) as engine:
        for name in names:
            intents = [json.loads(one.payload or b"") for one in await engine.journal(name)]
            known = {(one["tool"], one["arguments"]["number"]) for one in intents if "tool" in one and "effect" in one}
            acted = {(what.split()[0], int(what.split()[1])) for _, what in world.acts if what.endswith(f"of {name}")}
            assert acted <= known
    await world.to_the_end(url, *names)
    world.complete(*names)


async def test_a_slow_disk_keeps_its_leases_and_fails_nothing(url: str) -> None:
    """H05: syncs that take a fifth of the lease time."""
    world, disk = World(), SlowDisk(0.2)
    async with Engine.open(url):
        pass
    with tapped(disk):
        async with Engine.open(url, lease_seconds=1) as engine, Engine.open(url, lease_seconds=1) as other:
            run = await started(engine, world, "r")
            waiting = asyncio.ensure_future(run.wait())
            refused = 0
            while not waiting.done():
                try:
                    await other.resume("r", world.agent(), model=world.model())
                except LeaseHeldError:
                    refused += 1
                await asyncio.sleep(0.3)
            assert (await waiting).answer == "done"
    assert refused > 3
    assert disk.syncs > 2 * TURNS
    world.complete("r")


@pytest.mark.parametrize("kind", ["wal", "main"])
async def test_a_lost_write_is_found_at_the_latest_by_a_resume(tmp_path: Path, kind: Any) -> None:
    """H06, O1: the disk says that it wrote, and did not. Nothing that was recorded is missing, or it is refused."""
    found = Counter[str]()
    for number in range(1, 40, 3):
        path = tmp_path / f"{number}.db"
        world, disk = World(1 if kind == "wal" else 100_000), LosingDisk(number, kind)
        async with Engine.open(f"sqlite:{path}"):
            pass
        events: list[bytes] = []
        try:
            with tapped(disk):
                async with Engine.open(f"sqlite:{path}") as engine:
                    run = await started(engine, world, "r")
                    outcome = await run.wait()
                    assert outcome.answer == "done"
                    events = [one.digest async for one in run.events()]
        except PerdureError:
            found["refused while it ran"] += 1
            continue
        assert disk.lost
        acted = len(world.acts)
        try:
            async with Engine.open(f"sqlite:{path}", create=False) as engine:
                await (await engine.resume("r", world.agent(), model=world.model())).wait()
                whole = [one.digest for one in await engine.journal("r")] == events
                found["whole"] += whole
                assert whole, f"write {number} was lost, and the run is another without a word"
        except PerdureError:
            found["refused"] += 1
            report = await verdict(path)
            assert not report
        assert len(world.acts) == acted
    assert found["refused"] + found["refused while it ran"] > 0, found


async def test_a_run_that_was_killed_after_a_write_was_lost_does_not_go_on_from_an_older_state(tmp_path: Path) -> None:
    """H06, O1: later commits stand behind the lost one, so it is known that something is missing; nothing acts."""
    for number in range(2, 40, 4):
        path, world = tmp_path / f"{number}.db", World()
        losing, counting = LosingDisk(number, "wal"), CountSyncs()
        async with Engine.open(f"sqlite:{path}"):
            pass
        with tapped(losing, counting):
            store = await open_store(f"sqlite:{path}", clock=SystemClock(), entropy=SystemEntropy())
            engine = Engine(store, SystemClock(), SystemEntropy())
            run = await started(engine, world, "r")
            await until(lambda losing=losing: losing.lost)
            syncs = counting.count
            await until(lambda counting=counting, syncs=syncs: counting.count >= syncs + 4)
            assert isinstance(store, Abandonable)
            await store.abandon()
            with pytest.raises(StoreError):
                await run.wait()
        acted = len(world.acts)
        with pytest.raises(PerdureError):
            async with Engine.open(f"sqlite:{path}", create=False) as engine:
                await (await engine.resume("r", world.agent(), model=world.model())).wait()
        assert len(world.acts) == acted
        assert not await verdict(path)


async def until(met: Callable[[], bool]) -> None:
    """Returns once the condition is met."""
    for _ in range(30_000):
        if met():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came to that")


async def verdict(path: Path) -> bool:
    """Whether a store is proven; what cannot even be read is not."""
    try:
        return (await verify(path, fold_problem=indexed)).ok
    except PerdureError:
        return False


def test_a_file_system_that_fills_up_stops_the_run_which_goes_on_once_there_is_room(tmp_path: Path) -> None:
    """O17: a real file system of two megabytes, then of sixty-four."""
    own_mounts = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    done = subprocess.run(
        [*own_mounts, *FULL_DISK, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["first"] == "the disk is full"
    assert said["failed"] is True
    assert said["acts_after_failure"] == []
    assert said["complete"] is True
