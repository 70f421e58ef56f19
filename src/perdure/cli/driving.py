"""The verbs that drive: run, resume, recover. Each drives in the foreground until the run ends, parks or is stopped."""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from perdure.cli import failure, output, reports
from perdure.cli.stopping import Stopping
from perdure.contracts.contract import JsonValue
from perdure.contracts.outcomes import Outcome
from perdure.errors import LeaseHeldError, PerdureError

if TYPE_CHECKING:
    from perdure.engine import Engine
    from perdure.runs import Run

COMPLETED, UNSUCCESSFUL, PARKED = 0, 1, 3
_WORST_FIRST = (failure.INTERRUPTED, 4, 2, UNSUCCESSFUL, PARKED, COMPLETED)
"""Which exit code wins when several runs came to different ends: what an operator must look at first."""


async def run_agent(
    store: str,
    ref: str,
    task: JsonValue,
    *,
    run_id: str | None,
    model: str | None,
    labels: Mapping[str, str],
    as_json: bool,
    verbose: bool,
) -> int:
    """Starts a run of an agent and drives it. Returns the exit code."""
    from perdure.agent_file import load_agent
    from perdure.binding import bind, checked_run_id
    from perdure.engine import Engine

    with Stopping() as stopping:
        # First, so that a bad agent, model or id leaves no store behind.
        agent = load_agent(ref)
        if run_id is not None:
            checked_run_id(run_id)
        await bind(model or agent.model, agent).discard()
        async with Engine.open(store) as engine:
            stopping.of(engine)
            run = await engine.start(agent, task, run_id=run_id, model=model, labels=labels)
            return await _to_the_end(engine, run, stopping, as_json=as_json, progress=verbose or output.watched())


async def resume_run(
    store: str, run_id: str, *, ref: str | None, model: str | None, as_json: bool, verbose: bool
) -> int:
    """Drives a run on; of one that ended only the outcome is printed. Returns the exit code."""
    from perdure.agent_file import load_agent
    from perdure.engine import Engine

    progress = verbose or output.watched()
    with Stopping() as stopping:
        async with Engine.open(store, create=False) as engine:
            stopping.of(engine)
            recorded = await engine.state(run_id) if ref is not None or progress else None
            # An ended run needs no agent: it may be gone by now.
            agent = None if ref is None or recorded is None or recorded.end is not None else load_agent(ref)
            run = await engine.resume(run_id, agent, model=model)
            seen = 0 if recorded is None else recorded.events
            return await _to_the_end(engine, run, stopping, as_json=as_json, progress=progress, from_seq=seen)


async def recover_runs(store: str, *, ref: str | None, as_json: bool, verbose: bool) -> int:
    """Drives all runs that are due, together. Returns the worst of their exit codes."""
    from perdure.agent_file import load_agent
    from perdure.engine import Engine

    with Stopping() as stopping:
        agent = None if ref is None else load_agent(ref)
        async with Engine.open(store, create=False) as engine:
            stopping.of(engine)
            progress = verbose or output.watched()
            seen = {one["run_id"]: one["events"] for one in await engine.runs(problems={})} if progress else {}
            runs, problems = await engine.recover(agent)
            codes = await asyncio.gather(
                *(
                    _recovered(engine, run, stopping, as_json=as_json, progress=progress, from_seq=seen.get(run.id, 0))
                    for run in runs
                )
            )
            codes += [_refused(run_id, error, as_json=as_json) for run_id, error in problems.items()]
            if not codes:
                reports.nothing_due(as_json=as_json)
            return next((code for code in _WORST_FIRST if code in codes), COMPLETED)


def _refused(run_id: str, error: PerdureError, *, as_json: bool) -> int:
    if isinstance(error, LeaseHeldError):
        # Between the look and the lease another driver was quicker: the run is in good hands.
        output.note(f"run {output.escaped(run_id)}: another driver has it")
        return COMPLETED
    return failure.report(error, as_json=as_json)


async def _recovered(
    engine: "Engine", run: "Run", stopping: Stopping, *, as_json: bool, progress: bool, from_seq: int
) -> int:
    try:
        return await _to_the_end(
            engine, run, stopping, as_json=as_json, progress=progress, from_seq=from_seq, several=True
        )
    except PerdureError as error:
        return _refused(run.id, error, as_json=as_json)


async def _to_the_end(
    engine: "Engine",
    run: "Run",
    stopping: Stopping,
    *,
    as_json: bool,
    progress: bool,
    from_seq: int = 0,
    several: bool = False,
) -> int:
    stopping.again()  # a signal may have come before the run was driven
    if progress:
        async for envelope in run.events(from_seq):
            reports.progress(envelope, named=several)
    outcome = await _outcome(engine, run)
    stopped = stopping.requested and outcome.status == "idle"
    if as_json:
        output.say_json(await engine.show(run.id))
    else:
        idle = outcome.terminal_reason is None and outcome.park is None
        ref = (await engine.state(run.id)).started.agent_ref if idle else None  # a park names its own command
        reports.outcome(outcome, ref=ref, stopped=stopped, named=several)
    return failure.INTERRUPTED if stopped else exit_code(outcome)


async def _outcome(engine: "Engine", run: "Run") -> Outcome:
    try:
        return await run.wait()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # The loop cancelled itself, which ends its drive and nothing else.
        return await engine.outcome(run.id)


def exit_code(outcome: Outcome) -> int:
    """0 completed, 3 parked, 1 every other end."""
    if outcome.status == "parked":
        return PARKED
    return COMPLETED if outcome.status == "completed" else UNSUCCESSFUL
