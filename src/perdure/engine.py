"""The facade: start runs, bring them back, settle what they wait for. The only place that turns a latch into a return.

Owns which process drives a run, and for how long. How a run is driven is the runtime's; how it is stored is the
store's.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from perdure import settlement
from perdure.agent import Agent, label_problems
from perdure.agent_file import load_agent
from perdure.clock import SystemClock, SystemEntropy
from perdure.contracts.contract import JsonObject
from perdure.contracts.outcomes import Outcome
from perdure.contracts.values import to_json
from perdure.errors import (
    ConfigurationError,
    DefinitionChangedError,
    LeaseHeldError,
    MalformedJournalError,
    PerdureError,
    UnknownError,
    UsageError,
)
from perdure.journal import events as ev
from perdure.journal.cursor import Cursor, Permit
from perdure.journal.envelope import FIRST_PREVIOUS, Envelope, check_chain
from perdure.journal.fold import RunState, fold
from perdure.journal.render import outcome_of, rfc3339, show_record, status_of
from perdure.models.registry import model_client
from perdure.ports import Clock, Entropy, Lease, ModelClient, ModelEvent, RunSummary, Store, StoredRun
from perdure.release import VERSION
from perdure.run_ids import new_run_id
from perdure.runtime.drive import Bindings, Drive
from perdure.runtime.ending import run_loop
from perdure.runtime.journaling import RunJournal, index_row
from perdure.stores.url import open_store
from perdure.tools.output import check_schema

KEY_BYTES = 32
"""Length of a run's random key for keyed digests."""
_RUN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

Cause = Literal["start", "resume", "recover"]
Observer = Callable[[str, str, ModelEvent], None]
"""Told of run id, call id and what streams; never journaled."""


class _LeasedSink:
    """The store, for the one run a lease is for."""

    def __init__(self, store: Store, lease: Lease) -> None:
        self._store, self.lease = store, lease

    def append(self, envelopes: Sequence[Envelope], index: Any) -> "asyncio.Future[None]":
        return self._store.append(self.lease, envelopes, index)


class Run:
    """A handle on one run: leave it and rejoin it at will."""

    def __init__(self, engine: "Engine", run_id: str, driving: "_Driving | None") -> None:
        self._engine, self._driving = engine, driving
        self.id = run_id

    async def wait(self) -> Outcome:
        """The outcome once this process stops driving the run: ended, or parked.

        Raises:
            RefusedError: the drive was refused; the run is as it was.
        """
        if self._driving is None:
            return await self._engine.outcome(self.id)
        await asyncio.shield(self._driving.task)
        return outcome_of(self._driving.drive.state)

    async def events(self, from_seq: int = 0) -> AsyncIterator[Envelope]:
        """History from a seq on, then live, until this process stops driving the run. Only what is durable is shown."""
        while True:
            driving = self._driving
            finished = driving is None or driving.task.done()
            stored = await self._engine.read(self.id, from_seq)
            for envelope in stored.envelopes:
                yield envelope
            from_seq += len(stored.envelopes)
            if finished or driving is None:
                return
            if not stored.envelopes:
                await driving.news()

    async def cancel(self, reason: str | None = None, *, by: str | None = None) -> None:
        """Ends the run: what is in flight is told to stop, and every call gets one observation."""
        await self._engine.cancel(self.id, reason, by=by)


class _Driving:
    """One run this process drives."""

    def __init__(self, drive: Drive, own_model: bool) -> None:
        self.drive = drive
        self.own_model = own_model
        """Whether the client was made for this drive, and so is closed with it."""
        self.task: asyncio.Task[None]
        self._news = asyncio.Event()

    def durable(self) -> None:
        self._news.set()

    async def news(self) -> None:
        """Returns when something became durable, or the drive is over."""
        waiting = asyncio.ensure_future(self._news.wait())
        await asyncio.wait({waiting, self.task}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        self._news.clear()

    def cancel(self, request: ev.CancelRequested) -> None:
        self.drive.cancel_requested = request
        self.task.cancel()

    def fail(self, error: BaseException) -> None:
        """Nothing of this drive counts any more: stop what runs."""
        if self.drive.latch is None:
            self.drive.latch = error
        if not self.task.done():
            self.task.cancel()


class Engine:
    """Runs agents over one store. Open it with `async with Engine.open("sqlite:perdure.db") as engine`."""

    def __init__(self, store: Store, clock: Clock, entropy: Entropy) -> None:
        self._store, self._clock, self._entropy = store, clock, entropy
        self._driven: dict[str, _Driving] = {}
        self.observer: Observer | None = None

    @staticmethod
    def open(
        url: str,
        *,
        clock: Clock | None = None,
        entropy: Entropy | None = None,
        lease_seconds: float = 10.0,
        create: bool = True,
        read_only: bool = False,
    ) -> "OpeningEngine":
        """An engine on the store at `url` (`sqlite:PATH`); await it or use it with `async with`.

        Args:
            lease_seconds: how long a driver's heartbeat may stand still before another may take its runs over.
            create: make the store when it is not there.
            read_only: for looking: takes no lock and writes nothing.
        """
        given_clock, given_entropy = clock or SystemClock(), entropy or SystemEntropy()

        async def opened() -> Engine:
            store = await open_store(
                url,
                clock=given_clock,
                entropy=given_entropy,
                lease_seconds=lease_seconds,
                create=create,
                read_only=read_only,
            )
            return Engine(store, given_clock, given_entropy)

        return OpeningEngine(opened)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stops what this process drives at the next safe point, gives every lease up, closes the store."""
        self.stop()
        tasks = [driving.task for driving in self._driven.values()]
        if tasks:
            await asyncio.wait(tasks)
        await self._store.close()

    def stop(self) -> None:
        """Asks every drive of this process to park at its next safe point. The runs stay resumable."""
        for driving in self._driven.values():
            driving.drive.stop_requested = True

    # Driving

    async def start(
        self,
        agent: Agent,
        input: object,
        *,
        run_id: str | None = None,
        model: str | ModelClient | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Run:
        """Starts a run and drives it in the background.

        Raises:
            UsageError: the id is malformed or taken, or no model is named; nothing was recorded.
            StoreError: the store cannot be used.
        """
        run_id = new_run_id(self._clock, self._entropy) if run_id is None else _checked_id(run_id)
        bound = agent.model if model is None else model
        binding = _bind(bound, agent)
        head = ev.RunStarted(
            agent.spec,
            to_json(input),
            binding.name,
            VERSION,
            agent.ref,
            _checked_labels({**agent.labels, **(labels or {})}),
        )
        state, key = RunState(run_id), self._entropy.draw(KEY_BYTES)
        sink = _LeasedSink(self._store, Lease(run_id, 0))
        journal = RunJournal(state, FIRST_PREVIOUS, sink, self._clock, self._entropy)
        sealed = journal.seal_apart(head, *_degradations(agent))
        try:
            sink.lease = await self._store.create(run_id, key, sealed, index_row(state))
        except BaseException:
            await binding.discard()
            raise
        return self._drive(agent, binding, sink, journal, key, Cursor(()), "start")

    async def resume(
        self,
        run_id: str,
        agent: Agent | None = None,
        *,
        model: str | ModelClient | None = None,
        cause: Literal["resume", "recover"] = "resume",
    ) -> Run:
        """Brings a run back and drives it on: replays what is recorded, then goes on live.

        Args:
            agent: the agent it started with; None finds it where the run's head says.
            model: another model from here on.

        Raises:
            UnknownError: no such run.
            RefusedError: held by another driver, a changed definition, a damaged journal; the run stays as it was.
        """
        if run_id in self._driven:
            raise LeaseHeldError(
                "this process drives the run already", where=f"run {run_id}", next="wait for it with `Run.wait`"
            )
        # Read first: a run that ended, or that the agent does not fit, is not worth a lease.
        proven = _proven(await self.read(run_id))
        if proven.state.end is not None:
            return Run(self, run_id, None)
        agent = _recorded_agent(proven.state) if agent is None else agent
        _must_be_unchanged(proven.state, agent)
        binding = _rebind(proven.state, agent, model)
        try:
            lease, proven = await self._take(proven)
        except BaseException:
            await binding.discard()
            raise
        if proven.state.end is not None:
            await self._store.release(lease)
            await binding.discard()
            return Run(self, run_id, None)
        rebound = () if proven.state.model in (binding.name, binding.client.target) else (ev.ModelBound(binding.name),)
        sink = _LeasedSink(self._store, lease)
        journal = RunJournal(proven.state, proven.head, sink, self._clock, self._entropy)
        return self._drive(agent, binding, sink, journal, proven.key, Cursor(proven.events), cause, *rebound)

    async def _take(self, proven: "_Proven") -> tuple[Lease, "_Proven"]:
        """Takes the lease, and what was recorded between the first reading and that."""
        run_id = proven.state.run_id
        lease = await self._store.acquire(run_id)
        try:
            if (await self.read(run_id, proven.state.events)).envelopes:
                proven = _proven(await self.read(run_id))
        except BaseException:
            await self._store.release(lease)
            raise
        return lease, proven

    async def recover(self, agent: Agent | None = None) -> tuple[list[Run], dict[str, PerdureError]]:
        """Brings back every run that neither ended nor is held nor parked, and those whose wake time has come.

        Returns the runs that are driven now, and why others could not be.
        """
        runs: list[Run] = []
        problems: dict[str, PerdureError] = {}
        for summary in await self._store.runs():
            try:
                if await self._is_due(summary):
                    runs.append(await self.resume(summary.run_id, agent, cause="recover"))
            except PerdureError as error:
                problems[summary.run_id] = error
        return runs, problems

    async def _is_due(self, summary: RunSummary) -> bool:
        if summary.held or summary.run_id in self._driven or summary.index.phase not in ("open", "parked"):
            return False
        if summary.index.phase == "parked":
            wake_at = summary.index.wake_at
            return wake_at is not None and wake_at <= self._clock.now_ns()
        return (await self.state(summary.run_id)).park() is None

    def _drive(
        self,
        agent: Agent,
        binding: "_Binding",
        sink: _LeasedSink,
        journal: RunJournal,
        key: bytes,
        cursor: Cursor,
        cause: Cause,
        *opening: ev.Event,
    ) -> Run:
        lease, run_id = sink.lease, journal.state.run_id
        bindings = Bindings(
            model=binding.client,
            tools=agent.tools_by_name,
            clock=self._clock,
            entropy=self._entropy,
            answer_check=agent.answer_check,
            check_schema=check_schema,
            confirm=lambda: self._store.confirm(lease),
            put_artifact=lambda data: self._store.put_artifact(run_id, data),
            on_delta=self._deltas_of(run_id),
        )
        journal.begin_drive(ev.DriveStarted(lease.epoch, VERSION, cause), *opening)
        spec = journal.state.started.agent
        driving = _Driving(Drive(run_id, key, lease.epoch, spec, cursor, journal, bindings), binding.own)
        journal.on_failure, journal.on_durable = driving.fail, driving.durable
        driving.task = asyncio.create_task(self._to_the_end(driving, agent, lease), name=f"perdure {run_id}")
        # A refusal nobody waits for is in the run's state all the same.
        driving.task.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        self._driven[run_id] = driving
        return Run(self, run_id, driving)

    def _deltas_of(self, run_id: str) -> Callable[[str, ModelEvent], None] | None:
        observer = self.observer
        return None if observer is None else lambda call, event: observer(run_id, call, event)

    async def _to_the_end(self, driving: _Driving, agent: Agent, lease: Lease) -> None:
        try:
            await run_loop(driving.drive, agent.loop_function, driving.drive.state.started.input)
        finally:
            self._driven.pop(lease.run_id, None)
            if driving.own_model:
                await driving.drive.bindings.model.close()
            await self._store.release(lease)

    # Settling

    async def answer(
        self, run_id: str, id: str, value: object, *, by: str | None = None, key: str | None = None
    ) -> None:
        """Records the answer a run waits for; the run goes on when it is resumed.

        Raises:
            InvalidAnswerError: nothing waits there, or the answer does not fit its schema.
        """
        await self._settle(run_id, lambda state: settlement.answer(state, id, value, by, key))

    async def resolve(
        self,
        run_id: str,
        call: str,
        verdict: Literal["happened", "did_not_happen", "failed"],
        *,
        result: object = None,
        text: str | None = None,
        by: str | None = None,
    ) -> None:
        """Records what became of a write in doubt: it happened (with its result), it did not and can no longer, or it
        failed."""
        await self._settle(run_id, lambda state: settlement.resolve(state, call, verdict, result, text, by))

    async def limit(self, run_id: str, *, by: str | None = None, **changes: int | str) -> None:
        """Sets new totals for limits, up or down; "+5" adds to the present total."""
        driving = self._driven.get(run_id)
        if driving is not None:
            for event in settlement.limit(driving.drive.state, changes, by):
                driving.drive.journal.queue(Permit("limit"), event)
            await driving.drive.journal.commit()
            return
        await self._settle(run_id, lambda state: settlement.limit(state, changes, by))

    async def cancel(self, run_id: str, reason: str | None = None, *, by: str | None = None) -> None:
        """Ends a run as cancelled. One this process drives is told to stop, and has ended on return."""
        driving = self._driven.get(run_id)
        if driving is not None:
            driving.cancel(ev.CancelRequested(reason, by))
            await asyncio.wait({driving.task})
            return
        await self._settle(run_id, lambda state: settlement.cancel(state, reason, by))

    async def abandon(self, run_id: str, *, by: str | None = None) -> None:
        """Gives a run up: it ends, claims no answer, and names writes that may have happened."""
        await self._settle(run_id, lambda state: settlement.abandon(state, by))

    async def _settle(self, run_id: str, decide: Callable[[RunState], list[ev.Event]]) -> None:
        # Decided once before the lease is taken, so that what cannot be recorded leaves no trace, and once under it.
        proven = _proven(await self.read(run_id))
        decide(proven.state)
        lease, proven = await self._take(proven)
        try:
            events = decide(proven.state)
            sink = _LeasedSink(self._store, lease)
            journal = RunJournal(proven.state, proven.head, sink, self._clock, self._entropy, driving=False)
            for event in events:
                journal.queue(Permit("settlement"), event)
            await journal.commit()
        finally:
            await self._store.release(lease)

    # Looking

    async def read(self, run_id: str, from_seq: int = 0) -> StoredRun:
        """The stored events of a run from a seq on, unproven.

        Raises:
            UnknownError: no such run.
        """
        stored = await self._store.read(run_id, from_seq)
        if stored is None:
            raise UnknownError("there is no such run", where=f"run {run_id}", next="`perdure list` shows what there is")
        return stored

    async def journal(self, run_id: str) -> tuple[Envelope, ...]:
        """A run's events, proven to be one unbroken chain.

        Raises:
            MalformedJournalError: they are not.
        """
        stored = await self.read(run_id)
        check_chain(run_id, stored.envelopes)
        return stored.envelopes

    async def state(self, run_id: str) -> RunState:
        """The fold of a run's proven events."""
        return _proven(await self.read(run_id)).state

    async def outcome(self, run_id: str) -> Outcome:
        """How a run ended, or where it stands."""
        return outcome_of(await self.state(run_id), run_id in self._driven)

    async def show(self, run_id: str) -> JsonObject:
        """The record of `perdure show --json`."""
        state = await self.state(run_id)
        summary = next((one for one in await self._store.runs() if one.run_id == run_id), None)
        return show_record(state, summary is not None and summary.held, 0 if summary is None else summary.epoch)

    async def runs(self) -> list[JsonObject]:
        """The records of `perdure list --json`, by the time the runs started."""
        return [await self._listed(summary) for summary in await self._store.runs()]

    async def _listed(self, summary: RunSummary) -> JsonObject:
        index = summary.index
        status, park = index.phase, index.park
        if index.phase in ("open", "parked"):
            status = "running" if summary.held else index.phase
        if status == "open":
            # A doubt or a crash loop is derived: only the journal of a run that nobody drives can say.
            state = await self.state(summary.run_id)
            found = state.park()
            status, park = status_of(state, False), None if found is None else found.kind
        return {
            "run_id": summary.run_id,
            "agent": index.agent,
            "status": status,
            "terminal_reason": index.terminal_reason,
            "park": None if status == "running" else park,
            "events": summary.events,
            "started_at": rfc3339(summary.started_at),
            "updated_at": rfc3339(summary.updated_at),
        }


class OpeningEngine:
    """What `Engine.open` returns: await it, or enter it."""

    def __init__(self, opened: Callable[[], Any]) -> None:
        self._opened = opened
        self._engine: Engine | None = None

    def __await__(self) -> Any:
        return self._opened().__await__()

    async def __aenter__(self) -> Engine:
        self._engine = await self._opened()
        return self._engine

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._engine is not None:
            await self._engine.close()


@dataclass(frozen=True)
class _Proven:
    """A stored run whose chain holds, folded."""

    state: RunState
    events: list[ev.Event]
    head: bytes
    key: bytes


def _proven(stored: StoredRun) -> _Proven:
    head = check_chain(stored.run_id, stored.envelopes)
    state, events = fold(stored.run_id, stored.envelopes)
    if not events:
        raise MalformedJournalError(stored.run_id, None, None, "the journal has no head")
    return _Proven(state, events, head, stored.key)


@dataclass(frozen=True)
class _Binding:
    """The model a drive asks."""

    client: ModelClient
    name: str
    own: bool
    """Made here from its name, and so closed here."""

    async def discard(self) -> None:
        """Gives the client back when no drive came of it."""
        if self.own:
            await self.client.close()


def _checked_id(run_id: str) -> str:
    if not _RUN_ID.fullmatch(run_id):
        raise UsageError(f"the run id {run_id!r:.80} cannot be used", next="use 1 to 64 of A-Z a-z 0-9 . _ -")
    return run_id


def _checked_labels(labels: dict[str, str]) -> dict[str, str]:
    problems = label_problems(labels)
    if problems:
        raise ConfigurationError("; ".join(problems), where="labels", next="correct them")
    return labels


def _bind(model: str | ModelClient | None, agent: Agent) -> _Binding:
    if model is None:
        raise ConfigurationError(
            "no model is named", where=f"agent {agent.name}", next="give the agent a model, or name one"
        )
    if isinstance(model, str):
        return _Binding(model_client(model, base_url=agent.base_url), model, own=True)
    return _Binding(model, model.target, own=False)


def _rebind(state: RunState, agent: Agent, model: str | ModelClient | None) -> _Binding:
    """The model to ask from here on: the one named now, else the agent's own client, else the one bound last."""
    if model is None:
        model = agent.model if agent.model is not None and not isinstance(agent.model, str) else state.model
    return _bind(model, agent)


def _recorded_agent(state: RunState) -> Agent:
    ref = state.started.agent_ref
    if ref is None:
        raise ConfigurationError(
            "the run does not say where its agent is", where=f"run {state.run_id}", next="name the agent"
        )
    return load_agent(ref)


def _must_be_unchanged(state: RunState, agent: Agent) -> None:
    recorded, present = state.started.agent.parts(), agent.spec.parts()
    changed = tuple(name for name, part in present.items() if recorded[name] != part)
    if changed:
        raise DefinitionChangedError(state.run_id, changed)


def _degradations(agent: Agent) -> list[ev.ExecutionDegraded]:
    if agent.limits.max_cost_microunits is None or agent.price is not None:
        return []
    summary = "a cost limit is set, but no price is known: cost_enforced is false and the limit is not applied"
    return [ev.ExecutionDegraded("cost_unenforced", summary)]
