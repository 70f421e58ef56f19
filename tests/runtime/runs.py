"""Short runs for tests: an agent over scripted replies, driven over a list or a store, and what its journal holds."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from perdure.agent import Agent
from perdure.embedded import EmbeddedRun, run_embedded
from perdure.engine import Engine, Run
from perdure.journal import events as ev
from perdure.journal.envelope import Envelope, seal
from perdure.journal.fold import RunState, fold
from perdure.journal.transcript import ResultsEntry, TurnEntry, UserEntry
from perdure.ports import ModelClient
from perdure.testing.clocks import ManualClock, SeededEntropy
from perdure.testing.replies import Reply
from perdure.testing.scripted import ScriptedModel

RUN = "run-1"


def agent_of(*tools: Any, **options: Any) -> Agent:
    return Agent(name="tester", instructions="Do it.", tools=tools, **options)


def script(*replies: Reply) -> ScriptedModel:
    return ScriptedModel(replies, chunk=0)


async def embedded(
    agent: Agent, model: ModelClient, *, recorded: EmbeddedRun | None = None, clock: ManualClock | None = None
) -> EmbeddedRun:
    """A drive over a list, under a clock that stands still unless it sleeps."""
    return await run_embedded(
        agent,
        "the task",
        model=model,
        run_id=RUN,
        recorded=recorded,
        clock=clock or ManualClock(),
        entropy=SeededEntropy(),
    )


def cut(run: EmbeddedRun, kept: int) -> EmbeddedRun:
    """The run as it was after its first events."""
    return replace(run, envelopes=run.envelopes[:kept])


def extended(run: EmbeddedRun, *events: ev.Event) -> EmbeddedRun:
    """The run with further events, as somebody recorded them while nobody drove it."""
    chain = list(run.envelopes)
    for event in events:
        last = chain[-1]
        payload = ev.payload_bytes(event)
        chain.append(
            seal(last.digest, RUN, len(chain), event.event_kind, last.recorded_at, last.active_ns, bytes(16), payload)
        )
    return replace(run, envelopes=tuple(chain))


def before(run: EmbeddedRun, kind: str, number: int = 0) -> int:
    """The place of the event of that kind, counted from 0, which is how many events come before it."""
    return [envelope.seq for envelope in run.envelopes if envelope.kind == kind][number]


def kinds(envelopes: Sequence[Envelope]) -> list[str]:
    return [envelope.kind for envelope in envelopes]


def count(envelopes: Sequence[Envelope], kind: str) -> int:
    return Counter(kinds(envelopes))[kind]


def decoded(envelopes: Sequence[Envelope]) -> list[ev.Event]:
    return [ev.decode(envelope) for envelope in envelopes]


def only(envelopes: Sequence[Envelope], kind: type[Any]) -> list[Any]:
    """The events of one kind."""
    return [event for event in decoded(envelopes) if isinstance(event, kind)]


def state_of(envelopes: Sequence[Envelope]) -> RunState:
    return fold(envelopes[0].run_id, envelopes)[0]


def observed(envelopes: Sequence[Envelope]) -> dict[str, str]:
    """What the model reads of each call that was refused or failed, or the value it got."""
    shown: dict[str, str] = {}
    for event in decoded(envelopes):
        if isinstance(event, ev.ToolCallRefused | ev.ToolCallFailed):
            shown[event.call] = event.observation
        elif isinstance(event, ev.ToolCallCompleted):
            shown[event.call] = event.observation if event.observation is not None else repr(event.output)
    return shown


def asked(model: ScriptedModel) -> list[list[str]]:
    """Each request of a model, as one line an entry."""
    return [[_line(entry) for entry in request.transcript] for request in model.requests]


def _line(entry: Any) -> str:
    if isinstance(entry, UserEntry):
        return f"user: {entry.text}"
    if isinstance(entry, TurnEntry):
        return f"turn {entry.id}: {entry.turn.text}{[call.name for call in entry.turn.calls]}"
    assert isinstance(entry, ResultsEntry)
    return "results: " + " | ".join(f"{one.call} {one.tool} {one.status}: {one.text}" for one in entry.observations)


def opened(directory: Path, clock: Any = None, **options: Any) -> Any:
    """An engine over a store file of its own in the directory."""
    return Engine.open(f"sqlite:{directory / 'perdure.db'}", clock=clock, **options)


async def started(engine: Engine, agent: Agent, model: ModelClient) -> Run:
    return await engine.start(agent, "the task", run_id=RUN, model=model)
