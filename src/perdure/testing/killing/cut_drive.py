"""One drive of a crash test, in a process of its own: the user's agent over a store of its own, every run of a tool's
function noted before and after."""

import asyncio
import json
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from perdure.agent import Agent
from perdure.calls import CallContext
from perdure.clock import SystemClock, SystemEntropy
from perdure.contracts.agents import ANSWER_TOOL
from perdure.contracts.contract import JsonObject, JsonValue
from perdure.contracts.messages import AssistantTurn
from perdure.contracts.outcomes import Outcome
from perdure.contracts.values import to_json
from perdure.engine import Engine
from perdure.errors import PerdureError, UnknownError
from perdure.journal import events as ev
from perdure.journal.envelope import Envelope
from perdure.journal.fold import RunState
from perdure.stores.url import open_store
from perdure.testing.killing.cuts import Cut, CuttingStore, CuttingWatch, Event
from perdure.testing.killing.fixed import FixedModel, turns_of
from perdure.testing.killing.folders import write_whole
from perdure.testing.killing.marking import ToolWatch, WatchedTool
from perdure.testing.killing.worlds import problem_of

RUN_ID = "crash-test"
"""The id of the run in each store of a crash test: idempotency keys are derived from it."""
Moment = Literal["began", "returned", "raised", "forked", "moved"]
Verdict = Literal["happened", "did_not_happen", "failed"]


class Ran(msgspec.Struct, frozen=True):
    """A line of the notes: a tool's function began or ended."""

    drive: int
    moment: Moment
    """`forked`: the function forked, and the copy came back here; it was ended. `moved`: once it had ended, the process
    stood in another working directory, or in none."""
    call: str
    tool: str
    at_ns: int
    result: JsonValue = None


class Drove(msgspec.Struct, frozen=True):
    """How a drive ended that was not killed."""

    status: str
    """As an outcome's; `refused` when an error ended the drive."""
    reason: str | None = None
    outcome: str | None = None
    answer: str | None = None
    output: JsonValue = None
    park: str | None = None
    call: str | None = None
    detail: JsonObject = {}
    events: tuple[Event, ...] = ()
    turns: tuple[AssistantTurn, ...] = ()
    used: dict[str, int] = {}
    """What counts against limits of a number, by the limit's name."""
    failed: dict[str, str] = {}
    """The tools of which no call succeeded, and why the first of these did not."""


@dataclass(frozen=True)
class Subject:
    """What is tested."""

    agent: Agent
    input: JsonValue
    model: Any
    """The model to record with, as `Engine.start` takes it; not asked once the turns are fixed."""
    answers: Mapping[str, JsonValue]


@dataclass(frozen=True)
class CutDrive:
    """One process's part. `folder` holds store, notes and results of one cut."""

    subject: Subject
    folder: Path
    number: int
    turns: tuple[AssistantTurn, ...] | None
    """None: the agent's own model is asked."""
    cut: Cut | None = None
    verdict: tuple[str, Verdict, JsonValue] | None = None
    """A call in doubt, what became of it, and its result or the words of its error."""
    answer: tuple[str, JsonValue] | None = None
    """A call that waits for an answer, and the answer."""
    skip_ns: int = 0
    """How far the clock is set ahead, in nanoseconds, for a run that sleeps."""
    working: Path | None = None
    """The working directory of the tools; None: as it is."""

    def work(self) -> int:
        """Does it; the result is left in a file. Returns an exit code of no further meaning."""
        try:
            if self.working is not None:
                os.chdir(self.working)
            drove = asyncio.run(self._drive())
        except PerdureError as error:
            drove = Drove("refused", str(error))
        except Exception as error:  # noqa: BLE001 - a defect of the user's loop: it is told, and the next cut is tried
            traceback.print_exc()
            drove = Drove("refused", problem_of(error))
        write_whole(self.result, msgspec.json.encode(drove))
        return 0

    @property
    def result(self) -> Path:
        """The file with how it ended; missing when it was killed."""
        return self.folder / f"drive-{self.number}.json"

    @property
    def output(self) -> Path:
        """What the tools and the process printed."""
        return self.folder / "output"

    async def _drive(self) -> Drove:
        clock, entropy = _AheadClock(self.skip_ns), SystemEntropy()
        store: Any = await open_store(f"sqlite:{self.folder / 'perdure.db'}", clock=clock, entropy=entropy)
        notes = Notes(self.folder, self.number)
        watches: list[ToolWatch] = [notes]
        if self.cut is not None:
            watches.append(CuttingWatch(self.cut))
            if self.cut.moment == "event":
                store = CuttingStore(store, self.cut.events)
        agent = self.subject.agent
        for watch in watches:  # the last one stands outermost: a function's end is noted before it is killed for it
            agent = replace(agent, tools=[WatchedTool(one, watch) for one in agent.tools])
        async with Engine(store, clock, entropy) as engine:
            outcome = await self._on(engine, agent)
            return _drove(outcome, await engine.state(RUN_ID), await engine.journal(RUN_ID))

    async def _on(self, engine: Engine, agent: Agent) -> Outcome:
        model = self.subject.model if self.turns is None else FixedModel(self.turns)
        try:
            if self.verdict is not None:
                call, became, value = self.verdict
                said: Any = {"text": value} if became == "failed" else {"result": value}
                await engine.resolve(RUN_ID, call, became, **said)
            if self.answer is not None:
                await engine.answer(RUN_ID, *self.answer)
            run = await engine.resume(RUN_ID, agent, model=model)
        except UnknownError:
            run = await engine.start(agent, self.subject.input, run_id=RUN_ID, model=model)
        return await run.wait()


class _AheadClock(SystemClock):
    """The system's clock, set ahead."""

    def __init__(self, ahead_ns: int) -> None:
        self._ahead_ns = ahead_ns

    def now_ns(self) -> int:
        """As `Clock.now_ns`."""
        return super().now_ns() + self._ahead_ns


class Notes:
    """Which functions ran in the drives of one cut: a line each, written before anything else happens."""

    def __init__(self, folder: Path, drive: int) -> None:
        self._path, self._drive, self._pid = folder / "notes", drive, os.getpid()
        self._place = _working_directory()

    def began(self, tool: str, call: CallContext) -> None:
        """As `ToolWatch.began`."""
        self._note("began", tool, call)

    def ended(self, tool: str, call: CallContext, value: object, error: BaseException | None) -> None:
        """As `ToolWatch.ended`."""
        if os.getpid() != self._pid:
            # The function forked, and this is the copy: it must not go on as a second driver of the run.
            self._note("forked", tool, call)
            os._exit(0)
        shown: JsonValue = None if error is None else str(error).encode("utf-8", "backslashreplace").decode()
        with suppress(Exception):
            shown = to_json(value) if error is None else shown
        self._note("returned" if error is None else "raised", tool, call, shown)
        if _working_directory() != self._place:
            self._note("moved", tool, call)

    def _note(self, moment: Moment, tool: str, call: CallContext, result: JsonValue = None) -> None:
        line = Ran(self._drive, moment, call.call_id, tool, time.monotonic_ns(), result)
        descriptor = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, msgspec.json.encode(line) + b"\n")
        finally:
            os.close(descriptor)

    @staticmethod
    def read(folder: Path) -> list[Ran]:
        """Every line."""
        path = folder / "notes"
        if not path.exists():
            return []
        return [msgspec.json.decode(line, type=Ran) for line in path.read_bytes().splitlines()]


def _working_directory() -> Path | None:
    """None when it is no longer there."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def _drove(outcome: Outcome, state: RunState, envelopes: tuple[Envelope, ...]) -> Drove:
    park = state.park()
    tools: dict[str, str] = {}
    events = []
    for envelope in envelopes:
        recorded = json.loads(envelope.payload or b"{}")
        call = recorded.get("call") if isinstance(recorded.get("call"), str) else None
        if envelope.kind == "tool_call_requested" and call is not None:
            tools[call] = recorded["tool"]
        events.append(Event(envelope.kind, call, tools.get(call or "")))
    return Drove(
        outcome.status,
        outcome.terminal_reason,
        outcome.outcome,
        outcome.answer,
        outcome.output,
        None if park is None else park.kind,
        None if park is None else park.call,
        {} if park is None else park.detail,
        tuple(events),
        turns_of(envelopes),
        {"max_model_turns": state.spent.model_turns, "max_tool_calls": state.spent.tool_calls},
        _failed(envelopes, {ANSWER_TOOL} if state.started.agent.output_schema is not None else set()),
    )


def _failed(envelopes: Sequence[Envelope], besides: set[str]) -> dict[str, str]:
    tools: dict[str, str] = {}
    succeeded, problems = set(besides), dict[str, str]()
    for event in map(ev.decode, envelopes):
        match event:
            case ev.ToolCallRequested():
                tools[event.call] = event.tool
            case ev.ToolCallCompleted() if event.call in tools:
                succeeded.add(tools[event.call])
            case ev.ToolCallFailed() if event.call in tools:
                problems.setdefault(tools[event.call], event.message)
            case ev.ToolCallRefused():
                problems.setdefault(event.tool, event.message or event.observation)
    return {tool: " ".join(why.split())[:200] for tool, why in problems.items() if tool not in succeeded}
