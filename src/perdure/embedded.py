"""The same kernel over a plain list: for embedding an agent where durability is somebody else's, and for tests.

Nothing outlives the process, but a list of events kept by the caller can be resumed from, cut anywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from perdure.agent import Agent
from perdure.binding import KEY_BYTES, bind, head_events, must_be_unchanged, rebind, rebound
from perdure.clock import SystemClock, SystemEntropy
from perdure.contracts.outcomes import Outcome
from perdure.journal import events as ev
from perdure.journal.cursor import Cursor
from perdure.journal.envelope import FIRST_PREVIOUS, Envelope, check_chain
from perdure.journal.fold import RunState, fold
from perdure.journal.render import outcome_of
from perdure.ports import Clock, Entropy, ModelClient
from perdure.release import VERSION
from perdure.run_ids import new_run_id
from perdure.runtime.drive import Bindings, Drive
from perdure.runtime.ending import run_loop
from perdure.runtime.journaling import ListJournal, RunJournal
from perdure.tools.output import check_schema


@dataclass(frozen=True)
class EmbeddedRun:
    """A run in memory: where it stands, its events, and the key its digests were made with."""

    outcome: Outcome
    envelopes: tuple[Envelope, ...]
    key: bytes


async def run_embedded(
    agent: Agent,
    input: object,
    *,
    model: str | ModelClient | None = None,
    run_id: str | None = None,
    recorded: EmbeddedRun | None = None,
    clock: Clock | None = None,
    entropy: Entropy | None = None,
) -> EmbeddedRun:
    """Drives an agent over a list until it ends or parks. `recorded` is a run to go on with; its input wins.

    Raises:
        RefusedError: the recorded events are damaged, the agent asks for something else than they hold, or its loop
            stopped inside a call.
    """
    clock, entropy = clock or SystemClock(), entropy or SystemEntropy()
    sink = ListJournal()
    if recorded is None:
        binding = bind(model if model is not None else agent.model, agent)
        key, state = entropy.draw(KEY_BYTES), RunState(run_id or new_run_id(clock, entropy))
        journal = RunJournal(state, FIRST_PREVIOUS, sink, clock, entropy)
        sink.envelopes.extend(journal.seal_apart(*head_events(agent, binding, input)))
        events: Sequence[ev.Event] = ()
    else:
        key, sink.envelopes = recorded.key, list(recorded.envelopes)
        id = recorded.outcome.run_id
        digest = check_chain(id, sink.envelopes)
        state, events = fold(id, sink.envelopes)
        must_be_unchanged(state, agent)
        binding = await rebind(state, agent, model)
        journal = RunJournal(state, digest, sink, clock, entropy)
    cause: Literal["start", "resume"] = "start" if recorded is None else "resume"
    journal.begin_drive(ev.DriveStarted(state.drives + 1, VERSION, cause), *rebound(state, binding))
    bindings = Bindings(binding.client, agent.tools_by_name, clock, entropy, agent.answer_check, check_schema)
    drive = Drive(state.run_id, key, state.drives + 1, state.started.agent, Cursor(events), journal, bindings)
    drive.cancel_requested = state.cancel
    try:
        if state.end is None:
            await run_loop(drive, agent.loop_function, state.started.input)
    finally:
        await binding.discard()
    return EmbeddedRun(outcome_of(state), tuple(sink.envelopes), key)
