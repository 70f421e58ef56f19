"""What a killed and resumed run comes to, read from its journal, the service's database and the model's log."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure.examples.job_recovery.stage import Stage

JsonLine = dict[str, Any]

_COMPLETIONS = ("model_call_completed", "tool_call_completed", "tool_call_failed", "tool_call_refused")


@dataclass(frozen=True)
class Journal:
    """A run's history as `perdure history --json` prints it."""

    events: tuple[JsonLine, ...]

    def calls(self, kind: str) -> list[str]:
        """The calls that events of a kind name, in order."""
        return [event["payload"]["call"] for event in self.events if event["kind"] == kind]

    def tool_of(self, call: str) -> str:
        """The tool of a call whose intent is recorded; `model` for any other call."""
        for event in self.events:
            if event["kind"] == "tool_call_requested" and event["payload"]["call"] == call:
                return str(event["payload"]["tool"])
        return "model"

    def dangling(self) -> list[str]:
        """The calls with an intent and no completion, tool calls and model calls."""
        settled = {call for kind in (*_COMPLETIONS, "model_call_failed") for call in self.calls(kind)}
        asked = [call for kind in ("model_call_requested", "tool_call_requested") for call in self.calls(kind)]
        return [call for call in asked if call not in settled]

    def replayed(self) -> Counter[str]:
        """How often the model and each tool had completed."""
        return Counter(self.tool_of(call) for kind in _COMPLETIONS for call in self.calls(kind))

    def since(self, seq: int) -> "Journal":
        """The events from a position on."""
        return Journal(self.events[seq:])


@dataclass(frozen=True)
class Findings:
    """The last line of `perdure demo --json`, in its order."""

    run_id: str
    seed: int
    scenario: str
    exit_signal: int | None
    """The signal that ended the first process; None: it ended by itself."""
    dangling_at_kill: str | None
    """The tool of the call that was open; `model` for a model call; None: nothing was open."""
    model_calls: int
    """Completed ones in the whole journal."""
    model_calls_repeated: int | None
    """Completed before the kill and asked again all the same; None with a real model, which keeps no log for us."""
    service_posts: int
    distinct_keys: int
    effects: int
    status: str
    terminal_reason: str | None
    report_status: str | None


def gather(
    stage: Stage,
    run_id: str,
    exit_signal: int | None,
    before: Journal,
    asked_before: int,
    after: Journal,
    shown: JsonLine,
) -> Findings:
    """Puts the facts together.

    Args:
        stage: where the run took place.
        run_id: the run.
        exit_signal: what ended its first process.
        before: the journal as the killed process left it.
        asked_before: how many requests the stand-in had been sent by then.
        after: the journal at the end.
        shown: what `perdure show --json` says at the end.
    """
    dangling = before.dangling()
    counts = stage.jobs.counts()
    output = shown.get("output")
    return Findings(
        run_id=run_id,
        seed=stage.seed,
        scenario=stage.scenario,
        exit_signal=exit_signal,
        dangling_at_kill=before.tool_of(dangling[-1]) if dangling else None,
        model_calls=len(after.calls("model_call_completed")),
        model_calls_repeated=_repeated(stage.requests, asked_before, before) if stage.base_url else None,
        service_posts=counts.posts,
        distinct_keys=counts.distinct_keys,
        effects=counts.effects,
        status=shown["status"],
        terminal_reason=shown["terminal_reason"],
        report_status=output.get("status") if isinstance(output, dict) else None,
    )


def requests_so_far(path: Path) -> list[JsonLine]:
    """The lines of the stand-in's request log; none when it was never asked."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _repeated(path: Path, asked_before: int, before: Journal) -> int:
    """`reply` in the log is the number of turns a request carried, so the turn it asked for: one that had completed is
    asked for again."""
    completed = len(before.calls("model_call_completed"))
    asked_since = {line["reply"] for line in requests_so_far(path)[asked_before:]}
    return sum(1 for turn in range(completed) if turn in asked_since)


def shortfalls(stage: Stage, findings: Findings, report: object) -> list[str]:
    """Where the end differs from the scenario's right end; empty when all is as it must be."""
    plot, counts = stage.plot, stage.jobs.counts()
    open_tool = {"after_commit": "job_retry", "logs": "job_logs", "result": "job_result"}[plot.hold]
    expected: Sequence[tuple[str, object, object]] = (
        ("signal that ended the first process", findings.exit_signal, 9),
        ("open call at the kill", findings.dangling_at_kill, open_tool),
        ("completed model calls asked again", findings.model_calls_repeated or 0, 0),
        ("effects in the service's database", findings.effects, plot.effects),
        ("idempotency keys", findings.distinct_keys, plot.effects),
        ("run status", findings.status, "completed"),
        ("report status", findings.report_status, plot.report_status),
        ("jobs touched", counts.jobs_touched, (stage.world.job_id,) if plot.effects else ()),
        ("total in the report", _total(report), stage.world.total_cents if plot.report_status == "completed" else None),
    )
    return [f"{what}: {found}, expected {right}" for what, found, right in expected if found != right]


def _total(report: object) -> object:
    return report.get("total_cents") if isinstance(report, dict) else None
