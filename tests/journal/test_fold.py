"""State as a fold: what may follow what, what is counted, and what a run that nobody drives waits for."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest

from perdure.contracts.agents import AgentSpec
from perdure.contracts.limits import Limits, Policy
from perdure.contracts.messages import AssistantTurn, Effect, Usage
from perdure.errors import MalformedJournalError
from perdure.journal import events as ev
from perdure.journal.envelope import FIRST_PREVIOUS, Envelope, seal
from perdure.journal.fold import CRASH_LOOP_DRIVES, RunState, fold, fold_on

RUN = "run-1"
HEAD = ev.RunStarted(AgentSpec("a", "", (), Policy(Limits(max_model_turns=10))), "task", "p:m", "0")
START = ev.DriveStarted(1, "0", "start")


def sealed(*events: ev.Event | tuple[ev.Event, int]) -> list[Envelope]:
    """The events as a chain; with a number, that is the event's `active_ns`."""
    previous, chain = FIRST_PREVIOUS, []
    for seq, one in enumerate(events):
        event, active = one if isinstance(one, tuple) else (one, 0)
        chain.append(seal(previous, RUN, seq, event.event_kind, 100 + seq, active, bytes(16), ev.payload_bytes(event)))
        previous = chain[-1].digest
    return chain


def state(*events: ev.Event | tuple[ev.Event, int]) -> RunState:
    return fold(RUN, sealed(*events))[0]


def tool(call: str, effect: Effect = Effect.READ, **arguments: Any) -> ev.ToolCallRequested:
    return ev.ToolCallRequested(call, "t", arguments, effect, "k" if effect is Effect.IDEMPOTENT else None)


def model(call: str, usage: Usage | None = None) -> list[ev.Event]:
    turn = AssistantTurn(usage=usage or Usage(3, 4, 1, 2))
    return [ev.ModelCallRequested(call, "p:m", "t"), ev.ModelCallCompleted(call, turn, 5)]


# What may follow


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([START], id="no head"),
        pytest.param([HEAD, HEAD], id="two heads"),
        pytest.param([HEAD, ev.RunCompleted("final", "unverified", "x"), START], id="after the end"),
        pytest.param([HEAD, ev.RunAbandoned("x"), ev.RunAbandoned("x")], id="two ends"),
        pytest.param([HEAD, ev.ToolCallCompleted("1.0", 1)], id="an answer to nothing"),
        pytest.param(
            [HEAD, tool("1.0"), ev.ToolCallCompleted("1.0", 1), ev.ToolCallCompleted("1.0", 1)], id="two answers"
        ),
        pytest.param([HEAD, tool("1.0"), tool("1.0")], id="asked twice"),
        pytest.param(
            [HEAD, tool("1.0"), ev.ToolCallCompleted("1.0", 1), tool("1.0")], id="asked again after its answer"
        ),
        pytest.param([HEAD, *model("1"), ev.ModelCallRequested("1", "p:m", "t")], id="a turn asked for again"),
        pytest.param([HEAD, ev.ToolCallFailed("1.0", "error", "x", "x")], id="a failure of nothing"),
        pytest.param([HEAD, ev.ModelCallCompleted("1", AssistantTurn())], id="a turn nobody asked for"),
        pytest.param([HEAD, ev.ModelCallFailed("1", "client", "x")], id="a failed turn nobody asked for"),
        pytest.param([HEAD, ev.AttemptStarted("1.0", 2, "recovery")], id="an attempt at nothing"),
        pytest.param([HEAD, ev.EffectResolved("1.0", "happened")], id="a verdict on nothing"),
        pytest.param([HEAD, ev.LateResultObserved("1.0", 1, 7)], id="a late result of nothing"),
        pytest.param([HEAD, ev.Resumed("1.0", 1)], id="an answer nobody waits for"),
        pytest.param([HEAD, ev.Woken("1.0")], id="woken without a sleep"),
        pytest.param([HEAD, ev.SleepStarted("1.0", 5, 1), ev.Woken("1.0"), ev.Woken("1.0")], id="woken twice"),
    ],
)
def test_an_event_that_cannot_follow_is_damage(events: Sequence[ev.Event]) -> None:
    """S-070, C15: fails closed, naming the event, and nothing of it is taken into the state."""
    *sound, last = sealed(*events)
    folded, _ = fold(RUN, sound)
    before = deepcopy(vars(folded))
    with pytest.raises(MalformedJournalError) as found:
        fold_on(folded, [last])
    assert found.value.seq == last.seq
    assert vars(folded) == before


def test_an_empty_journal_has_no_head() -> None:
    """S-070."""
    with pytest.raises(MalformedJournalError, match="no head"):
        _ = RunState(RUN).started


# What is counted


def test_going_on_from_any_event_gives_the_same_state_as_folding_all() -> None:
    """S-014, O3, O11: state is a fold and nothing else."""
    events = [
        HEAD, START, *model("1"), ev.BatchAccepted(("1.0", "1.1")), tool("1.0"), ev.ToolCallCompleted("1.0", 1),
        tool("1.1", Effect.WRITE), ev.ToolCallFailed("1.1", "handler", "no", "no"),
        ev.Suspended("1.2", "why", "question", {}), ev.Resumed("1.2", 1), ev.DriveStarted(2, "0", "resume"),
        ev.BudgetExceeded("2", "max_model_turns", 1, 1, 1), ev.BudgetChanged({"max_model_turns": 9}),
        ev.ProposalReceived("x"), ev.RunCompleted("final", "unverified", "x"),
    ]  # fmt: skip
    chain = sealed(*events)
    whole = vars(fold(RUN, chain)[0])
    for kept in range(len(chain) + 1):
        part, _ = fold(RUN, chain[:kept])
        for envelope in chain[kept:]:
            part.advance(envelope, ev.decode(envelope))
        assert vars(part) == whole


def test_use_adds_up_and_the_unknown_stays_unknown() -> None:
    """S-027, O3, C25."""
    spent = state(HEAD, *model("1"), *model("2")).spent
    assert (spent.model_turns, spent.input_tokens, spent.output_tokens, spent.cost) == (2, 6, 8, 10)
    spent = state(HEAD, *model("1"), *model("2", Usage(3, None))).spent
    assert (spent.input_tokens, spent.output_tokens, spent.cached_tokens) == (6, None, None)


def test_attempts_are_charged_and_not_completions() -> None:
    """C5, S-038."""
    spent = state(
        HEAD,
        ev.ModelCallRequested("1", "p:m", "t"),
        ev.AttemptStarted("1", 2, "recovery"),
        ev.ModelUsageReported("1", Usage(10, 0)),
        ev.AttemptStarted("1", 3, "retry", "fault"),
        tool("0.0"),
        ev.AttemptStarted("0.0", 2, "recovery"),
    ).spent
    assert (spent.model_turns, spent.tool_calls) == (3, 2)
    assert spent.input_tokens == 10


def test_active_time_is_the_sum_over_drives_of_their_last_reading() -> None:
    """C6: what lies between drives counts for nothing."""
    spent = state(
        (HEAD, 0),
        (START, 1),
        (tool("0.0"), 50),
        (ev.DriveStarted(2, "0", "recover"), 2),
        (ev.AttemptStarted("0.0", 2, "recovery"), 30),
        (ev.DriveStarted(3, "0", "recover"), 1),
    ).spent
    assert spent.active_ns == 50 + 30 + 1


def test_a_repair_is_spent_by_a_bad_batch_and_by_a_notice_that_asks_again() -> None:
    """C11, S-048: but a reply without a call costs a turn only."""
    from perdure.contracts.notices import Notice, NoticeKind

    def notice(call: str, kind: NoticeKind) -> ev.ModelCallRequested:
        return ev.ModelCallRequested(call, "p:m", "t", {}, Notice(kind, "again"))

    after = state(
        HEAD,
        ev.BatchAccepted((), repair=True),
        notice("1", NoticeKind.EMPTY_REPLY),
        notice("2", NoticeKind.CUT_REPLY),
        notice("3", NoticeKind.NO_CALL),
    )
    assert after.spent.model_repairs == 3


# What it waits for


def test_a_dangling_write_is_a_doubt_until_somebody_settles_it() -> None:
    """S-064, O10, C2."""
    waiting = state(HEAD, START, tool("1.0", Effect.WRITE, x=1))
    park = waiting.park()
    assert park is not None
    assert (park.kind, park.call, park.detail) == ("needs_reconciliation", "1.0", {"tool": "t", "arguments": {"x": 1}})
    settled = state(HEAD, START, tool("1.0", Effect.WRITE), ev.EffectResolved("1.0", "happened", 1))
    assert settled.park() is None


@pytest.mark.parametrize("effect", [Effect.READ, Effect.IDEMPOTENT])
def test_a_dangling_read_or_idempotent_call_is_no_doubt(effect: Effect) -> None:
    """S-064."""
    assert state(HEAD, START, tool("1.0", effect)).park() is None


def test_a_late_value_settles_an_unknown_outcome_until_the_model_is_told_and_costs_nothing() -> None:
    """H26, O10: a late error settles nothing, nor does a value of a call that another attempt has answered."""
    lost = [HEAD, tool("1.0", Effect.WRITE), ev.ToolCallFailed("1.0", "unknown", "late", "late")]
    value, error = ev.LateResultObserved("1.0", 1, 7), ev.LateResultObserved("1.0", 1, None, "handler", "no")
    known = state(*lost, value)
    assert [(call.call, late) for call, late in known.settled_late()] == [("1.0", value)]
    assert (known.doubts(), known.open, known.spent.tool_calls) == ([], {}, 1)
    assert state(*lost, error).settled_late() == []
    assert state(*lost, value, ev.ToolCallRefused("2.0", "t", "ended_late", "x", None, "1.0")).settled_late() == []
    assert state(*lost, value, ev.ToolCallRefused("2.0", "t", "still_going", "x")).settled_late() != []
    answered = [HEAD, tool("1.0", Effect.IDEMPOTENT), value, ev.ToolCallCompleted("1.0", 8)]
    assert state(*answered).settled_late() == []
    assert [call.call for call, _ in state(*lost[:2], value, lost[2]).settled_late()] == ["1.0"]


def test_a_new_attempt_at_a_settled_write_puts_it_in_doubt_again() -> None:
    """S-064, O10: what was found out was about the attempt before."""
    again = state(
        HEAD,
        tool("1.0", Effect.WRITE),
        ev.EffectResolved("1.0", "did_not_happen"),
        ev.AttemptStarted("1.0", 2, "recovery"),
    )
    assert [doubt.call for doubt in again.doubts()] == ["1.0"]


def test_a_crossed_limit_holds_until_that_very_boundary_is_lifted() -> None:
    """C3, S-032: not by a restart, and not by another limit."""
    crossed = [HEAD, START, ev.BudgetExceeded("2", "max_model_turns", 5, 5, 1)]
    park = state(*crossed, ev.DriveStarted(2, "0", "resume"), ev.BudgetChanged({"max_tool_calls": 900})).park()
    assert park is not None
    assert park.kind == "budget_exceeded"
    assert park.detail == {"limit": "max_model_turns", "max": 5, "used": 5, "need": 1}
    assert state(*crossed, ev.BudgetChanged({"max_model_turns": 5})).park() is not None
    assert state(*crossed, ev.BudgetChanged({"max_model_turns": 6})).park() is None


def test_a_sleep_and_a_question_are_waits_with_their_details() -> None:
    """S-012, O15."""
    sleeping = state(HEAD, ev.SleepStarted("1.0", 500, 100)).park()
    assert sleeping is not None
    assert (sleeping.kind, sleeping.call, sleeping.detail) == ("sleeping", "1.0", {"wake_at": 500})
    asked = state(HEAD, ev.Suspended("1.0", "why?", "webhook", {"type": "string"})).park()
    assert asked is not None
    assert asked.detail == {"kind": "webhook", "reason": "why?", "schema": {"type": "string"}}
    assert state(HEAD, ev.SleepStarted("1.0", 500, 100), ev.Woken("1.0")).park() is None


def recovers(count: int) -> list[ev.Event]:
    made: list[ev.Event] = []
    for n in range(count):
        made += [ev.DriveStarted(2 + n, "0", "recover"), ev.AttemptStarted("1.0", 2 + n, "recovery")]
    return made


def test_five_drives_in_a_row_that_finish_nothing_are_a_crash_loop() -> None:
    """C5, O3."""
    dangling = [HEAD, START, tool("1.0")]
    assert state(*dangling, *recovers(CRASH_LOOP_DRIVES - 1)).park() is None
    park = state(*dangling, *recovers(CRASH_LOOP_DRIVES)).park()
    assert park is not None
    assert park.kind == "crash_loop"
    lifted = state(*dangling, *recovers(CRASH_LOOP_DRIVES), ev.DriveStarted(9, "0", "resume"))
    assert lifted.park() is None
    finished = state(*dangling, *recovers(CRASH_LOOP_DRIVES), ev.ToolCallCompleted("1.0", 1))
    assert finished.park() is None


def test_a_late_result_is_no_progress_that_would_end_a_crash_loop() -> None:
    """C5, H26, O3: an attempt ends late in each drive, and the next one kills the process."""
    late = [ev.LateResultObserved("1.0", 1, None, "handler", "stopped"), ev.LateResultObserved("1.0", 1, "receipt")]
    drives = [event for n in range(CRASH_LOOP_DRIVES) for event in (*recovers(1), late[n % 2])]
    park = state(HEAD, START, tool("1.0"), *drives).park()
    assert park is not None
    assert park.kind == "crash_loop"


# How it ended


@pytest.mark.parametrize(
    ("end", "status", "outcome"),
    [
        (ev.RunCompleted("final", "unverified", "x"), "completed", "success"),
        (ev.RunFailed("exhausted", "token_limit", "x"), "failed", "exhausted"),
        (ev.RunCancelled("x"), "cancelled", "cancelled"),
        (ev.RunAbandoned("x"), "abandoned", "cancelled"),
    ],
)
def test_each_end_has_a_status_an_outcome_and_words(end: ev.Event, status: str, outcome: str) -> None:
    """S-011, S-066, O13."""
    ended = state(HEAD, START, end)
    assert ended.end is not None
    assert (ended.end.status, ended.end.outcome, ended.end.answer) == (status, outcome, "x")
    assert ended.end.terminal_reason
    assert ended.park() is None


def test_the_index_row_is_drawn_from_the_state() -> None:
    """O11: and says of a doubt nothing, which only holds while nobody drives."""
    assert state(HEAD, START).index_row_fields() == ("a", "open", None, None, None)
    assert state(HEAD, ev.SleepStarted("1.0", 500, 1)).index_row_fields() == ("a", "parked", None, "sleeping", 500)
    assert state(HEAD, tool("1.0", Effect.WRITE)).index_row_fields() == ("a", "open", None, None, None)
    ended = state(HEAD, ev.RunFailed("exhausted", "token_limit", "x"))
    assert ended.index_row_fields() == ("a", "failed", "token_limit", None, None)
