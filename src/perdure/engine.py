"""The facade: start runs, bring them back, settle what they wait for. The only place that turns a latch into a return.

Owns which process drives a run, and for how long. How a run is driven is the runtime's; how it is stored is the
store's.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal, Self

from perdure import settlement
from perdure.agent import Agent
from perdure.binding import (
    KEY_BYTES,
    Binding,
    bind,
    checked_run_id,
    head_events,
    must_be_unchanged,
    rebind,
    rebound,
    recorded_agent,
)
from perdure.clock import SystemClock, SystemEntropy
from perdure.contracts.contract import JsonObject
from perdure.contracts.outcomes import Outcome
from perdure.errors import LeaseHeldError, PerdureError, UnknownError
from perdure.journal import events as ev
from perdure.journal.cursor import Cursor
from perdure.journal.envelope import FIRST_PREVIOUS, Envelope, check_chain
from perdure.journal.fold import RunState
from perdure.journal.render import outcome_of, rfc3339, show_record, status_of
from perdure.ports import Clock, Entropy, Lease, ModelClient, ModelEvent, RunSummary, Store, StoredRun
from perdure.release import VERSION
from perdure.run_ids import new_run_id
from perdure.runs import Driving, LeasedSink, Proven, Run, prove
from perdure.runtime.drive import Bindings, Drive
from perdure.runtime.ending import run_loop
from perdure.runtime.journaling import RunJournal, index_row
from perdure.runtime.left_behind import left_behind_by
from perdure.stores.url import open_store
from perdure.tools.output import check_schema

_log = logging.getLogger("perdure")

Cause = Literal["start", "resume", "recover"]
Observer = Callable[[str, str, ModelEvent], None]
"""Told of run id, call id and what streams; never journaled."""


class Engine:
    """Runs agents over one store. Open it with `async with Engine.open("sqlite:perdure.db") as engine`."""

    def __init__(self, store: Store, clock: Clock, entropy: Entropy) -> None:
        self._store, self._clock, self._entropy = store, clock, entropy
        self._driven: dict[str, Driving] = {}
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

    def driving(self, run_id: str) -> Driving | None:
        """The driving of a run by this process, while it lasts."""
        return self._driven.get(run_id)

    def stop(self) -> None:
        """Asks every drive of this process to park at its next safe point. The runs stay resumable."""
        for driving in self._driven.values():
            driving.drive.stopping.set()

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
        run_id = new_run_id(self._clock, self._entropy) if run_id is None else checked_run_id(run_id)
        bound = agent.model if model is None else model
        binding = bind(bound, agent)
        events = head_events(agent, binding, input, dict(labels or {}))
        state, key = RunState(run_id), self._entropy.draw(KEY_BYTES)
        sink = LeasedSink(self._store, Lease(run_id, 0))
        journal = RunJournal(state, FIRST_PREVIOUS, sink, self._clock, self._entropy)
        sealed = journal.seal_apart(*events)
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
        proven = await prove(self, run_id)
        if proven.state.end is not None:
            return Run(self, run_id, None)
        agent, binding = await _fitting(proven.state, agent, model)
        try:
            lease, proven = await self._take(proven)
        except BaseException:
            await binding.discard()
            raise
        if proven.state.end is not None:
            await self._store.release(lease)
            await binding.discard()
            return Run(self, run_id, None)
        sink = LeasedSink(self._store, lease)
        journal = RunJournal(proven.state, proven.head, sink, self._clock, self._entropy)
        return self._drive(
            agent, binding, sink, journal, proven.key, Cursor(proven.events), cause, *rebound(proven.state, binding)
        )

    async def must_be_resumable(self, run_id: str) -> None:
        """Raises what `resume` would be refused with for the agent or model the run names. Records nothing."""
        state = await self.state(run_id)
        if state.end is None:
            _, binding = await _fitting(state, None, None)
            await binding.discard()

    async def _take(self, proven: Proven) -> tuple[Lease, Proven]:
        """Takes the lease, and what was recorded between the first reading and that."""
        run_id = proven.state.run_id
        lease = await self._store.acquire(run_id)
        try:
            if (await self.read(run_id, proven.state.events, 1)).envelopes:
                proven = await prove(self, run_id)
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
        for summary in await self._store.runs(problems=problems):
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
        binding: Binding,
        sink: LeasedSink,
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
        driving = Driving(Drive(run_id, key, lease.epoch, spec, cursor, journal, bindings), own_model=binding.own)
        driving.drive.left_behind = left_behind_by(self._store.identity, run_id)
        driving.drive.cancel_requested = journal.state.cancel
        journal.on_failure, journal.on_durable = driving.fail, driving.durable
        driving.task = asyncio.create_task(self._to_the_end(driving, agent, lease), name=f"perdure {run_id}")
        # A refusal nobody waits for is in the run's state all the same.
        driving.task.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        self._driven[run_id] = driving
        return Run(self, run_id, driving)

    def _deltas_of(self, run_id: str) -> Callable[[str, ModelEvent], None] | None:
        observer = self.observer
        return None if observer is None else lambda call, event: observer(run_id, call, event)

    async def _to_the_end(self, driving: Driving, agent: Agent, lease: Lease) -> None:
        driving.begun = True
        try:
            await run_loop(driving.drive, agent.loop_function, driving.drive.state.started.input)
        finally:
            try:
                if driving.own_model:
                    await driving.drive.bindings.model.close()
            except Exception:  # noqa: BLE001 - logged
                # How the run stands is recorded; what a client makes of its closing cannot change that.
                _log.warning("closing the model of run %s failed", lease.run_id, exc_info=True)
            finally:
                try:
                    await self._store.release(lease)
                finally:
                    self._driven.pop(lease.run_id, None)

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
                driving.drive.journal.queue(event)
            await driving.drive.journal.commit()
            return
        await self._settle(run_id, lambda state: settlement.limit(state, changes, by))

    async def cancel(self, run_id: str, reason: str | None = None, *, by: str | None = None) -> None:
        """Ends a run as cancelled. One this process drives is told to stop, and has ended on return."""
        driving = self._driven.get(run_id)
        if driving is not None:
            driving.cancel(ev.CancelRequested(reason, by))
            await asyncio.wait({driving.task})
            if driving.drive.state.end is not None:
                return
        await self._settle(run_id, lambda state: settlement.cancel(state, reason, by))

    async def abandon(self, run_id: str, *, by: str | None = None) -> None:
        """Gives a run up: it ends, claims no answer, and names the calls whose effect may have happened."""
        await self._settle(run_id, lambda state: settlement.abandon(state, by))

    async def _settle(self, run_id: str, decide: Callable[[RunState], list[ev.Event]]) -> None:
        # Decided once before the lease is taken, so that what cannot be recorded leaves no trace, and once under it.
        proven = await prove(self, run_id)
        decide(proven.state)
        lease, proven = await self._take(proven)
        try:
            events = decide(proven.state)
            sink = LeasedSink(self._store, lease)
            journal = RunJournal(proven.state, proven.head, sink, self._clock, self._entropy, driving=False)
            for event in events:
                journal.queue(event)
            await journal.commit()
        finally:
            await self._store.release(lease)

    # Looking

    async def read(self, run_id: str, from_seq: int = 0, most: int | None = None) -> StoredRun:
        """The stored events of a run from a seq on, at most so many, unproven.

        Raises:
            UnknownError: no such run.
        """
        stored = await self._store.read(run_id, from_seq, most)
        if stored is None:
            raise _no_such_run(run_id)
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
        return (await prove(self, run_id)).state

    async def outcome(self, run_id: str) -> Outcome:
        """How a run ended, or where it stands."""
        return outcome_of(await self.state(run_id), run_id in self._driven)

    async def show(self, run_id: str) -> JsonObject:
        """The record of `perdure show --json`."""
        state, summary = await self._moment(run_id)
        return show_record(state, summary.held, summary.epoch)

    async def _moment(self, run_id: str) -> tuple[RunState, RunSummary]:
        """The run's state and who holds it, of one moment: read again while the run changes hands in between."""
        before = await self._summary(run_id)
        while True:
            state = await self.state(run_id)
            after = await self._summary(run_id)
            if (before.held, before.epoch) == (after.held, after.epoch):
                return state, after
            before = after

    async def is_held(self, run_id: str) -> bool:
        """Whether a living driver holds the run."""
        return (await self._summary(run_id)).held

    async def _summary(self, run_id: str) -> RunSummary:
        found = await self._store.runs(run_id)
        if not found:
            raise _no_such_run(run_id)
        return found[0]

    async def runs(self, *, problems: dict[str, PerdureError] | None = None) -> list[JsonObject]:
        """The records of `perdure list --json`, by the time the runs started.

        Raises:
            RefusedError: a run is damaged. With `problems` that is put there instead, by run id, and the other runs are
                listed all the same.
        """
        records = []
        for summary in await self._store.runs(problems=problems):
            try:
                records.append(await self._listed(summary))
            except PerdureError as error:
                if problems is None:
                    raise
                problems[summary.run_id] = error
        return records

    async def _listed(self, summary: RunSummary) -> JsonObject:
        index = summary.index
        status, park = index.phase, index.park
        if status == "open" and not summary.held:
            # A doubt or a crash loop is derived: only the journal of a run that nobody drives can say.
            state, summary = await self._moment(summary.run_id)
            index, found = summary.index, state.park()
            status, park = status_of(state, summary.held), None if found is None else found.kind
        elif status in ("open", "parked") and summary.held:
            status = "running"
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


async def _fitting(state: RunState, agent: Agent | None, model: str | ModelClient | None) -> tuple[Agent, Binding]:
    """The agent to go on with, proven to be the one the run started with, and the model it asks."""
    agent = recorded_agent(state) if agent is None else agent
    must_be_unchanged(state, agent)
    return agent, await rebind(state, agent, model)


def _no_such_run(run_id: str) -> UnknownError:
    return UnknownError("there is no such run", where=f"run {run_id}", next="`perdure list` shows what there is")


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
