"""Two processes and one run, many times over: python -m tests.crash.two_drivers DIRECTORY WHAT ROUNDS.

WHAT is `resume` or `recover` (two released at one moment), or a place where a holder stops itself: `before-intent`,
`before-effect`, `in-idempotent`, `in-write`. Prints a line of JSON for each round.
"""

import asyncio
import json
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import apsw

from perdure.calls import CallContext
from perdure.clock import SystemClock, SystemEntropy
from perdure.engine import Engine
from perdure.errors import LeaseHeldError, PerdureError
from perdure.ports import Lease
from perdure.runs import Run
from perdure.stores.url import open_store
from perdure.testing.killing.errand import ASKED, Ledger, Line, errand_agent, result, script
from perdure.testing.killing.marking import WatchedTool
from perdure.testing.killing.processes import Process, fork
from perdure.testing.scripted import ScriptedModel

LEASE_S = 1.0
PATIENCE_S = 60.0


@dataclass
class Told:
    """What one process leaves behind for the tester."""

    who: str
    entered_ns: int = 0
    left_ns: int = 0
    error: str = ""
    said: str = ""
    status: str = ""
    acts: list[str] = field(default_factory=list)


class Driver:
    """One process's engine over the errand; what it does goes to a ledger of its own."""

    def __init__(self, folder: Path, who: str, run_id: str) -> None:
        self.folder, self.run_id = folder, run_id
        self.ledger = Ledger(folder / f"ledger-{who}")
        self.told = Told(who)
        self.watch = Watch()
        self.on_acquire: Callable[[], None] = lambda: None
        self.on_confirm: Callable[[], None] = lambda: None
        self.on_reply: Callable[[int], None] = lambda number: None

    async def open(self, lease_seconds: float = LEASE_S) -> Engine:
        clock, entropy = SystemClock(), SystemEntropy()
        url = f"sqlite:{self.folder / 'perdure.db'}"
        store = await open_store(url, clock=clock, entropy=entropy, lease_seconds=lease_seconds)
        noting: Any = NotingStore(store, self)
        return Engine(noting, clock, entropy)

    def agent(self) -> Any:
        agent = errand_agent(self.ledger, random.Random(1))
        return replace(agent, tools=[WatchedTool(one, self.watch) for one in agent.tools])

    def model(self) -> ScriptedModel:
        def reply(request: Any) -> Any:
            self.ledger.note(Line(self.run_id, ASKED, request.transcript.turns, "", None))
            self.on_reply(request.transcript.turns)
            return script(request)

        return ScriptedModel(reply, chunk=0, delay_ms=30)

    async def start(self, engine: Engine) -> Run:
        return await engine.start(self.agent(), "go", run_id=self.run_id, model=self.model())

    async def resume(self, engine: Engine) -> Run:
        return await engine.resume(self.run_id, self.agent(), model=self.model())

    def leave(self) -> int:
        """Writes what is told."""
        self.told.acts = [f"{one.what} {one.number}" for one in self.ledger.of(self.run_id)]
        path = self.folder / f"told-{self.told.who}-{self.run_id}.json"
        path.write_text(json.dumps(asdict(self.told)), "utf-8")
        return 0

    def run(self, work: Callable[[], Any]) -> int:
        """Does it, and tells how it ended."""
        try:
            asyncio.run(work())
        except PerdureError as error:
            self.told.error, self.told.said = type(error).__name__, str(error)
        return self.leave()


class NotingStore:
    """Notes when `acquire` is entered and left; calls back before it, and before each `confirm`."""

    def __init__(self, store: Any, driver: Driver) -> None:
        self._store, self._driver = store, driver

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def acquire(self, run_id: str) -> Lease:
        self._driver.on_acquire()
        self._driver.told.entered_ns = time.monotonic_ns()
        try:
            lease: Lease = await self._store.acquire(run_id)
        finally:
            self._driver.told.left_ns = time.monotonic_ns()
        return lease

    async def confirm(self, lease: Lease) -> None:
        self._driver.on_confirm()
        await self._store.confirm(lease)


class Watch:
    """Calls back when a tool's function begins or ends."""

    def __init__(self) -> None:
        self.on_began: Callable[[str, int], None] = lambda tool, attempt: None
        self.on_ended: Callable[[str, int], None] = lambda tool, attempt: None

    def began(self, tool: str, call: CallContext) -> None:
        self.on_began(tool, call.attempt)

    def ended(self, tool: str, call: CallContext, value: object, error: BaseException | None) -> None:
        self.on_ended(tool, call.attempt)


def left_by_the_dead(folder: Path, run_id: str, number: int) -> None:
    """A process that dies by SIGKILL inside its second model call, or inside a keyed write."""
    driver = Driver(folder, "dead", run_id)

    def die(now: bool) -> None:
        if now:
            os.kill(os.getpid(), signal.SIGKILL)

    if number % 2:
        driver.on_reply = lambda turn: die(turn == 1)
    else:
        driver.watch.on_ended = lambda tool, attempt: die(tool == "order")

    async def work() -> None:
        async with await driver.open() as engine:
            await (await driver.start(engine)).wait()

    ended = fork(lambda: driver.run(work), folder / "output").wait(PATIENCE_S)
    assert ended is not None
    assert ended.killed


def race(folder: Path, verb: str, number: int) -> dict[str, Any]:
    """One round of two who are released at one moment."""
    run_id = f"{verb}-{number}"
    left_by_the_dead(folder, run_id, number)
    page = mmap.mmap(-1, mmap.PAGESIZE)
    drivers = [Driver(folder, who, run_id) for who in ("one", "two")]

    def contend(place: int, driver: Driver) -> int:
        def barrier() -> None:
            page[place] = 1
            while not page[2]:
                pass  # a sleep would let one of them oversleep the other's acquire

        async def work() -> None:
            driver.on_acquire = barrier
            async with await driver.open() as engine:
                run = await resumed(engine, driver, verb)
                driver.told.status = (await run.wait()).status if run is not None else "nothing to recover"

        return driver.run(work)

    contenders = [
        fork(lambda place=place, driver=driver: contend(place, driver), folder / "output")
        for place, driver in enumerate(drivers)
    ]
    until = time.monotonic() + PATIENCE_S
    while not (page[0] and page[1]) and time.monotonic() < until:
        time.sleep(0.001)
    page[2] = 1
    for contender in contenders:
        assert contender.wait(PATIENCE_S) is not None
    told = [json.loads((folder / f"told-{one.told.who}-{run_id}.json").read_text("utf-8")) for one in drivers]
    lines = [line for who in ("dead", "one", "two") for line in Ledger(folder / f"ledger-{who}").of(run_id)]
    return {"run": run_id, "told": told, "doubled": doubles(lines)}


async def resumed(engine: Engine, driver: Driver, verb: str) -> Run | None:
    if verb == "resume":
        return await driver.resume(engine)
    # The agent of a run is found by the one that is given; its model is the agent's own.
    runs, problems = await engine.recover(replace(driver.agent(), model=driver.model()))
    if driver.run_id in problems:
        raise problems[driver.run_id]
    return next((run for run in runs if run.id == driver.run_id), None)


def doubles(lines: list[Line]) -> list[str]:
    """Actions that happened more than once; a keyed one under more than one key."""
    acts = [line for line in lines if line.what != ASKED]
    found = []
    for what, number in sorted({(line.what, line.number) for line in acts}):
        same = [line for line in acts if (line.what, line.number) == (what, number)]
        if (len({line.key for line in same}) if what == "order" else len(same)) > 1:
            found.append(f"{what} {number}")
    return found


def stopped(folder: Path, place: str, number: int) -> dict[str, Any]:
    """One round of a holder that stops itself at a place, is taken over from, and wakes."""
    run_id = f"{place}-{number}"
    holder, contender = Driver(folder, "holder", run_id), Driver(folder, "contender", run_id)
    stop_at(holder, place)

    async def hold() -> None:
        async with await holder.open() as engine:
            holder.told.status = (await (await holder.start(engine)).wait()).status

    async def take_over() -> None:
        async with await contender.open() as engine:
            contender.told.status = await driven_after_holder(engine, contender, holder)

    sleeper = fork(lambda: holder.run(hold), folder / "output")
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
    writable(folder, sleeper)
    successor = fork(lambda: contender.run(take_over), folder / "output")
    acts_before = holder.ledger.of(run_id)
    taken = await_take_over(folder, run_id)
    if number % 2:  # every other time the holder wakes while its successor drives
        assert successor.wait(PATIENCE_S) is not None
    os.kill(sleeper.pid, signal.SIGCONT)
    assert successor.wait(PATIENCE_S) is not None
    assert sleeper.wait(PATIENCE_S) is not None
    told = [json.loads((folder / f"told-{who}-{run_id}.json").read_text("utf-8")) for who in ("holder", "contender")]
    after = [f"{one.what} {one.number}" for one in holder.ledger.of(run_id)[len(acts_before) :]]
    lines = holder.ledger.of(run_id) + contender.ledger.of(run_id)
    return {"run": run_id, "taken": taken, "told": told, "woken_acts": after, "doubled": doubles(lines)}


def stop_at(driver: Driver, place: str) -> None:
    """Makes the process stop itself there, once."""
    left = [1]

    def stop(now: bool) -> None:
        if now and left:
            left.clear()
            os.kill(os.getpid(), signal.SIGSTOP)

    began: list[str] = []
    driver.watch.on_began = lambda tool, attempt: began.append(tool)
    match place:
        case "before-intent":
            driver.on_reply = lambda turn: stop(turn == 1)
        case "before-effect":
            # The reads of the second turn have run; what is confirmed next is the write whose intent is durable.
            driver.on_confirm = lambda: stop(began.count("look") >= 4)
        case "in-idempotent":
            driver.watch.on_began = lambda tool, attempt: stop(tool == "order")
        case "in-write":
            driver.watch.on_ended = lambda tool, attempt: stop(tool == "paint")


def writable(folder: Path, sleeper: Process) -> None:
    """The holder must not have stopped inside a commit, say of its heartbeat: there it would keep the file's lock."""
    probe = apsw.Connection(str(folder / "perdure.db"))
    probe.set_busy_timeout(200)
    try:
        probe.execute("begin immediate; rollback")
    except apsw.BusyError:
        sleeper.kill()
        raise
    finally:
        probe.close()


async def driven_after_holder(engine: Engine, driver: Driver, holder: Driver) -> str:
    """Resumes as soon as the holder is outlasted; settles a write in doubt by what happened."""
    while True:
        try:
            outcome = await (await driver.resume(engine)).wait()
        except LeaseHeldError:
            await asyncio.sleep(0.05)
            continue
        if outcome.status != "parked":
            return outcome.status
        assert outcome.park is not None
        call, detail = str(outcome.park.call), outcome.park.detail
        if any(line.call == call for line in holder.ledger.of(driver.run_id)):
            done = result(detail["tool"], detail["arguments"]["number"])
            await engine.resolve(driver.run_id, call, "happened", result=done)
        else:
            await engine.resolve(driver.run_id, call, "did_not_happen")


def await_take_over(folder: Path, run_id: str) -> bool:
    """Whether a second drive has recorded its beginning, while the holder still stands."""
    reader = apsw.Connection(str(folder / "perdure.db"), flags=apsw.SQLITE_OPEN_READONLY)
    query = "select count(*) from event where run_id = ? and kind = 'drive_started'"
    until = time.monotonic() + PATIENCE_S
    while (found := reader.execute(query, (run_id,)).get) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    reader.close()
    return bool(found >= 2)


def main(folder: Path, what: str, rounds: int) -> None:
    """Prints each round."""
    for number in range(rounds):
        play = race if what in ("resume", "recover") else stopped
        shown = play(folder, what, number)
        print(json.dumps(shown), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
