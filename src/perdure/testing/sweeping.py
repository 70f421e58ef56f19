"""The crash sweep: one run recorded whole, then cut after every event and resumed, as if the process had died there.

    report = await sweep(agent, model, "the task", world, directory=tmp_path, answers={"3.0": {"ok": True}})
    assert not report.problems

A cut is a real SQLite store that holds exactly the first events of the recorded run, beside a world as it was at that
moment. When the world changed between the last event kept and the first one lost, the cut is tried in both worlds: the
process may have died before the effect or after it.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, Self

from perdure.agent import Agent
from perdure.clock import SystemEntropy
from perdure.contracts.contract import canonical, content_digest
from perdure.contracts.messages import Effect
from perdure.contracts.outcomes import Outcome
from perdure.engine import Engine
from perdure.errors import PerdureError
from perdure.journal import events as ev
from perdure.journal.envelope import Envelope
from perdure.journal.fold import OpenCall, RunState, fold
from perdure.ports import IndexRow, Lease, ModelClient, ModelEvent, Store
from perdure.prompting.request import ModelRequest
from perdure.runs import Run
from perdure.runtime.journaling import index_row
from perdure.stores.url import open_store
from perdure.testing.clocks import DAWN_NS, ManualClock, SeededEntropy
from perdure.testing.crashing import CrashingStore, StoreCrashedError

RUN_ID = "sweep"
"""The id of every run of a sweep: idempotency keys are derived from it."""
_RECOVERY = ("drive_started", "attempt_started", "effect_resolved", "late_result_observed")
"""What a resumed journal may hold beyond the one that was never cut, or lack: a late result comes when it comes."""
_OUTSIDE = ("resumed", "budget_changed", "effect_resolved", "cancel_requested")
"""Recorded while nobody drives the run."""
_ANSWERS = ("tool_call_completed", "tool_call_failed")
_ENTROPY_BYTES = 8
"""What `RunContext.entropy` draws at a time."""


class World(Protocol):
    """Everything outside the run that its tools read or change."""

    def snapshot(self) -> Any:
        """A copy of all of it; two are compared with `==`."""

    def restore(self, snapshot: Any) -> None:
        """Makes it as it was."""

    def effects(self) -> Sequence[Any]:
        """What was done to it, each effect as often as it happened, in order."""


@dataclass(frozen=True)
class Recording:
    """The run that was never cut."""

    key: bytes
    envelopes: tuple[Envelope, ...]
    worlds: tuple[Any, ...]
    """For each event, and once more for the end: the world at the moment the event was handed to the store."""
    open: tuple[tuple[OpenCall, ...], ...]
    """For each number of events kept: the calls that have an intent and no answer then."""
    effects: Sequence[Any]
    requests: Mapping[int, str]
    """Digest of each model request, by the number of turns in it."""
    outcome: Outcome


@dataclass(frozen=True)
class Case:
    """One cut in one world."""

    kept: int
    """How many events the store held."""
    world: str
    """`before` what was under way, or `after` it."""
    verdict: str | None
    """How the write in doubt was settled: `happened`, `did_not_happen`, `failed`; None when there was none."""

    def __str__(self) -> str:
        settled = f", resolved {self.verdict}" if self.verdict else ""
        return f"cut after {self.kept} events, world {self.world}{settled}"


@dataclass(frozen=True)
class CutReport:
    """What came of one cut."""

    case: Case
    problems: tuple[str, ...]
    """Empty when the run ended as if it had never been cut."""
    drives: int
    attempts: int
    """How many `drive_started` and `attempt_started` the journal holds at its end."""


@dataclass(frozen=True)
class SweepReport:
    """The recorded run, and every cut of it."""

    recording: Recording
    cuts: tuple[CutReport, ...]

    @property
    def problems(self) -> list[str]:
        """Every problem of every cut, one a line."""
        return [f"{cut.case}: {problem}" for cut in self.cuts for problem in cut.problems]


async def sweep(  # noqa: PLR0913 - every one but the first four has a default or a name
    agent: Agent,
    model: Callable[[], ModelClient],
    input: object,
    world: World,
    *,
    directory: Path,
    answers: Mapping[str, object] | None = None,
    live: bool = False,
    part: int = 0,
    parts: int = 1,
) -> SweepReport:
    """Records one run to its end, then cuts it after 0, 1, ... all of its events, and resumes each.

    Every journal must end equal to the recorded one, byte for byte of its payloads, once `drive_started`,
    `attempt_started` and `effect_resolved` are left out (answers of overlapping reads may come in any order), with
    exactly as many of those as the cut asks for. Every effect must be there as often as in the recorded run, and no
    finished model call may be asked again. Time stands still but for the sleeps of the run, which end on time.

    Args:
        agent: what is run; its tools read and change `world`.
        model: makes a model client that answers by what is in the request, as `ScriptedModel` does.
        world: as it is when the run starts; the sweep takes it back to a former state for each cut, and to the first
            at the end.
        directory: where the stores are put, one file a cut.
        answers: what each `suspended` call is answered, by call id.
        live: make each cut by driving the run from its start over a `CrashingStore`, in place of writing its first
            events down.
        part, parts: do only every `parts`-th cut, beginning with number `part`, to share the work out.

    Raises:
        ValueError: the recorded run does not end, or waits for something that `answers` does not hold.
    """
    subject = _Subject(agent, model, input, world, directory, answers or {})
    recording = await subject.record()
    places = range(len(recording.envelopes) + 1)
    if live:
        cuts = [await subject.crash(recording, kept) for kept in places[part::parts]]
    else:
        cases = [case for kept in places for case in cases_of(recording, kept)]
        cuts = [await subject.cut(recording, case) for case in cases[part::parts]]
    world.restore(recording.worlds[0])
    return SweepReport(recording, tuple(cuts))


@dataclass(frozen=True)
class _Subject:
    """What is swept."""

    agent: Agent
    model: Callable[[], ModelClient]
    input: object
    world: World
    directory: Path
    answers: Mapping[str, object]

    async def record(self) -> Recording:
        """The run that is never cut."""
        world, path = self.world, self.directory / "recorded.db"
        watching: list[_WatchedStore] = []
        async with await _Driver.open(self, DAWN_NS, path, lambda store: _watched(store, world, watching)) as driver:
            outcome = await driver.to_the_end(await driver.start(), None)
            stored = await driver.engine.read(RUN_ID)
        if outcome.status == "parked":
            raise ValueError(f"the run to be swept parks: {outcome.park}")
        worlds = (*watching[0].worlds, world.snapshot())
        opened = _open_calls(stored.envelopes)
        return Recording(stored.key, stored.envelopes, worlds, opened, world.effects(), driver.requests, outcome)

    async def cut(self, recording: Recording, case: Case) -> CutReport:
        """Writes the first events into a store, resumes the run from there and compares where it comes to."""
        self.world.restore(recording.worlds[max(case.kept - (case.world == "before"), 0)])
        return await self._resume(recording, case, self.directory / f"{case.kept}-{case.world}.db", stored=False)

    async def crash(self, recording: Recording, kept: int) -> CutReport:
        """Drives the run until its store crashes, then as `cut`."""
        self.world.restore(recording.worlds[0])
        path = self.directory / f"{kept}-live.db"
        async with await _Driver.open(self, DAWN_NS, path, lambda store: CrashingStore(store, kept)) as driver:
            with suppress(StoreCrashedError):
                await driver.to_the_end(await driver.start(), None)
        cases = cases_of(recording, kept)
        at_this = [
            case for case in cases if recording.worlds[max(kept - (case.world == "before"), 0)] == self.world.snapshot()
        ]
        return await self._resume(recording, (at_this or cases)[0], path, stored=kept > 0)

    async def _resume(self, recording: Recording, case: Case, path: Path, *, stored: bool) -> CutReport:
        prefix = recording.envelopes[: case.kept]
        now_ns = prefix[-1].recorded_at if prefix else DAWN_NS
        try:
            async with await _Driver.open(self, now_ns, path) as driver:
                if prefix and not stored:
                    await driver.store(recording, prefix)
                outcome = await driver.to_the_end(await driver.restart(prefix), self._verdict(recording, case))
                found = await driver.engine.journal(RUN_ID)
        except (PerdureError, ValueError) as error:
            return CutReport(case, (f"{type(error).__name__}: {error}",), 0, 0)
        finally:
            for file in self.directory.glob(f"{path.name}*"):
                if file.is_file():
                    file.unlink()
        problems = [*_differences(recording, case, found), *_outside(recording, self.world, driver, outcome, case)]
        kinds = Counter(envelope.kind for envelope in found)
        return CutReport(case, tuple(problems), kinds["drive_started"], kinds["attempt_started"])

    def _verdict(self, recording: Recording, case: Case) -> "_Verdict | None":
        if case.verdict is None:
            return None
        call = next(call.call for call in recording.open[case.kept] if call.in_doubt)
        answer = _answer_to(recording, call)
        if case.verdict == "happened" and isinstance(answer, ev.ToolCallCompleted):
            return _Verdict(call, "happened", result=answer.output)
        if case.verdict == "failed" and isinstance(answer, ev.ToolCallFailed):
            return _Verdict(call, "failed", text=answer.message)
        return _Verdict(call, "did_not_happen")


def cases_of(recording: Recording, kept: int) -> list[Case]:
    """The worlds one cut is tried in."""
    before = recording.worlds[max(kept - 1, 0)]
    doubts = [call for call in recording.open[kept] if call.in_doubt]
    if doubts:
        answer = _answer_to(recording, doubts[0].call)
        truth = "happened" if isinstance(answer, ev.ToolCallCompleted) else "failed"
        return [Case(kept, "before", "did_not_happen"), Case(kept, "after", truth)]
    changed = kept > 0 and before != recording.worlds[kept]
    return [Case(kept, "before", None)] + [Case(kept, "after", None)] * changed


@dataclass(frozen=True)
class _Verdict:
    """What a person finds out about the write in doubt."""

    call: str
    verdict: Any
    result: Any = None
    text: str | None = None


class _Driver:
    """One process's engine over one store file, with time, chance and model of its own."""

    def __init__(self, subject: _Subject, clock: ManualClock, entropy: SeededEntropy, store: Store) -> None:
        self._subject, self._clock, self._entropy, self._store = subject, clock, entropy, store
        self._settled: list[str] = []
        self.engine = Engine(store, clock, entropy)
        self.requests: dict[int, str] = {}
        self.asked = 0

    @classmethod
    async def open(
        cls, subject: _Subject, now_ns: int, path: Path, wrap: Callable[[Store], Store] | None = None
    ) -> "_Driver":
        clock, entropy = ManualClock(now_ns, passing=False), SeededEntropy()
        # The store names its driver by chance: two processes never have the same.
        store = await open_store(f"sqlite:{path}", clock=clock, entropy=SystemEntropy())
        return cls(subject, clock, entropy, store if wrap is None else wrap(store))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.engine.close()

    async def start(self) -> Run:
        return await self.engine.start(self._subject.agent, self._subject.input, run_id=RUN_ID, model=self._client())

    async def store(self, recording: Recording, events: Sequence[Envelope]) -> None:
        """Puts the first events into the store, given up by whoever wrote them."""
        state, _ = fold(RUN_ID, events)
        await self._store.release(await self._store.create(RUN_ID, recording.key, events, index_row(state)))

    async def restart(self, stored: Sequence[Envelope]) -> Run:
        """Resumes the run, or starts it where nothing is stored."""
        if not stored:
            return await self.start()
        self._entropy.skip(_ENTROPY_BYTES, sum(envelope.kind == "entropy_observed" for envelope in stored))
        return await self._resume()

    async def _resume(self) -> Run:
        return await self.engine.resume(RUN_ID, self._subject.agent, model=self._client())

    async def to_the_end(self, run: Run, verdict: _Verdict | None) -> Outcome:
        """Drives the run until it ends, settling what it waits for."""
        while True:
            outcome = await run.wait()
            if outcome.status != "parked":
                return outcome
            await self._settle(verdict)
            run = await self._resume()

    async def _settle(self, verdict: _Verdict | None) -> None:
        park = (await self.engine.state(RUN_ID)).park()
        assert park is not None
        place = f"{park.kind} at {park.call}"
        if place in self._settled:
            raise ValueError(f"the run parks again: {place}")
        self._settled.append(place)
        if park.kind == "sleeping":
            self._clock.jump_to(park.detail["wake_at"])
        elif park.kind == "suspended" and (call := park.call) in self._subject.answers:
            assert call is not None
            await self.engine.answer(RUN_ID, call, self._subject.answers[call])
        elif park.kind == "needs_reconciliation" and verdict is not None and verdict.call == park.call:
            await self.engine.resolve(RUN_ID, verdict.call, verdict.verdict, result=verdict.result, text=verdict.text)
        else:
            raise ValueError(f"the run parks and nothing here settles it: {place}, {park.detail}")

    @property
    def parked(self) -> list[str]:
        """Where the run parked, in order."""
        return self._settled

    def _client(self) -> "_CountingModel":
        return _CountingModel(self._subject.model(), self)


class _CountingModel:
    """A model client that notes what is asked of the one it stands before."""

    def __init__(self, model: ModelClient, driver: _Driver) -> None:
        self._model, self._driver = model, driver
        self.target, self.strict = model.target, model.strict

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """As `ModelClient.stream`."""
        self._driver.asked += 1
        form = [request.instructions, request.tools, list(request.transcript), request.settings, request.tool_choice]
        self._driver.requests[request.transcript.turns] = content_digest(canonical(form))
        async for event in self._model.stream(request):
            yield event

    async def close(self) -> None:
        """As `ModelClient.close`."""
        await self._model.close()


class _WatchedStore:
    """A store that looks at the world whenever events are handed to it; else the one it stands before."""

    def __init__(self, store: Store, world: World) -> None:
        self._store, self._world = store, world
        self.worlds: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def create(self, run_id: str, key: bytes, envelopes: Sequence[Envelope], index: IndexRow) -> Lease:
        """As `Store.create`."""
        self._look(envelopes)
        return await self._store.create(run_id, key, envelopes, index)

    def append(self, lease: Lease, envelopes: Sequence[Envelope], index: IndexRow | None) -> Any:
        """As `Store.append`."""
        self._look(envelopes)
        return self._store.append(lease, envelopes, index)

    def _look(self, envelopes: Sequence[Envelope]) -> None:
        self.worlds.extend([self._world.snapshot()] * len(envelopes))


def _watched(store: Store, world: World, watching: list[_WatchedStore]) -> Any:
    watching.append(_WatchedStore(store, world))
    return watching[-1]


def _open_calls(envelopes: Sequence[Envelope]) -> tuple[tuple[OpenCall, ...], ...]:
    state = RunState(RUN_ID)
    found: list[tuple[OpenCall, ...]] = [()]
    for envelope in envelopes:
        state.advance(envelope, ev.decode(envelope))
        found.append(tuple([copy(call) for call in state.open.values()]))
    return tuple(found)


def _answer_to(recording: Recording, call: str) -> ev.Event | None:
    for envelope in recording.envelopes:
        if envelope.kind in _ANSWERS:
            answer = ev.decode(envelope)
            if getattr(answer, "call", None) == call:
                return answer
    return None


# Comparing


def lasting(envelopes: Sequence[Envelope]) -> list[tuple[str, bytes]]:
    """Kind and payload of every event that does not belong to recovery, in order; neighbouring answers of calls sorted,
    since calls that overlap may end in any order."""
    kept = [(one.kind, one.payload or b"") for one in envelopes if one.kind not in _RECOVERY]
    ordered: list[tuple[str, bytes]] = []
    for answers, group in groupby(kept, key=lambda one: one[0] in _ANSWERS):
        same = list(group)
        ordered.extend(sorted(same, key=lambda one: one[1]) if answers else same)
    return ordered


def _differences(recording: Recording, case: Case, found: Sequence[Envelope]) -> list[str]:
    problems = []
    wanted, got = lasting(recording.envelopes), lasting(found)
    if wanted != got:
        place = next(
            (n for n, pair in enumerate(zip(wanted, got, strict=False)) if pair[0] != pair[1]),
            min(len(wanted), len(got)),
        )
        problems.append(f"the journal differs at event {place}: {_shown(wanted, place)} became {_shown(got, place)}")
    kinds = Counter(envelope.kind for envelope in found)
    for kind, expected in (
        ("drive_started", _expected_drives(recording, case)),
        ("attempt_started", _expected_attempts(recording, case)),
        ("effect_resolved", int(case.verdict is not None)),
    ):
        if kinds[kind] != expected:
            problems.append(f"{kinds[kind]} {kind} in place of {expected}")
    return problems


def _shown(events: Sequence[tuple[str, bytes]], place: int) -> str:
    return f"{events[place][0]} {events[place][1][:300]!r}" if place < len(events) else "nothing"


def _outside(recording: Recording, world: World, driver: _Driver, outcome: Outcome, case: Case) -> list[str]:
    problems = []
    if list(world.effects()) != list(recording.effects):
        problems.append(
            f"effects differ: {Counter(map(repr, world.effects()))} in place of {Counter(map(repr, recording.effects))}"
        )
    finished = sum(envelope.kind == "model_call_completed" for envelope in recording.envelopes[: case.kept])
    if driver.asked != len(recording.requests) - finished:
        problems.append(f"{driver.asked} model calls in place of {len(recording.requests) - finished}")
    changed = [number for number, digest in driver.requests.items() if recording.requests.get(number) != digest]
    if changed:
        problems.append(f"the requests after {changed} turns differ from what was asked before")
    if (outcome.status, outcome.outcome, outcome.output) != (
        recording.outcome.status,
        recording.outcome.outcome,
        recording.outcome.output,
    ):
        problems.append(f"it ended {outcome.status}, {outcome.terminal_reason}, with {outcome.output!r:.200}")
    doubted = [place for place in driver.parked if place.startswith("needs_reconciliation")]
    if len(doubted) != int(case.verdict is not None):
        problems.append(f"parked {doubted} for writes in doubt")
    return problems


def _expected_drives(recording: Recording, case: Case) -> int:
    """One more than recorded when the cut falls into a drive: not where a drive had ended, nor where the next began."""
    whole = sum(envelope.kind == "drive_started" for envelope in recording.envelopes)
    if case.kept in (0, len(recording.envelopes)):
        return whole
    following = recording.envelopes[case.kept].kind
    return whole + (following != "drive_started" and following not in _OUTSIDE)


def _expected_attempts(recording: Recording, case: Case) -> int:
    """The recorded ones, and those that the calls cut short take again."""
    attempts: Counter[str] = Counter()
    early: Counter[str] = Counter()
    for envelope in recording.envelopes:
        event = ev.decode(envelope)
        if isinstance(event, ev.AttemptStarted):
            attempts[event.call] += 1
            early[event.call] += envelope.seq < case.kept
    for call in recording.open[case.kept]:
        attempts[call.call] = _attempts_of(call, early[call.call], attempts[call.call], case)
    return attempts.total()


def _attempts_of(call: OpenCall, early: int, recorded: int, case: Case) -> int:
    if call.effect is Effect.WRITE and call.tool is not None:
        return recorded + (case.verdict == "did_not_happen")
    # The try that was under way is made again; one that had had its way with the world already had not been in vain.
    return max(early + 1, recorded) if case.world == "after" else recorded + 1
