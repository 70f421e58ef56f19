"""What is said of a run to a person: its events as they come, how it ended, what it waits for, what a proof found."""

from typing import TYPE_CHECKING, Any

from perdure.cli import output
from perdure.contracts.contract import JsonObject
from perdure.contracts.outcomes import Outcome, ParkReport

if TYPE_CHECKING:
    from perdure.journal.envelope import Envelope
    from perdure.stores.verify import VerifyReport


def progress(envelope: "Envelope", *, named: bool) -> None:
    """One event, as soon as it is durable; `named` says of which run, where several are driven."""
    from perdure.journal.render import line

    name = f"{envelope.run_id}  " if named else ""
    output.note(output.escaped(name + line(envelope)))


def outcome(found: Outcome, *, ref: str | None, stopped: bool, named: bool) -> None:
    """How a run ended, or what it waits for. An answer stands alone on standard output, so that it can be piped on.
    `ref` is where the run says its agent is."""
    from perdure.journal.render import resume_command

    run = f"run {output.escaped(found.run_id)}"
    if found.park is not None:
        output.say(f"{run} parked: {park(found.park)}")
    elif found.status == "completed":
        if named or output.watched():
            output.note(f"{run} completed ({found.assurance}): {_used(found)}")
        output.say(output.escaped_lines(found.answer or ""))
    elif found.terminal_reason is not None:
        output.say(f"{run} {found.status} ({found.outcome}, {found.terminal_reason})")
        output.say(output.escaped_lines(found.answer or ""))
    else:
        why = "stopped at a safe point" if stopped else "not driven any more"
        output.say(f"{run} {why}; it can be resumed\n  next: {output.escaped(resume_command(found.run_id, ref))}")


def _used(found: Outcome) -> str:
    turns, calls = found.usage.model_turns, found.usage.tool_calls
    return f"{output.counted(turns, 'model turn')}, {output.counted(calls, 'tool call')}"


def park(report: ParkReport) -> str:
    """What a run waits for and the command that settles it, over several lines."""
    lines = [report.kind, f"  waits for: {output.escaped(waits_for(report.kind, report.call, report.detail))}"]
    lines.append(f"  next: {output.escaped(report.next)}")
    return "\n".join(lines)


def waits_for(kind: str, call: str | None, detail: JsonObject) -> str:
    """What a park waits for, in words."""
    match kind:
        case "budget_exceeded":
            used, need = detail["used"], detail["need"]
            return f"a higher {detail['limit']}: {detail['max']} allowed, {used} used, {need} more needed at {call}"
        case "suspended":
            return f"an answer at {call} ({detail['kind']}): {detail['reason']}"
        case "sleeping":
            return f"{detail['wake_at']} to come"
        case "needs_reconciliation":
            return f"somebody to say whether {call} ({detail['tool']} {output.json_text(detail['arguments'])}) happened"
        case "crash_loop":
            return f"somebody to look: {detail['drives']} drives in a row ended without anything new"
        case _:
            return output.json_text(detail)


def nothing_due(*, as_json: bool) -> None:
    """There was nothing to recover."""
    if not as_json:
        output.say("no run is due")


def settled(shown: JsonObject, said: str) -> None:
    """A settling verb has recorded something of the run that is shown; one that has not ended needs another command."""
    from perdure.journal.render import resume_command

    run_id, ref, park = shown["run_id"], shown["agent"]["ref"], shown["park"]
    output.say(f"run {output.escaped(run_id)}: {output.escaped(said)}")
    if shown["terminal_reason"] is None:
        going_on = resume_command(run_id, ref) if park is None else park["next"]
        output.say(f"  next: {output.escaped(going_on)}")


def verification(report: "VerifyReport", *, as_json: bool) -> None:
    """What a proof found: on standard error what is wrong, on standard output, for a person, what is proven."""
    bad = report.first_bad
    if bad is not None:
        parts: list[Any] = [f"run {bad.run_id}"] if bad.run_id is not None else []
        parts += [f"event {bad.seq}"] if bad.seq is not None else []
        parts += [f"({bad.kind})"] if bad.kind is not None else []
        place = f"{' '.join(parts)}: " if parts else ""
        output.note(f"not proven: {output.escaped(place + bad.problem)}")
    if report.torn:
        from perdure.stores.wal import torn_end

        output.note(torn_end(report.torn))
    for projection in report.projections:
        output.note(f"differs from what it is derived from: {output.escaped(projection)}")
    if report.ok and not as_json:
        proven = f"{output.counted(report.runs, 'run')}, {output.counted(report.events, 'event')}"
        output.say(f"proven: {proven}\nhead: {report.head}")
