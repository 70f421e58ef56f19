"""The verb `watch`: a run's events as they become durable, whoever drives it. Takes no lease and writes nothing."""

import asyncio
import signal
from typing import TYPE_CHECKING

from perdure.cli import failure, output, reports
from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure.journal.envelope import Envelope
    from perdure.journal.fold import RunState

_LOOK_S = 0.15
"""Pause between two looks at the store. A look costs one indexed read."""
COMPLETED, UNSUCCESSFUL = 0, 1


async def watch_run(store: str, run_id: str, *, from_seq: int, as_json: bool) -> int:
    """Prints events until the run has ended. Returns 0 for one that completed, 1 for every other end, 130 when left."""
    from perdure.engine import Engine
    from perdure.runs import Following

    if from_seq < 0:
        raise UsageError(f"the first event is {from_seq}", where="--from", next="give 0 or more")
    leaving = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, leaving.set)
    async with Engine.open(store, create=False, read_only=True) as engine:
        following, said = Following(run_id), 0
        while True:
            news = (await engine.read(run_id, following.state.events)).envelopes
            following.take(news)
            for envelope in news:
                if envelope.seq >= from_seq:
                    _print(envelope, as_json=as_json)
            state = following.state
            if state.end is not None:
                _must_have(state, from_seq)
                return COMPLETED if state.end.status == "completed" else UNSUCCESSFUL
            if not news and said != state.events and not await engine.is_held(run_id):
                if (await engine.read(run_id, state.events)).envelopes:
                    continue  # its last events came before the lease was given back
                said = state.events
                _say_waiting(state)
            if output.unread():
                return failure.INTERRUPTED
            try:
                await asyncio.wait_for(leaving.wait(), _LOOK_S)
            except TimeoutError:
                continue
            output.note(f"left; rejoin with: perdure watch {output.escaped(run_id)} --from {following.state.events}")
            return failure.INTERRUPTED


def _print(envelope: "Envelope", *, as_json: bool) -> None:
    from perdure.journal.render import history_record, line

    if as_json:
        output.say_json(history_record(envelope))
    else:
        output.say(output.escaped(line(envelope)))


def _say_waiting(state: "RunState") -> None:
    """Says what a run waits for that nobody drives; watching goes on."""
    from perdure.journal.render import park_report, resume_command

    park, name, ref = state.park(), output.escaped(state.run_id), state.started.agent_ref
    if park is not None:
        output.note(f"run {name} parked: {reports.park(park_report(state, park))}")
    else:
        output.note(f"run {name}: nobody drives it\n  next: {output.escaped(resume_command(state.run_id, ref))}")


def _must_have(state: "RunState", seq: int) -> None:
    if seq > state.events:
        raise UsageError(
            f"the run has ended and has {output.counted(state.events, 'event')}",
            where=f"run {state.run_id}, --from {seq}",
            next=f"give 0 to {state.events}",
        )
