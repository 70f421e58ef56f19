"""The scripted model: what it says depends on the request and on nothing it remembers."""

import time

import pytest

from perdure.contracts.messages import AssistantTurn, CallFault, StopReason, Usage
from perdure.errors import ModelError, StreamFaultError
from perdure.journal.transcript import Transcript, TurnEntry, UserEntry
from perdure.ports import ModelClient
from perdure.prompting.request import ModelRequest
from perdure.runtime.turns import assemble
from perdure.testing.scripted import Reply, ScriptedCall, ScriptedModel, ScriptExhaustedError, calls, fault, text


def request_after(turns: int) -> ModelRequest:
    transcript = Transcript()
    transcript.append(UserEntry("go"))
    for number in range(turns):
        transcript.append(TurnEntry(f"t.{number}", AssistantTurn()))
    return ModelRequest("", (), transcript.view())


async def reply_of(model: ModelClient, turns: int = 0) -> AssistantTurn:
    stream = model.stream(request_after(turns))
    return await assemble(stream, strict=model.strict, idle_timeout_s=0.2, timeout_s=5)


async def test_the_reply_is_chosen_by_the_count_of_turns_and_never_by_a_counter() -> None:
    """O14, formats.md: a resumed process goes on where the script was."""
    model = ScriptedModel([text("zero"), text("one"), text("two")])
    assert (await reply_of(model, 2)).text == "two"
    assert (await reply_of(model, 0)).text == "zero"
    assert (await reply_of(model, 0)).text == "zero"
    assert [request.transcript.turns for request in model.requests] == [2, 0, 0]


async def test_a_function_of_the_request_may_take_the_place_of_a_list() -> None:
    """O14."""
    model = ScriptedModel(lambda request: text(f"after {request.transcript.turns}"))
    assert (await reply_of(model, 3)).text == "after 3"


@pytest.mark.parametrize("chunk", [0, 1, 16, 10_000])
async def test_text_and_calls_come_whole_whatever_the_chunk(chunk: int) -> None:
    """O14, R-160."""
    wanted = calls(("read", {"path": "a" * 50}), ("ping", ""), text="some words before it")
    turn = await reply_of(ScriptedModel([wanted], chunk=chunk))
    assert turn.text == "some words before it"
    assert [(call.name, call.arguments) for call in turn.calls] == [("read", {"path": "a" * 50}), ("ping", {})]
    assert (turn.stop, turn.usage, turn.model) == (StopReason.CALLS, Usage(10, 20), "scripted")


async def test_broken_arguments_wire_ids_stop_and_usage_can_be_scripted() -> None:
    """H04, H11, O14."""
    broken = ScriptedCall("read", '{"path": "half', wire_id="same")
    reply = Reply(
        text="t", calls=(broken, ScriptedCall("read", {}, wire_id="same")), stop=StopReason.LENGTH, usage=None
    )
    turn = await reply_of(ScriptedModel([reply]))
    assert [(call.fault, call.wire_id) for call in turn.calls] == [(CallFault.CUT, "same"), (None, "same")]
    assert (turn.stop, turn.usage) == (StopReason.LENGTH, Usage())


async def test_a_script_that_is_too_short_says_so() -> None:
    """O14."""
    with pytest.raises(ScriptExhaustedError, match="reply 1 was asked for and the script has 1"):
        await reply_of(ScriptedModel([text("only")]), 1)


@pytest.mark.parametrize(
    ("kind", "seen"), [("no_terminal", "no_terminal"), ("half_call", "no_terminal"), ("idle", "idle")]
)
async def test_a_broken_stream_can_be_scripted(kind: str, seen: str) -> None:
    """H10."""
    with pytest.raises(StreamFaultError) as caught:
        await reply_of(ScriptedModel([fault(kind)]))
    assert caught.value.kind == seen


@pytest.mark.parametrize(
    ("kind", "retryable"),
    [("connection", True), ("rate_limited", True), ("overloaded", True), ("bad_request", False), ("auth", False)],
)
async def test_a_refusal_can_be_scripted(kind: str, retryable: bool) -> None:
    """O14."""
    with pytest.raises(ModelError) as caught:
        await reply_of(ScriptedModel([fault(kind, retry_after_s=2 if kind == "rate_limited" else None)]))
    assert (caught.value.kind, caught.value.retryable) == (kind, retryable)
    assert caught.value.retry_after_s == (2 if kind == "rate_limited" else None)


async def test_a_fault_may_be_followed_by_the_reply_when_the_same_question_comes_again() -> None:
    """H10."""
    model = ScriptedModel([fault("no_terminal", then=fault("rate_limited", then=text("at last")))])
    with pytest.raises(StreamFaultError):
        await reply_of(model)
    with pytest.raises(ModelError):
        await reply_of(model)
    assert (await reply_of(model)).text == "at last"
    assert (await reply_of(model)).text == "at last"


def test_an_unknown_fault_is_refused_at_once() -> None:
    """O14."""
    with pytest.raises(ValueError, match="unknown fault 'no_terminals'"):
        fault("no_terminals")


async def test_a_delay_is_waited_once_for_each_reply() -> None:
    """O14."""
    began = time.monotonic()
    await reply_of(ScriptedModel([text("x" * 100)], chunk=1, delay_ms=60))
    assert 0.06 <= time.monotonic() - began < 2
