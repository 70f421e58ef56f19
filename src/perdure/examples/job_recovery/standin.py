"""A stand-in for a language model: decides the next step from the body of one HTTP request and from nothing else.

It knows the tools' names and what sensible people do with a failed job. It knows no seed, no scenario and no service:
error codes, advice and amounts it has only from the tool results in the messages.

    python -m perdure.testing.wire openai-chat --replies perdure.examples.job_recovery.standin:decide --port 0
"""

import json
import re
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any

from perdure.testing.replies import Reply, calls

_MOST_LOOKS = 8
"""Looks at a running job before a person is asked."""
_MOST_FAILURES = 3
"""Failed calls of one tool before a person is asked."""
_ERROR_LINE = re.compile(r"^\d{4}-\d\d-\d\dT\S+Z ERROR\b.*?\b(E_[A-Z0-9]+)\b")
_AGAINST = re.compile(r"\b(not|never|cannot|stop|escalate|person|operator|hand over)\b", re.IGNORECASE)
_IN_FAVOUR = re.compile(r"\b(retry|start the job again)\b", re.IGNORECASE)


@dataclass
class _Seen:
    """One call the conversation holds, with what came back."""

    tool: str
    arguments: dict[str, Any]
    result: dict[str, Any] | None
    """None: the call failed, or its answer was no object."""


@dataclass
class _Case:
    """What the conversation says about the job."""

    job_id: str
    seen: list[_Seen] = field(default_factory=list)

    def last(self, tool: str) -> dict[str, Any] | None:
        """The newest answer of a tool about this job (or about no job)."""
        for call in reversed(self.seen):
            if (
                call.tool == tool
                and call.result is not None
                and call.arguments.get("job_id", self.job_id) == self.job_id
            ):
                return call.result
        return None

    def count(self, tool: str) -> int:
        return sum(1 for call in self.seen if call.tool == tool)

    def failures(self, tool: str) -> int:
        return sum(1 for call in self.seen if call.tool == tool and call.result is None)

    def looked_since_retry(self) -> bool:
        """Whether the newest state was read after the last request to retry, answered or not."""
        for call in reversed(self.seen):
            if call.tool == "job_retry":
                return False
            if call.tool == "job_status" and call.result is not None:
                return True
        return False

    def looked_up(self, code: str) -> list[str] | None:
        """The runbook's sections for a code; None before they were searched."""
        for call in self.seen:
            if call.tool == "runbook_search" and call.arguments.get("query") == code and call.result is not None:
                return list(call.result.get("sections", []))
        return None


def decide(body: dict[str, Any]) -> Reply:
    """The next reply to a Chat Completions request."""
    case = _read(body["messages"])
    if case is None:
        return _answer("", "needs_human", "The task names no job.")
    return _next(case)


def _next(case: _Case) -> Reply:
    stuck = next((tool for tool in {call.tool for call in case.seen} if case.failures(tool) >= _MOST_FAILURES), None)
    if stuck is not None:
        return _hand_over(case, f"{stuck} failed {_MOST_FAILURES} times.")
    status = case.last("job_status")
    if status is None or not case.looked_since_retry():
        return _use("I look at the job's state.", "job_status", job_id=case.job_id)
    match status.get("state"):
        case "completed":
            return _report_result(case)
        case "running" if case.count("job_status") <= _MOST_LOOKS:
            return _use("It is running; I look again.", "job_status", job_id=case.job_id)
        case "failed" if case.count("job_retry"):
            return _hand_over(case, "The job failed again after one retry.")
        case "failed":
            return _diagnose(case)
        case other:
            return _hand_over(case, f"The job stays in state {other}.")


def _diagnose(case: _Case) -> Reply:
    logs = case.last("job_logs")
    if logs is None:
        return _use("It failed; the log should say why.", "job_logs", job_id=case.job_id)
    codes = [found[1] for line in logs.get("lines", []) if (found := _ERROR_LINE.match(line))]
    if not codes:
        return _hand_over(case, "The log names no error code.")
    code = codes[-1]
    sections = case.looked_up(code)
    if sections is None:
        return _use(f"The error is {code}; the runbook decides.", "runbook_search", query=code)
    advice = _advice(sections, code)
    if advice is None:
        return _hand_over(case, f"The runbook does not know {code}.", f"no runbook section for {code}")
    if _AGAINST.search(advice) or not _IN_FAVOUR.search(advice):
        return _hand_over(case, f"The runbook forbids a retry for {code}.", f"runbook, {code}: {advice}")
    return _use(f"The runbook says: {advice}", "job_retry", job_id=case.job_id, reason=code)


def _advice(sections: list[str], code: str) -> str | None:
    """What the section of this very code says to do."""
    for section in sections:
        heading, _, rest = section.partition("\n")
        if heading.removeprefix("##").strip() == code:
            return next(
                (line[len("Action:") :].strip() for line in rest.splitlines() if line.startswith("Action:")), ""
            )
    return None


def _report_result(case: _Case) -> Reply:
    result = case.last("job_result")
    if result is None:
        return _use("It completed; I read the result.", "job_result", job_id=case.job_id)
    header, *rows = [line.split(",") for line in result.get("csv", "").split("\n") if line]
    try:
        total = int(sum((Decimal(row[header.index("amount")]) for row in rows), Decimal()) * 100)
    except (ValueError, IndexError, InvalidOperation):
        return _hand_over(case, "The result cannot be read.")
    retried = case.last("job_retry")
    how = (
        "had completed already" if retried is None else f"completed after one retry (receipt {retried.get('receipt')})"
    )
    return _answer(
        case.job_id,
        "completed",
        f"Job {case.job_id} {how}.",
        f"state completed, {len(rows)} rows in the result",
        total=total,
    )


def _use(words: str, tool: str, **arguments: str) -> Reply:
    return calls((tool, dict(arguments)), text=words)


def _hand_over(case: _Case, why: str, *evidence: str) -> Reply:
    return _answer(case.job_id, "needs_human", f"Job {case.job_id} needs a person. {why}", *(evidence or (why,)))


def _answer(job_id: str, status: str, summary: str, *evidence: str, total: int | None = None) -> Reply:
    report = {"status": status, "job_id": job_id, "total_cents": total, "summary": summary, "evidence": list(evidence)}
    return calls(("answer", report))


def _read(messages: list[dict[str, Any]]) -> _Case | None:
    """The case as the conversation tells it; None when the task names no job."""
    task = next((_text(message) for message in messages if message["role"] == "user"), "")
    named = re.search(r"\bjob\s+([A-Za-z0-9_-]+)", task, re.IGNORECASE)
    if named is None:
        return None
    case, results = _Case(named[1]), {}
    for message in messages:
        if message["role"] == "tool":
            results[message["tool_call_id"]] = _object(_text(message))
    for message in messages:
        for call in message.get("tool_calls") or ():
            arguments = _object(call["function"]["arguments"]) or {}
            case.seen.append(_Seen(call["function"]["name"], arguments, results.get(call["id"])))
    return case


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _object(words: str) -> dict[str, Any] | None:
    try:
        value = json.loads(words)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
