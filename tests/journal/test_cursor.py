"""Replay: what the recorded events answer, and what is a divergence."""

from collections.abc import Sequence
from typing import Any

import pytest

from perdure.contracts.messages import AssistantTurn, Effect
from perdure.errors import DivergedError
from perdure.journal import events as ev
from perdure.journal.cursor import Cursor, Live, Permit, Replayed

READ = Effect.READ


def asks(call: str, tool: str = "look", **arguments: Any) -> ev.ToolCallRequested:
    return ev.ToolCallRequested(call, tool, arguments, READ)


def gives(call: str, output: Any) -> ev.ToolCallCompleted:
    return ev.ToolCallCompleted(call, output)


class Stopped(Exception):
    """The little loop below waits, or was cut."""


def little_loop(recorded: Sequence[ev.Event], answers: dict[str, Any], order: Sequence[str]) -> list[ev.Event]:
    """Three calls at once that end in some order, a wait, then a reading: everything a cursor serves."""
    cursor, written = Cursor(recorded), list(recorded)
    group = [asks("1.0"), asks("1.1"), asks("1.2")]
    ended: dict[str, Any] = {}
    live = []
    for one in group:
        match cursor.intend(one):
            case Replayed(answer):
                ended[one.call] = answer
            case Live(permit):
                written += [] if permit.intended else [one]
                live.append(one.call)
    for call in (call for call in order if call in live):
        written.append(gives(call, call))
    match cursor.wait(ev.Suspended("1.3", "which?", "question", {})):
        case Live(permit):
            written += [] if permit.intended else [ev.Suspended("1.3", "which?", "question", {})]
            if "1.3" not in answers:
                return written
            written.append(ev.Resumed("1.3", answers["1.3"]))
        case Replayed():
            pass
    if isinstance(cursor.observe(ev.NowObserved("1.4", 0)), Live):
        written.append(ev.NowObserved("1.4", 9))
    return written


@pytest.mark.parametrize("kept", range(10))
@pytest.mark.parametrize("order", [("1.0", "1.1", "1.2"), ("1.2", "1.0", "1.1"), ("1.1", "1.2", "1.0")])
def test_a_loop_of_all_three_shapes_cut_at_any_event_ends_with_the_same_events(kept: int, order: Sequence[str]) -> None:
    """S-015, S-074, H01, O2: completions may have come in any order, and come in another the second time."""
    whole = little_loop([], {"1.3": "a"}, order)
    assert len(whole) == 9
    again = little_loop(whole[:kept], {"1.3": "a"}, order[::-1])
    assert sorted(map(ev.payload_bytes, again)) == sorted(map(ev.payload_bytes, whole))


def test_a_recorded_answer_carries_no_permit() -> None:
    """S-016, O2: replay cannot act."""
    cursor = Cursor([asks("1.0"), gives("1.0", "x")])
    answer = cursor.intend(asks("1.0"))
    assert answer == Replayed(gives("1.0", "x"))
    assert not hasattr(answer, "permit")
    assert cursor.live


def test_what_is_not_recorded_is_live_and_its_permit_says_whether_the_intent_is_there() -> None:
    """S-063, S-064, O1."""
    cursor = Cursor([asks("1.0")])
    assert not cursor.live
    assert cursor.intend(asks("1.0")) == Live(Permit("1.0", intended=True))
    assert cursor.intend(asks("1.1")) == Live(Permit("1.1"))


def test_completions_are_found_by_their_call_in_whatever_order_they_stand() -> None:
    """H01, C12."""
    cursor = Cursor([asks("1.0"), asks("1.1"), gives("1.1", "second"), gives("1.0", "first")])
    assert cursor.intend(asks("1.0")) == Replayed(gives("1.0", "first"))
    assert cursor.intend(asks("1.1")) == Replayed(gives("1.1", "second"))


def test_a_wait_is_answered_by_what_came_and_open_until_then() -> None:
    """S-031, S-032, O15."""
    asked = ev.Suspended("1.0", "why?", "question", {})
    assert Cursor([]).wait(asked) == Live(Permit("1.0"))
    assert Cursor([asked]).wait(asked) == Live(Permit("1.0", intended=True))
    answered = ev.Resumed("1.0", None)
    assert Cursor([asked, answered]).wait(asked) == Replayed(answered)


def test_null_is_an_answer() -> None:
    """S-076."""
    asked = ev.Suspended("1.0", "why?", "question", {})
    assert isinstance(Cursor([asked, ev.Resumed("1.0", None)]).wait(asked), Replayed)


def test_recovery_and_limits_are_matched_by_nothing() -> None:
    """S-014, S-033: what recovery adds, and a boundary that was lifted, change no answer."""
    cursor = Cursor(
        [
            ev.DriveStarted(1, "0", "start"),
            asks("1.0"),
            ev.BudgetExceeded("1.0", "max_tool_calls", 1, 1, 1),
            ev.BudgetChanged({"max_tool_calls": 2}),
            ev.AttemptStarted("1.0", 2, "recovery"),
            gives("1.0", "x"),
            ev.NowObserved("1.1", 5),
        ]
    )
    assert isinstance(cursor.intend(asks("1.0")), Replayed)
    assert cursor.observe(ev.NowObserved("1.1", 0)) == Replayed(ev.NowObserved("1.1", 5))
    assert cursor.live


DIVERGING = [
    (asks("1.0"), ev.NowObserved("1.0", 0), "request", "tool_call_requested at 1.0 (look)", "now_observed at 1.0"),
    (asks("1.0"), asks("1.1"), "request", "at 1.0", "at 1.1"),
    (asks("1.0"), asks("1.0", "peek"), "tool", "look", "peek"),
    (asks("1.0", place="a"), asks("1.0", place="b"), "arguments", '"a"', '"b"'),
    (
        ev.ToolCallRequested("1.0", "look", {}, READ),
        ev.ToolCallRequested("1.0", "look", {}, Effect.WRITE),
        "effect",
        "read",
        "write",
    ),
    (
        ev.ToolCallRequested("1.0", "look", {}, Effect.IDEMPOTENT, "k1"),
        ev.ToolCallRequested("1.0", "look", {}, Effect.IDEMPOTENT, "k2"),
        "key",
        "k1",
        "k2",
    ),
    (ev.Suspended("1.0", "a", "question", {}), ev.Suspended("1.0", "a", "webhook", {}), "kind", "question", "webhook"),
    (ev.SleepStarted("1.0", 5, 0), ev.SleepStarted("1.0", 6, 0), "wake_at", "5", "6"),
    (ev.ProposalReceived("a"), ev.ProposalReceived("b"), "output", '"a"', '"b"'),
    (ev.PatchObserved("1.0", "a"), ev.PatchObserved("1.0", "b"), "name", '"a"', '"b"'),
    (ev.RunCompleted("final", "unverified", "x"), asks("1.0"), "request", "run_completed", "tool_call_requested"),
]


@pytest.mark.parametrize(("recorded", "asked", "part", "held", "wanted"), DIVERGING)
def test_a_divergence_names_the_call_what_is_recorded_what_was_asked_and_the_part(
    recorded: ev.Event, asked: Any, part: str, held: str, wanted: str
) -> None:
    """S-070."""
    with pytest.raises(DivergedError) as found:
        Cursor([recorded]).observe(asked)
    assert found.value.part == part
    assert held in found.value.recorded
    assert wanted in found.value.asked
    assert found.value.call in str(found.value)


def test_the_order_of_keys_in_arguments_is_no_difference() -> None:
    """S-070, O12."""
    cursor = Cursor([asks("1.0", a=1, b=2), gives("1.0", 1)])
    assert isinstance(cursor.intend(asks("1.0", b=2, a=1)), Replayed)


def requested(call: str, transcript: str, **parts: str) -> ev.ModelCallRequested:
    return ev.ModelCallRequested(call, "p:m", transcript, parts)


def done(call: str) -> ev.ModelCallCompleted:
    return ev.ModelCallCompleted(call, AssistantTurn())


def test_a_model_request_is_compared_part_by_part_with_all_that_was_recorded_so_far() -> None:
    """S-015, S-078, O12: an event holds only the parts that changed."""
    recorded = [requested("1", "t1", system="s1", tools="x"), done("1"), requested("2", "t2", system="s2"), done("2")]
    cursor = Cursor(recorded)
    assert isinstance(cursor.intend_model(requested("1", "t1"), {"system": "s1", "tools": "x"}), Replayed)
    assert isinstance(cursor.intend_model(requested("2", "t2"), {"system": "s2", "tools": "x"}), Replayed)
    assert cursor.changed_parts({"system": "s2", "tools": "y"}) == {"tools": "y"}


@pytest.mark.parametrize(
    ("asked", "parts", "part"),
    [
        (requested("1", "t1"), {"system": "other", "tools": "x"}, "system"),
        (requested("1", "t1"), {"system": "s1", "tools": "other"}, "tools"),
        (requested("1", "other"), {"system": "s1", "tools": "x"}, "transcript"),
        (requested("2", "t1"), {"system": "s1", "tools": "x"}, "request"),
    ],
)
def test_a_diverging_model_request_names_the_part(asked: Any, parts: dict[str, str], part: str) -> None:
    """S-070, O12."""
    with pytest.raises(DivergedError) as found:
        Cursor([requested("1", "t1", system="s1", tools="x")]).intend_model(asked, parts)
    assert found.value.part == part
