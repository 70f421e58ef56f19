"""What people say to a run that nobody drives: each verb becomes events, or an error that says why it cannot be
recorded.

Pure over the run's state; the engine stores the events. None of these drives the run.
"""

import re
from collections.abc import Mapping

from perdure.contracts.contract import JsonValue
from perdure.contracts.limits import LIMIT_NAMES
from perdure.contracts.values import to_json
from perdure.errors import InvalidAnswerError, UnknownError, UsageError
from perdure.journal import events as ev
from perdure.journal.fold import OpenCall, RunState
from perdure.prompting import texts
from perdure.runtime.ending import cancelled_answer, doubt_named
from perdure.tools.output import schema_problem

_CHANGEABLE = (*LIMIT_NAMES, "deadline_seconds")


def answer(state: RunState, call: str, value: object, by: str | None, key: str | None) -> list[ev.Event]:
    """Answers what the run waits for at a call."""
    _must_be_open(state, "answer")
    waits = state.waiting.get(call)
    if not isinstance(waits, ev.Suspended):
        waiting = [one for one, what in state.waiting.items() if isinstance(what, ev.Suspended)]
        hint = f"it waits for an answer at {', '.join(waiting)}" if waiting else "it waits for no answer"
        raise InvalidAnswerError(f"nothing waits for an answer at {call}", where=f"run {state.run_id}", next=hint)
    given: JsonValue = to_json(value)
    problem = schema_problem(waits.schema, given)
    if problem is not None:
        raise InvalidAnswerError(
            f"the answer does not fit: {problem}",
            where=f"run {state.run_id}, call {call}",
            next="give one that fits its schema",
        )
    shown = None if texts.value_text(given).strip() else texts.NO_OUTPUT
    return [ev.Resumed(call, given, by, key, shown)]


def resolve(
    state: RunState, call: str, verdict: str, result: object, text: str | None, by: str | None
) -> list[ev.Event]:
    """Settles a write in doubt as a person found it."""
    doubt = _doubt(state, call)
    match verdict:
        case "happened":
            return [ev.EffectResolved(doubt.call, "happened", to_json(result), None, by)]
        case "did_not_happen":
            return [ev.EffectResolved(doubt.call, "did_not_happen", None, None, by)]
        case "failed":
            return [ev.EffectResolved(doubt.call, "failed", None, text or "a person recorded that it failed", by)]
        case _:
            raise UsageError(f"unknown verdict {verdict!r}", next="use happened, did_not_happen or failed")


def _doubt(state: RunState, call: str) -> OpenCall:
    _must_be_open(state, "resolve")
    for doubt in state.doubts():
        if doubt.call == call:
            return doubt
    doubts = ", ".join(f"{one.call} ({one.tool})" for one in state.doubts()) or "none"
    raise InvalidAnswerError(
        f"call {call} is not a write in doubt", where=f"run {state.run_id}", next=f"calls in doubt: {doubts}"
    )


def limit(state: RunState, changes: Mapping[str, int | str], by: str | None) -> list[ev.Event]:
    """New totals for limits: a whole number, or "+n" to add to the present total."""
    _must_be_open(state, "limit")
    if not changes:
        raise UsageError(
            "no limit is named", where=f"run {state.run_id}", next="give NAME=TOTAL, as max_model_turns=15"
        )
    return [ev.BudgetChanged({name: _total(state, name, change) for name, change in changes.items()}, by)]


def _total(state: RunState, name: str, change: int | str) -> int:
    if name not in _CHANGEABLE:
        raise UsageError(
            f"unknown limit {name!r}", where=f"run {state.run_id}", next=f"one of: {', '.join(_CHANGEABLE)}"
        )
    text = str(change).strip()
    adds = text.startswith("+")
    if not re.fullmatch(r"\+?[0-9]{1,19}", text):
        raise UsageError(f"{name}={text} is no whole number", next="give a total, or +N to add")
    total = int(text)
    if adds:
        present = state.limits.get(name)
        if present is None:
            raise UsageError(
                f"the run has no limit {name} to add to",
                where=f"run {state.run_id}",
                next=f"give a total: {name}={total}",
            )
        total += present
    if not 1 <= total < 2**63:
        raise UsageError(f"{name}={total} is out of range", next="give a total of at least 1 within 64 bits")
    return total


def cancel(state: RunState, reason: str | None, by: str | None) -> list[ev.Event]:
    """Ends a run that nobody drives, as cancelled."""
    _must_be_open(state, "cancel")
    unresolved = tuple(one.call for one in state.may_have_acted())
    request = ev.CancelRequested(reason, by)
    return [request, ev.RunCancelled(cancelled_answer(request, unresolved), unresolved)]


def abandon(state: RunState, by: str | None) -> list[ev.Event]:
    """Gives a run up, whatever it waits for."""
    _must_be_open(state, "abandon")
    unresolved = tuple(one.call for one in state.may_have_acted())
    found = f"The run was abandoned by an operator; it has no answer.{doubt_named(unresolved)}"
    return [ev.RunAbandoned(found, unresolved, by)]


def _must_be_open(state: RunState, verb: str) -> None:
    if state.end is not None:
        raise UnknownError(
            f"the run ended already ({state.end.status}, {state.end.terminal_reason})",
            where=f"run {state.run_id}",
            next=f"there is nothing left to {verb}",
        )
