"""Journals for people and programs: the records of `show` and `history`, one line an event, and the outcome. Pure
projections.

The command line, servers and inspectors all use these, so that a run reads the same everywhere.
"""

from datetime import UTC, datetime, timedelta

import msgspec

from perdure.contracts.contract import JsonObject
from perdure.contracts.outcomes import Consumption, Outcome, ParkReport
from perdure.journal import events as ev
from perdure.journal.envelope import Envelope
from perdure.journal.fold import OpenCall, Park, RunState

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LINE = 160
"""Characters of detail in a one-line rendering."""


def rfc3339(ns: int) -> str:
    """UTC nanoseconds as RFC 3339 with nine decimals."""
    seconds, rest = divmod(ns, 10**9)
    return f"{(_EPOCH + timedelta(seconds=seconds)).strftime('%Y-%m-%dT%H:%M:%S')}.{rest:09d}Z"


def status_of(state: RunState, held: bool) -> str:
    """`running`, `idle`, `parked`, or how the run ended."""
    if state.end is not None:
        return state.end.status
    if held:
        return "running"
    return "parked" if state.park() is not None else "idle"


def history_record(envelope: Envelope) -> JsonObject:
    """One event as `history --json` gives it; the payload is null once erased."""
    return {
        "run_id": envelope.run_id,
        "seq": envelope.seq,
        "kind": envelope.kind,
        "recorded_at": rfc3339(envelope.recorded_at),
        "active_ns": envelope.active_ns,
        "schema_version": envelope.schema_version,
        "payload": None if envelope.payload is None else msgspec.json.decode(envelope.payload),
        "digest": envelope.digest.hex(),
    }


def consumption(state: RunState) -> Consumption:
    """What the run used."""
    spent, price = state.spent, state.started.agent.policy.price
    return Consumption(
        model_turns=spent.model_turns,
        tool_calls=spent.tool_calls,
        input_tokens=spent.input_tokens,
        output_tokens=spent.output_tokens,
        cached_tokens=spent.cached_tokens,
        reasoning_tokens=spent.reasoning_tokens,
        cost_microunits=spent.cost,
        currency=None if price is None else price.currency,
        active_ms=spent.active_ns // 1_000_000,
        estimated=spent.estimated,
    )


def park_report(state: RunState, park: Park) -> ParkReport:
    """A park with the command that settles it."""
    detail = dict(park.detail)
    if "wake_at" in detail:
        detail["wake_at"] = rfc3339(detail["wake_at"])
    return ParkReport(park.kind, park.call, rfc3339(park.since), detail, _next_command(state, park))


AGENT_OPTION = "--agent FILE_OR_MODULE:ATTRIBUTE"
"""What names the agent of a run that does not say where its agent is."""


def resume_command(run_id: str, ref: str | None) -> str:
    """The command that drives a run on; `ref` is where the run says its agent is."""
    return f"perdure resume {run_id}" + (f" {AGENT_OPTION}" if ref is None else "")


def _next_command(state: RunState, park: Park) -> str:
    run_id, ref = state.run_id, state.started.agent_ref
    resume = resume_command(run_id, ref)
    match park.kind:
        case "budget_exceeded":
            needed = park.detail["used"] + park.detail["need"]
            settle = f"perdure limit {run_id} {park.detail['limit']}={needed}"
        case "suspended":
            settle = f"perdure answer {run_id} {park.call} JSON"
        case "needs_reconciliation":
            settle = f"perdure resolve {run_id} {park.call} (--happened JSON | --did-not-happen | --failed TEXT)"
        case _:
            return resume
    # The commands that settle take no agent, so where one must be named, resuming is a command of its own.
    return f"{settle}; then {resume}" if ref is None else f"{settle} --resume"


def outcome_of(state: RunState, held: bool = False) -> Outcome:
    """The run's end, or where it stands."""
    park, end = state.park(), state.end
    return Outcome(
        run_id=state.run_id,
        status=status_of(state, held),
        outcome=None if end is None else end.outcome,
        terminal_reason=None if end is None else end.terminal_reason,
        assurance="unverified" if end is None else end.assurance,
        output=state.proposal if end is not None and end.outcome == "success" else None,
        answer=None if end is None else end.answer,
        evidence=(),
        usage=consumption(state),
        park=None if park is None or held else park_report(state, park),
    )


def show_record(state: RunState, held: bool, epoch: int) -> JsonObject:
    """The run as `show --json` gives it."""
    head, outcome = state.started, msgspec.to_builtins(outcome_of(state, held))
    # The names of an outcome, with what only a look at the run can say.
    return {
        **outcome,
        "agent": {"name": head.agent.name, "ref": head.agent_ref, "digest": head.agent.digest()},
        "limits": _limits(state),
        "doubts": [] if held else [_doubt(call) for call in state.doubts()],
        "open_calls": [
            {"call": call.call, "tool": call.tool, "attempt": call.attempt, "since": rfc3339(call.since)}
            for call in state.open.values()
        ],
        "degradations": [{"code": one.code, "summary": one.summary} for one in state.degradations],
        "events": state.events,
        "drives": state.drives,
        "model": state.model,
        "labels": head.labels,
        "started_at": rfc3339(state.started_at),
        "updated_at": rfc3339(state.updated_at),
        "lease": {"held": held, "epoch": epoch},
    }


def _doubt(call: OpenCall) -> JsonObject:
    return {"call": call.call, "tool": call.tool, "arguments": call.arguments, "key": call.key}


def _limits(state: RunState) -> JsonObject:
    spent = state.spent
    known = spent.input_tokens is not None and spent.output_tokens is not None
    used = {
        "max_model_turns": spent.model_turns,
        "max_tool_calls": spent.tool_calls,
        "max_model_repairs": spent.model_repairs,
        "max_wall_time_ms": spent.active_ns // 1_000_000,
        "max_total_tokens": (spent.input_tokens or 0) + (spent.output_tokens or 0) if known else None,
        "max_cost_microunits": spent.cost,
        "deadline_seconds": (state.updated_at - state.started_at) // 10**9,
    }
    return {
        name: {"limit": limit, "used": used.get(name)}
        for name, limit in state.limits.items()
        if limit is not None and name in used
    }


def line(envelope: Envelope) -> str:
    """One event on one line for a reader."""
    if envelope.payload is None:
        return f"{envelope.seq:>4}  {envelope.kind}  (payload erased)"
    detail = " ".join(_detail(ev.decode(envelope)).split())
    shortened = detail if len(detail) <= _LINE else detail[: _LINE - 1] + "…"
    return f"{envelope.seq:>4}  {rfc3339(envelope.recorded_at)[11:23]}  {envelope.kind:<22} {shortened}".rstrip()


def _detail(event: ev.Event) -> str:
    match event:
        case ev.RunStarted():
            return f"{event.agent.name} with {event.model}: {_json(event.input)}"
        case ev.DriveStarted():
            return f"epoch {event.epoch}, {event.cause}"
        case ev.ModelCallRequested():
            return f"{event.call} to {event.target}" + (f" after {event.notice.kind}" if event.notice else "")
        case ev.ModelCallCompleted():
            asked = ", ".join(f"{call.name}({_json(call.arguments)})" for call in event.turn.calls)
            return f"{event.call} {event.turn.stop}: {asked or event.turn.text}"
        case ev.ToolCallRequested():
            return f"{event.call} {event.tool}({_json(event.arguments)}) as {event.effect}"
        case ev.ToolCallCompleted():
            return f"{event.call} -> {event.observation if event.observation is not None else _json(event.output)}"
        case ev.LateResultObserved():
            ended = f"{event.reason}: {event.message}" if event.reason else f"-> {_json(event.output)}"
            return f"{event.call} attempt {event.attempt} {ended}"
        case ev.ToolCallFailed() | ev.ModelCallFailed():
            return f"{event.call} {event.reason}: {event.message}"
        case ev.ToolCallRefused():
            return f"{event.call} {event.tool} {event.reason}: {event.observation}"
        case ev.RunCompleted() | ev.RunFailed():
            return f"{event.terminal_reason}: {event.answer}"
        case _:
            fields = msgspec.to_builtins(event)
            return ", ".join(f"{name} {_json(value)}" for name, value in fields.items())


def _json(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode("utf-8")
