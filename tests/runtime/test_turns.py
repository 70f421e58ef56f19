"""The assembler: fragments to their calls, faults of a stream, faults of a call's content."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.contracts.contract import canonical
from perdure.contracts.messages import (
    AssistantTurn,
    CallFault,
    CallPart,
    OpaquePart,
    StopReason,
    TextPart,
    ToolCall,
    Usage,
)
from perdure.errors import StreamFaultError
from perdure.ports import CallDelta, CallDone, ModelEvent, OpaqueDelta, TextDelta, TurnDone, UsageReport
from perdure.runtime.turns import TurnAssembler, assemble

CALLS = TurnDone(StopReason.CALLS)


def turn_of(*events: ModelEvent, strict: bool = True) -> AssistantTurn:
    assembler = TurnAssembler(strict)
    for event in events:
        assembler.feed(event)
    return assembler.finish()


def fault_of(*events: ModelEvent, strict: bool = True) -> StreamFaultError:
    with pytest.raises(StreamFaultError) as caught:
        turn_of(*events, strict=strict)
    return caught.value


def said(*events: ModelEvent) -> list[tuple[str, Any]]:
    return [(call.name, call.arguments) for call in turn_of(*events, CALLS).calls]


TWO = [("read", {"a": 1}), ("write", {"b": 2})]


# Fragments and their calls


def test_two_calls_at_one_index_with_other_ids_stay_two_calls() -> None:
    """H12 (a)."""
    assert (
        said(
            CallDelta(0, "x", "read"),
            CallDelta(0, None, None, '{"a":'),
            CallDelta(0, None, None, "1}"),
            CallDelta(0, "y", "write"),
            CallDelta(0, None, None, '{"b":2}'),
        )
        == TWO
    )


def test_two_calls_at_one_index_may_interleave_when_each_fragment_has_its_id() -> None:
    """H12 (a)."""
    assert (
        said(
            CallDelta(0, "x", "read", '{"a"'),
            CallDelta(0, "y", "write", '{"b"'),
            CallDelta(0, "x", None, ":1}"),
            CallDelta(0, "y", None, ":2}"),
        )
        == TWO
    )


def test_fragments_without_an_index_follow_their_id_or_the_call_before() -> None:
    """H12 (b)."""
    assert (
        said(
            CallDelta(None, "x", "read", '{"a"'),
            CallDelta(arguments=":1}"),
            CallDelta(None, "y", "write", '{"b"'),
            CallDelta(None, "y", None, ":2}"),
        )
        == TWO
    )


def test_interleaved_fragments_with_the_id_only_on_the_first_follow_their_index() -> None:
    """H12 (c)."""
    assert (
        said(
            CallDelta(0, "x", "read"),
            CallDelta(1, "y", "write"),
            CallDelta(0, None, None, '{"a"'),
            CallDelta(1, None, None, '{"b"'),
            CallDelta(0, None, None, ":1}"),
            CallDelta(1, None, None, ":2}"),
        )
        == TWO
    )


@pytest.mark.parametrize("index", [None, 0])
@pytest.mark.parametrize("wire_id", [None, "", "same"])
def test_whole_calls_in_one_fragment_each_stay_apart_whatever_their_hints(
    index: int | None, wire_id: str | None
) -> None:
    """H12 (d), H04 (b), R-155."""
    assert said(
        CallDelta(index, wire_id, "read", '{"a":1}'),
        CallDelta(index, wire_id, "write", '{"b":2}'),
        CallDelta(index, wire_id, "write", '{"b":2}'),
    ) == [*TWO, TWO[1]]


def test_a_fragment_for_an_index_that_was_never_opened_is_a_fault_of_the_stream() -> None:
    """H12 (e), R-156."""
    assert fault_of(CallDelta(0, "x", "read", "{}"), CallDelta(3, None, None, "{}"), CALLS).kind == "unknown_call"
    assert fault_of(CallDelta(arguments="{}"), CALLS).kind == "unknown_call"
    assert fault_of(CallDelta(0, "x", "read"), CallDelta(0, "z", None, "{}"), CALLS).kind == "unknown_call"


def test_a_name_and_id_repeated_on_every_fragment_open_nothing_new() -> None:
    """H12: no call is made of a repeat, and none is dropped."""
    fragments = ["", '{"a"', ":1", "}", ""]
    assert said(*(CallDelta(0, "x", "read", text) for text in fragments)) == [TWO[0]]


def test_calls_without_arguments_and_without_hints_are_as_many_as_were_opened() -> None:
    """H12 (d), H04: none is dropped for looking like a repeat."""
    assert said(CallDelta(name="ping"), CallDelta(name="ping"), CallDelta(name="pong")) == [
        ("ping", {}),
        ("ping", {}),
        ("pong", {}),
    ]


def test_an_opening_repeated_behind_a_whole_call_starts_another_once_arguments_come() -> None:
    """H12: never glued arguments."""
    assert said(
        CallDelta(0, "x", "read", '{"a":1}'),
        CallDelta(0, "x", "read", ""),
        CallDelta(0, None, None, '{"a":3}'),
    ) == [("read", {"a": 1}), ("read", {"a": 3})]


def test_brackets_and_quotes_inside_strings_do_not_end_a_call() -> None:
    """H12."""
    text = json.dumps({"a": 'x}]"\\{'})
    assert said(*(CallDelta(0, "x", "read", letter) for letter in text)) == [("read", {"a": 'x}]"\\{'})]


def test_one_call_with_two_names_is_a_fault_of_the_stream() -> None:
    """R-157."""
    assert (
        fault_of(CallDelta(0, "x", "read", '{"a"'), CallDelta(0, "x", "write", ":1}"), CALLS).kind == "conflicting_call"
    )
    assert fault_of(CallDelta(0, "x", "read"), CallDone(0, "x", "write", "{}"), CALLS).kind == "conflicting_call"


def test_the_closing_object_of_a_call_completes_its_fragments() -> None:
    """R-159: what the provider closes a call with is the whole of it."""
    assert said(CallDelta(0, "x", "read", '{"a"'), CallDone(0, "x", "read", '{"a":1}')) == [TWO[0]]
    assert said(CallDelta(0, "x", "read", '{"a":1}'), CallDone(0, "x")) == [TWO[0]]


def test_start_fragments_and_close_of_a_call_must_belong_together() -> None:
    """R-152, R-156."""
    assert fault_of(CallDone(0, "x", "read", "{}"), CALLS).kind == "unknown_call"
    opened = (CallDelta(0, "x", "read", "{}"), CallDone(0, "x"))
    assert fault_of(*opened, CallDone(0, "x"), CALLS).kind == "unknown_call"
    assert fault_of(*opened, CallDelta(0, None, None, "{}"), CALLS).kind == "unknown_call"
    assert fault_of(*opened, CallDelta(1, "y", "write", "{}"), CALLS).kind == "unfinished_call"


def test_the_order_of_text_calls_and_opaque_parts_is_kept() -> None:
    """R-148, S-028."""
    turn = turn_of(
        OpaqueDelta("p", {"signature": "s"}),
        TextDelta("a"),
        TextDelta("b"),
        CallDelta(0, "x", "read", "{}"),
        TextDelta("c"),
        UsageReport(Usage(1, 2)),
        UsageReport(Usage(3, 4)),
        TurnDone(StopReason.CALLS, "m-1"),
    )
    call = CallPart(ToolCall("read", {}, wire_id="x"))
    assert turn.content == (OpaquePart("p", {"signature": "s"}), TextPart("ab"), call, TextPart("c"))
    assert (turn.usage, turn.stop, turn.model, turn.text) == (Usage(3, 4), StopReason.CALLS, "m-1", "abc")


def test_text_that_looks_like_a_call_stays_text() -> None:
    """R-004, R-006: structured calls alone are calls."""
    turn = turn_of(TextDelta('{"tool": "read", "arguments": {}}'), TurnDone(StopReason.END))
    assert (turn.calls, turn.text) == ((), '{"tool": "read", "arguments": {}}')


def test_usage_nobody_reported_is_unknown() -> None:
    """R-148: absent is not zero."""
    assert turn_of(TextDelta("a"), TurnDone(StopReason.END)).usage == Usage(None, None, None, None)


@pytest.mark.parametrize("count", [2**63, 10**30, -1, True, 1.5, "7"])
def test_usage_that_is_no_count_within_64_bits_is_a_fault(count: Any) -> None:
    """R-148, R-152: what a client reports is recorded, and must be readable."""
    for field in ("input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens"):
        fault = fault_of(UsageReport(Usage(**{field: count})), TurnDone(StopReason.END))
        assert (fault.kind, fault.usage) == ("protocol", None)
        assert field in str(fault)
    whole = Usage(2**63 - 1, 0, None, 0)
    assert turn_of(UsageReport(whole), TurnDone(StopReason.END)).usage == whole


# Ends


@pytest.mark.parametrize(
    "events",
    [
        (),
        (TextDelta("half an ans"),),
        (CallDelta(0, "x", "read", '{"a":1}'),),
        (CallDelta(0, "x", "read", '{"a"'),),
    ],
)
def test_a_strict_stream_without_its_closing_event_is_a_fault(events: tuple[ModelEvent, ...]) -> None:
    """H10, R-153, R-154."""
    assert fault_of(*events).kind == "no_terminal"


def test_a_reply_closed_for_its_length_is_a_proper_end() -> None:
    """H10: the provider's own closing event."""
    turn = turn_of(TextDelta("half"), TurnDone(StopReason.LENGTH))
    assert (turn.text, turn.stop) == ("half", StopReason.LENGTH)


def test_anything_after_the_end_is_a_fault() -> None:
    """R-152."""
    for event in (TextDelta("x"), CallDelta(0, "x", "read"), UsageReport(Usage(1, 1)), CALLS):
        assert fault_of(CALLS, event).kind == "after_end"


def test_a_client_that_is_not_strict_may_end_bare_but_not_inside_a_call() -> None:
    """R-161."""
    assert turn_of(TextDelta("a"), strict=False).stop is StopReason.END
    whole = turn_of(CallDelta(0, "x", "read", '{"a":1}'), strict=False)
    assert (whole.stop, whole.calls[0].arguments) == (StopReason.CALLS, {"a": 1})
    assert fault_of(CallDelta(0, "x", "read", '{"a"'), strict=False).kind == "unfinished_call"
    two_names = (CallDelta(0, "x", "read", '{"a"'), CallDelta(0, "x", "write", ":1}"))
    assert fault_of(*two_names, strict=False).kind == "conflicting_call"
    assert turn_of(CallDelta(0, "x", "read", "[1]"), strict=False).calls[0].fault is CallFault.NOT_AN_OBJECT


def test_a_fault_keeps_the_usage_reported_before_it() -> None:
    """R-153: a broken attempt still costs what the provider said it cost."""
    assert fault_of(UsageReport(Usage(7, 9))).usage == Usage(7, 9)
    assert fault_of(UsageReport(Usage(7, 9)), CallDelta(arguments="x")).usage == Usage(7, 9)


# Faults of a call's content


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('["x"]', CallFault.NOT_AN_OBJECT),
        ('"ls"', CallFault.NOT_AN_OBJECT),
        ("null", CallFault.NOT_AN_OBJECT),
        ("3", CallFault.NOT_AN_OBJECT),
        ('"{\\"a\\": 1}"', CallFault.NOT_AN_OBJECT),
        ('{"a": 1', CallFault.NOT_JSON),
        ('{"a": 1}}', CallFault.NOT_JSON),
        ("{'a': 1}", CallFault.NOT_JSON),
        ('{"a": NaN}', CallFault.NOT_JSON),
        ('{"a": -Infinity}', CallFault.NOT_JSON),
        ('{"a": 1e999}', CallFault.NOT_JSON),
        ('{"a": 9223372036854775808}', CallFault.NOT_JSON),
        ('{"a": ' + "9" * 5000 + "}", CallFault.NOT_JSON),
        ('{"a":' * 300 + "1" + "}" * 300, CallFault.NOT_JSON),
        ('{"a":' * 100_000, CallFault.NOT_JSON),
    ],
)
def test_arguments_that_are_no_object_are_a_fault_of_the_call_alone(text: str, fault: CallFault) -> None:
    """H13, R-158, R-007: the call beside it stands."""
    turn = turn_of(CallDelta(0, "x", "read", text), CallDelta(1, "y", "write", '{"b":2}'), CALLS)
    bad, good = turn.calls
    assert (bad.fault, bad.arguments, bad.raw) == (fault, {}, text[:400])
    assert (good.fault, good.arguments, good.raw) == (None, {"b": 2}, None)


def test_an_empty_text_is_an_empty_object_and_the_last_of_equal_keys_counts() -> None:
    """H13."""
    assert said(CallDelta(0, "x", "read"), CallDelta(1, "y", "write", " ")) == [("read", {}), ("write", {})]
    assert said(CallDelta(0, "x", "read", '{"a":1,"a":2}')) == [("read", {"a": 2})]
    assert said(CallDelta(0, "x", "read", '{"a":9223372036854775807}')) == [("read", {"a": 2**63 - 1})]


def test_a_call_the_output_limit_cut_is_marked_cut_and_a_whole_one_before_it_stands() -> None:
    """H11 (a), (c)."""
    end = TurnDone(StopReason.LENGTH)
    turn = turn_of(CallDelta(0, "x", "read", '{"a":1}'), CallDelta(1, "y", "write", '{"b":"hal'), end)
    assert [call.fault for call in turn.calls] == [None, CallFault.CUT]
    assert turn.calls[1].raw == '{"b":"hal'
    assert turn_of(CallDelta(0, "x", "read"), end).calls[0].fault is CallFault.CUT
    assert turn_of(CallDelta(0, "x", "read"), CallDone(0, "x"), end).calls[0].fault is None


def test_the_same_broken_call_without_a_cut_is_no_json() -> None:
    """H11: stop reason `calls` while the JSON is broken."""
    assert turn_of(CallDelta(0, "x", "read", '{"b":"hal'), CALLS).calls[0].fault is CallFault.NOT_JSON


def test_lone_surrogates_are_replaced_and_pairs_split_over_fragments_are_joined() -> None:
    """R-148: every part of a turn is UTF-8."""
    turn = turn_of(
        TextDelta("a\ud83d"),
        TextDelta("\ude00b\udc00"),
        CallDelta(0, "i\ud800", "n\ud800", '{"\\ud800k":["\\ud83d\\ude00","\\udc00","\ud800"]}'),
        CALLS,
    )
    assert turn.text == "a\U0001f600b\ufffd"
    assert turn.calls[0] == ToolCall("n\ufffd", {"\ufffdk": ["\U0001f600", "\ufffd", "\ufffd"]}, wire_id="i\ufffd")
    canonical(turn).decode("utf-8")


# Caps


def test_a_reply_over_a_cap_is_a_fault_and_one_at_the_cap_is_not() -> None:
    """R-151, R-163."""
    mega = "é" * (1 << 19)
    end = TurnDone(StopReason.END)
    assert len(turn_of(TextDelta(mega), end).text) == 1 << 19
    assert fault_of(TextDelta(mega), TextDelta("x"), end).kind == "too_large"
    fitting = '"' + "x" * ((1 << 20) - 2) + '"'
    assert turn_of(CallDelta(0, "i", "n", fitting), CALLS).calls[0].fault is CallFault.NOT_AN_OBJECT
    assert fault_of(CallDelta(0, "i", "n", fitting), CallDelta(0, arguments=" "), CALLS).kind == "too_large"
    calls = [CallDelta(place, f"c{place}", "n", "{}") for place in range(129)]
    assert len(turn_of(TextDelta("and text"), *calls[:128], CALLS).calls) == 128
    assert fault_of(*calls, CALLS).kind == "too_large"
    blocks = [OpaqueDelta("p", place) for place in range(129)]
    assert len(turn_of(*blocks[:128], end).content) == 128
    assert fault_of(*blocks, end).kind == "too_large"
    assert turn_of(CallDelta(0, "i" * 256, "n" * 256, "{}"), CALLS).calls
    assert fault_of(CallDelta(0, "i" * 257, "n", "{}"), CALLS).kind == "too_large"
    assert fault_of(CallDelta(0, "i", "é" * 129, "{}"), CALLS).kind == "too_large"


# Any chunking gives the turn back

_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_arguments = st.dictionaries(st.text(max_size=5), _json, max_size=3)
_name = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=8)
_calls = st.lists(st.tuples(_name, _arguments), max_size=4)


@st.composite
def _cut(draw: st.DrawFn, text: str) -> list[str]:
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@st.composite
def _merged(draw: st.DrawFn, lanes: list[list[ModelEvent]]) -> list[ModelEvent]:
    """Each lane in its own order; a lane begins only when the one before it has begun."""
    lanes = [list(lane) for lane in lanes]
    begun, merged = 0, []
    while any(lanes):
        ready = [place for place, lane in enumerate(lanes) if lane and place <= begun]
        place = draw(st.sampled_from(ready)) if ready else next(p for p, lane in enumerate(lanes) if lane)
        merged.append(lanes[place].pop(0))
        begun = max(begun, place + 1)
    return merged


def _written(arguments: dict[str, Any], pretty: bool) -> str:
    return json.dumps(arguments, indent=1) if pretty else canonical(arguments).decode()


@st.composite
def _call_events(draw: st.DrawFn, calls: list[tuple[str, dict[str, Any]]]) -> list[ModelEvent]:
    style = draw(st.sampled_from(["indexed", "by_id", "in_a_row", "whole", "closed"]))
    index, equal_id = draw(st.sampled_from([None, 0])), draw(st.sampled_from([None, "", "same"]))
    lanes: list[list[ModelEvent]] = []
    for place, (name, arguments) in enumerate(calls):
        pieces = draw(_cut(_written(arguments, draw(st.booleans()))))
        own = f"id{place}"
        if style == "whole":
            lanes.append([CallDelta(index, equal_id, name, "".join(pieces))])
        elif style == "by_id":
            lanes.append([CallDelta(index, own, name), *(CallDelta(index, own, None, piece) for piece in pieces)])
        elif style == "in_a_row":
            lanes.append([CallDelta(None, own, name), *(CallDelta(arguments=piece) for piece in pieces)])
        else:
            lane: list[ModelEvent] = [CallDelta(place, own, name), *(CallDelta(place, arguments=p) for p in pieces)]
            if style == "closed":
                lane = [*lane[:-1], CallDone(place, own, name, "".join(pieces))]
            lanes.append(lane)
    if style in ("whole", "in_a_row"):
        return [event for lane in lanes for event in lane]
    return draw(_merged(lanes))


@st.composite
def _turns(draw: st.DrawFn) -> tuple[tuple[str, list[tuple[str, dict[str, Any]]]], list[ModelEvent]]:
    """What a reply says, and one of the streams it may come as."""
    text, calls = draw(st.text()), draw(_calls)
    return (text, calls), [*map(TextDelta, draw(_cut(text))), *draw(_call_events(calls))]


@given(_turns(), st.sampled_from(list(StopReason)))
@settings(max_examples=200, deadline=None)
@pytest.mark.slow
def test_a_turn_streamed_in_any_chunking_is_put_together_again(drawn: Any, stop: StopReason) -> None:
    """R-150, R-159, H12."""
    (text, calls), events = drawn
    turn = turn_of(*events, TurnDone(stop, "m"))
    assert turn.text == text
    assert [(call.name, call.arguments, call.fault) for call in turn.calls] == [(n, a, None) for n, a in calls]
    assert msgspec.json.decode(canonical(turn), type=AssistantTurn) == turn


@given(_turns())
@settings(max_examples=50, deadline=None)
def test_a_stream_that_stops_anywhere_before_its_closing_event_is_never_a_turn(drawn: Any) -> None:
    """H10, R-153."""
    _, events = drawn
    for length in range(len(events) + 1):
        assert fault_of(*events[:length]).kind in ("no_terminal", "unfinished_call")


_noise = st.lists(
    st.one_of(
        st.builds(TextDelta, st.text()),
        st.builds(
            CallDelta,
            st.sampled_from([None, 0, 1]),
            st.sampled_from([None, "", "a", "b"]),
            st.sampled_from([None, "", "f", "g"]),
            st.sampled_from(["", "{", "}", '{"a":1}', '"', " ", "[", "\\"]),
        ),
        st.builds(CallDone, st.sampled_from([None, 0, 1]), st.sampled_from([None, "a", "b"])),
        st.builds(TurnDone, st.sampled_from(list(StopReason))),
    ),
    max_size=12,
)


@given(_noise, st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_events_at_all_give_a_turn_that_can_be_stored_or_a_fault(events: list[ModelEvent], strict: bool) -> None:
    """R-154, R-161: no other error, and no argument text is lost or glued to another call's."""
    try:
        turn = turn_of(*events, strict=strict)
    except StreamFaultError:
        return
    assert msgspec.json.decode(canonical(turn), type=AssistantTurn) == turn
    sent = "".join(event.arguments for event in events if isinstance(event, CallDelta))
    opened = [event.name for event in events if isinstance(event, CallDelta) and event.name]
    assert {call.name for call in turn.calls} == set(opened)
    kept = sum(len(call.raw) if call.raw is not None else len(canonical(call.arguments)) for call in turn.calls)
    assert kept >= len("".join(sent.split()))


# A whole stream


async def _stream(events: Iterable[ModelEvent | float]) -> AsyncIterator[ModelEvent]:
    for event in events:
        if isinstance(event, float):
            await asyncio.sleep(event)
        else:
            yield event


async def test_a_silent_stream_is_cut_by_the_idle_limit() -> None:
    """H10."""
    with pytest.raises(StreamFaultError) as caught:
        await assemble(
            _stream([UsageReport(Usage(1, 0)), TextDelta("a"), 60.0]), strict=True, idle_timeout_s=0.05, timeout_s=60
        )
    assert (caught.value.kind, caught.value.usage) == ("idle", Usage(1, 0))


async def test_a_stream_that_trickles_is_cut_by_the_limit_of_the_whole_call() -> None:
    """H10."""
    trickle = [event for _ in range(100) for event in (TextDelta("a"), 0.02)]
    with pytest.raises(StreamFaultError) as caught:
        await assemble(_stream(trickle), strict=True, idle_timeout_s=60, timeout_s=0.1)
    assert caught.value.kind == "timeout"


async def test_a_stream_slower_than_the_idle_limit_in_all_but_never_silent_that_long_is_a_turn() -> None:
    """H10."""
    slow = [event for _ in range(8) for event in (TextDelta("a"), 0.05)]
    turn = await assemble(_stream([*slow, TurnDone(StopReason.END)]), strict=True, idle_timeout_s=0.25, timeout_s=60)
    assert turn.text == "a" * 8


async def test_a_cancel_is_a_cancel_and_no_fault() -> None:
    """R-154: the assembler takes only its own time limit for one."""
    task = asyncio.create_task(assemble(_stream([60.0]), strict=True, idle_timeout_s=30, timeout_s=30))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_stream_is_closed_after_a_fault_and_its_events_were_shown_until_then() -> None:
    """R-152."""
    closed: list[bool] = []
    shown: list[ModelEvent] = []

    async def stream() -> AsyncIterator[ModelEvent]:
        try:
            yield TextDelta("a")
            yield CallDelta(7, None, None, "{}")
            yield TextDelta("never")
        finally:
            closed.append(True)

    with pytest.raises(StreamFaultError):
        await assemble(stream(), strict=True, idle_timeout_s=9, timeout_s=9, on_delta=shown.append)
    assert (closed, shown) == ([True], [TextDelta("a")])


async def test_a_fault_the_client_raises_itself_gets_the_usage_reported_before_it() -> None:
    """R-153."""

    async def stream() -> AsyncIterator[ModelEvent]:
        yield UsageReport(Usage(5, 6))
        raise StreamFaultError("connection", "gone")

    with pytest.raises(StreamFaultError) as caught:
        await assemble(stream(), strict=True, idle_timeout_s=9, timeout_s=9)
    assert caught.value.usage == Usage(5, 6)
