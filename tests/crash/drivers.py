"""Processes that drive the errand and tell afterwards what they did; and waits that end in a sentence."""

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from perdure.calls import CallContext
from perdure.clock import SystemClock, SystemEntropy
from perdure.engine import Engine
from perdure.errors import PerdureError
from perdure.journal.envelope import Envelope
from perdure.ports import IndexRow, Lease
from perdure.runs import Run
from perdure.stores.url import open_store
from perdure.testing.killing.errand import ASKED, Ledger, Line, errand_agent, script
from perdure.testing.killing.marking import WatchedTool
from perdure.testing.killing.processes import Process, fork
from perdure.testing.scripted import ScriptedModel

T = TypeVar("T")

LEASE_S = 1.0
PATIENCE_S = 60.0


def wait_for(what: str, look: Callable[[], T | None], *, patience_s: float = PATIENCE_S, pause_s: float = 0.005) -> T:
    """The first thing that `look` finds.

    Raises:
        AssertionError: nothing in that time; it says what was waited for.
    """
    until = time.monotonic() + patience_s
    while not (found := look()):
        if time.monotonic() > until:
            raise AssertionError(f"waited {patience_s:g} s in vain for {what}")
        if pause_s:
            time.sleep(pause_s)
    return found


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
    parks: list[tuple[str, str, int]] = field(default_factory=list)
    """What it was parked for before it was settled: kind, tool, number."""
    handed: list[str] = field(default_factory=list)
    """The kinds of the append it was stopped before, which it went on with."""
    handed_at: int = 0
    """The seq of the first of them."""
    handed_to: str = ""
    """What that append failed with; empty when it did not."""
    refusals: list[str] = field(default_factory=list)


class Driver:
    """One process's engine over the errand; what it does goes to a ledger of its own."""

    def __init__(self, folder: Path, who: str, run_id: str) -> None:
        self.folder, self.run_id = folder, run_id
        self.ledger = Ledger(folder / f"ledger-{who}")
        self.told = Told(who)
        self.watch = Watch()
        self.on_acquire: Callable[[], None] = lambda: None
        self.on_confirm: Callable[[tuple[str, int]], None] = lambda intent: None
        self.on_intent: Callable[[tuple[str, int]], bool] = lambda intent: False
        """Told of the last intent of an append before the store is; returns whether the append is to be told of."""
        self.on_reply: Callable[[int], None] = lambda number: None

    @property
    def report(self) -> Path:
        """Where what is told goes."""
        return self.folder / f"told-{self.told.who}-{self.run_id}.json"

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

    async def go_on(self, engine: Engine, verb: str = "resume") -> Run | None:
        """Resumes the run, or recovers what is due and picks the run out of that; None: it was not due."""
        if verb == "resume":
            return await engine.resume(self.run_id, self.agent(), model=self.model())
        # The agent of a run is found by the one that is given; its model is the agent's own.
        runs, problems = await engine.recover(replace(self.agent(), model=self.model()))
        if self.run_id in problems:
            raise problems[self.run_id]
        return next((run for run in runs if run.id == self.run_id), None)

    async def drive_on(self, verb: str, lease_seconds: float = LEASE_S) -> None:
        """Goes on with the run until it ends or parks."""
        async with await self.open(lease_seconds) as engine:
            run = await self.go_on(engine, verb)
            self.told.status = "nothing to recover" if run is None else (await run.wait()).status

    def fork(self, work: Callable[[], Any]) -> Process:
        """Does the work in a process of its own, which tells how it ended."""
        return fork(lambda: self._run(work), self.folder / "output")

    def _run(self, work: Callable[[], Any]) -> int:
        try:
            asyncio.run(work())
        except PerdureError as error:
            self.told.error, self.told.said = type(error).__name__, str(error)
        self.told.acts = [f"{one.what} {one.number}" for one in self.ledger.of(self.run_id)]
        self.report.write_text(json.dumps(asdict(self.told)), "utf-8")
        return 0

    def heard(self, process: Process) -> dict[str, Any]:
        """What the process told, once it has ended.

        Raises:
            AssertionError: it did not end in time, or not by itself.
        """
        ended = process.wait(PATIENCE_S)
        what = f"the {self.told.who} of run {self.run_id}"
        if ended is None:
            process.kill()
            raise AssertionError(f"waited {PATIENCE_S:g} s in vain for {what} to end")
        assert ended.code == 0, f"{what} ended with {ended.code}; its output is in {self.folder / 'output'}"
        told: dict[str, Any] = json.loads(self.report.read_text("utf-8"))
        return told


class NotingStore:
    """Notes when `acquire` is entered and left, and calls back before acquire, append and confirm."""

    def __init__(self, store: Any, driver: Driver) -> None:
        self._store, self._driver = store, driver
        self._intent = ("", 0)

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

    def append(self, lease: Lease, envelopes: Sequence[Envelope], index: IndexRow | None) -> "asyncio.Future[None]":
        intents = [intent_of(one) for one in envelopes if one.kind == "tool_call_requested"]
        self._intent = intents[-1] if intents else self._intent
        noted = [self._driver.on_intent(intent) for intent in intents]
        stored: asyncio.Future[None] = self._store.append(lease, envelopes, index)
        if any(noted):
            self._note(envelopes, stored)
        return stored

    def _note(self, envelopes: Sequence[Envelope], stored: "asyncio.Future[None]") -> None:
        told = self._driver.told
        told.handed, told.handed_at = [one.kind for one in envelopes], envelopes[0].seq

        def settled(future: "asyncio.Future[None]") -> None:
            error = future.exception()
            told.handed_to = "" if error is None else type(error).__name__

        stored.add_done_callback(settled)

    async def confirm(self, lease: Lease) -> None:
        self._driver.on_confirm(self._intent)
        await self._store.confirm(lease)


def intent_of(envelope: Envelope) -> tuple[str, int]:
    """The tool of an intent, and its number."""
    payload = json.loads(envelope.payload or b"{}")
    return payload["tool"], payload["arguments"]["number"]


class Watch:
    """Calls back when a tool's function begins or ends."""

    def __init__(self) -> None:
        self.on_began: Callable[[str], None] = lambda tool: None
        self.on_ended: Callable[[str], None] = lambda tool: None

    def began(self, tool: str, call: CallContext) -> None:
        self.on_began(tool)

    def ended(self, tool: str, call: CallContext, value: object, error: BaseException | None) -> None:
        self.on_ended(tool)


def wait_until_stopped(process: Process, what: str) -> None:
    """Returns once SIGSTOP has stopped it.

    Raises:
        AssertionError: it did not stop in time, or ended.
    """

    def look() -> "os.waitid_result | None":
        # Left waitable: how it ended is for `Process.wait` to find.
        return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT)

    found = wait_for(f"{what} to stop itself", look)
    assert found.si_code == os.CLD_STOPPED, f"{what} ended before it came to where it was to stop itself"


def stop_self() -> None:
    """Stops this process until somebody continues it."""
    os.kill(os.getpid(), signal.SIGSTOP)
