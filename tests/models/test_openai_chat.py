"""The Chat Completions adapter: the official SDK against the wire server, over a socket."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from perdure.contracts.agents import Settings
from perdure.contracts.messages import (
    AssistantTurn,
    CallFault,
    CallPart,
    Observation,
    ObservationStatus,
    OpaquePart,
    StopReason,
    TextPart,
    ToolCall,
    ToolDescriptor,
    Usage,
)
from perdure.errors import ModelError, StreamFaultError
from perdure.journal.transcript import Entry, ResultsEntry, Transcript, TurnEntry, UserEntry
from perdure.models.openai_chat import OpenAIChat, chat_messages
from perdure.ports import ModelEvent
from perdure.prompting.request import ModelRequest
from perdure.runtime.turns import assemble
from perdure.testing import wire
from perdure.testing.replies import REFUSALS, Reply, ScriptedCall, calls, fault, text

KEY = "sk-test-0123456789abcdef"
READ = ToolDescriptor("read", "Reads.", {"type": "object", "properties": {"path": {"type": "string"}}})
PING = ToolDescriptor("ping", "", {"type": "object"})


def asked(*entries: Entry, **parts: Any) -> ModelRequest:
    transcript = Transcript()
    for entry in entries or (UserEntry("go"),):
        transcript.append(entry)
    return ModelRequest(**{"instructions": "", "tools": (), "transcript": transcript.view(), **parts})


def seen(call: str, words: str) -> Observation:
    return Observation(call, "tool", ObservationStatus.COMPLETED, words)


@asynccontextmanager
async def talking(
    replies: Sequence[Reply], faults: Sequence[wire.CutAfter | wire.Status | wire.Stall] = (), **options: Any
) -> AsyncIterator[tuple[wire.WireServer, OpenAIChat]]:
    async with wire.serve("openai-chat", replies, faults, **options) as server:
        model = OpenAIChat("any-model", base_url=server.base_url, api_key=KEY)
        try:
            yield server, model
        finally:
            await model.close()
            await model.close()


async def turn_of(model: OpenAIChat, request: ModelRequest, idle_timeout_s: float = 30) -> AssistantTurn:
    return await assemble(model.stream(request), strict=model.strict, idle_timeout_s=idle_timeout_s, timeout_s=60)


async def error_of(model: OpenAIChat, **options: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        await turn_of(model, asked(), **options)
    return caught.value


# Replies


@pytest.mark.parametrize("chunk", [0, 1, 16])
async def test_text_and_calls_come_through_the_sdk_in_order_with_usage_and_model(chunk: int) -> None:
    """R-148, R-150, S-027."""
    usage = Usage(100, 7, 60, 3)
    reply = Reply("Größe 😎", (ScriptedCall("read", {"path": "ä"}), ScriptedCall("ping", "")), usage=usage)
    async with talking([reply], chunk=chunk) as (server, model):
        turn = await turn_of(model, asked(tools=(READ, PING)))
    assert turn.text == "Größe 😎"
    assert [(call.name, call.arguments, call.fault) for call in turn.calls] == [
        ("read", {"path": "ä"}, None),
        ("ping", {}, None),
    ]
    assert (turn.stop, turn.usage, turn.model) == (StopReason.CALLS, usage, "any-model")
    assert len(server.requests) == 1
    assert not server.refusals


@pytest.mark.parametrize("stop", [StopReason.END, StopReason.LENGTH, StopReason.REFUSED])
async def test_the_reason_a_reply_ended_is_told_apart(stop: StopReason) -> None:
    """R-148, H10."""
    async with talking([Reply("half", stop=stop)]) as (_, model):
        assert (await turn_of(model, asked())).stop is stop


async def test_usage_the_server_does_not_report_is_unknown() -> None:
    """R-148: absent is not zero."""
    async with talking([Reply("a", usage=None)]) as (_, model):
        assert (await turn_of(model, asked())).usage == Usage()


async def test_usage_that_is_no_count_within_64_bits_is_unknown() -> None:
    """R-148: it says nothing, and the reply is not lost for it."""
    async with talking([Reply("a", usage=Usage(10**30, 2**63 - 1, -1))]) as (_, model):
        turn = await turn_of(model, asked())
    assert (turn.text, turn.usage) == ("a", Usage(None, 2**63 - 1, None, 0))


async def test_broken_arguments_are_a_fault_of_the_call_and_go_back_as_an_object() -> None:
    """H11, H13, H04: what goes back to the provider is valid JSON, under an id of our own."""
    script = [calls(ScriptedCall("read", '{"path": "ha', "same"), ScriptedCall("ping", '["x"]', "same")), text("ok")]
    async with talking(script) as (server, model):
        turn = await turn_of(model, asked(tools=(READ, PING)))
        assert [call.fault for call in turn.calls] == [CallFault.NOT_JSON, CallFault.NOT_AN_OBJECT]
        results = ResultsEntry((seen("t.0", "bad"), seen("t.1", "bad")))
        again = asked(UserEntry("go"), TurnEntry("t", turn), results, tools=(READ, PING))
        assert (await turn_of(model, again)).text == "ok"
    sent = server.requests[1].body["messages"][1]["tool_calls"]
    assert [(call["id"], call["function"]["arguments"]) for call in sent] == [("call_0_0", "{}"), ("call_0_1", "{}")]
    assert not server.refusals
    assert not server.warnings


# What goes on the wire


def test_a_conversation_is_projected_with_ids_from_places_and_results_behind_their_turn() -> None:
    """S-023, S-028, S-029, R-149, H04."""
    first = AssistantTurn((TextPart("look"), CallPart(ToolCall("read", {"b": 1, "a": 2}, wire_id="x"))))
    second = AssistantTurn((CallPart(ToolCall("ping", wire_id="x")), CallPart(ToolCall("read", wire_id=""))))
    request = asked(
        UserEntry("task"),
        TurnEntry("m.0", first),
        ResultsEntry((seen("m.0.0", "r0"),)),
        TurnEntry("m.1", second),
        ResultsEntry((seen("m.1.1", "late"),)),
        UserEntry("a person speaks"),
        ResultsEntry((seen("m.1.0", "early"),)),
        instructions="Be brief.",
    )

    def called(wire_id: str, name: str, arguments: str) -> dict[str, Any]:
        return {"id": wire_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    assert chat_messages(request) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "task"},
        {"role": "assistant", "content": "look", "tool_calls": [called("call_0_0", "read", '{"a":2,"b":1}')]},
        {"role": "tool", "tool_call_id": "call_0_0", "content": "r0"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [called("call_1_0", "ping", "{}"), called("call_1_1", "read", "{}")],
        },
        {"role": "tool", "tool_call_id": "call_1_0", "content": "early"},
        {"role": "tool", "tool_call_id": "call_1_1", "content": "late"},
        {"role": "user", "content": "a person speaks"},
    ]


def test_nothing_empty_goes_on_the_wire() -> None:
    """H14, S-025: no blank text, no turn without content, no unanswered call, no other provider's part."""
    request = asked(
        UserEntry("task"),
        TurnEntry("m.0", AssistantTurn()),
        UserEntry(" \n"),
        TurnEntry("m.1", AssistantTurn((TextPart(" "), OpaquePart("other", {"s": 1})))),
        UserEntry("go on"),
        TurnEntry("m.2", AssistantTurn((CallPart(ToolCall("read")),))),
        instructions="  ",
    )
    assert chat_messages(request) == [{"role": "user", "content": "task"}, {"role": "user", "content": "go on"}]


async def test_a_name_the_model_made_up_goes_back_in_characters_the_service_takes() -> None:
    """H13: an unknown name is not refused by the provider for ever after."""
    turn = AssistantTurn((CallPart(ToolCall("functions.read file" + "x" * 80)),))
    async with talking(lambda body: text("ok")) as (server, model):  # type: ignore[arg-type]
        await turn_of(model, asked(UserEntry("go"), TurnEntry("m", turn), ResultsEntry((seen("m.0", "no such tool"),))))
    name = server.requests[0].body["messages"][1]["tool_calls"][0]["function"]["name"]
    assert name.startswith("functions_read_filexxx")
    assert len(name) == 64
    assert not server.refusals


async def test_settings_tools_and_choice_are_sent_only_where_there_is_something_to_send() -> None:
    """S-024, S-025, S-026."""
    chosen = Settings(temperature=0.5, seed=7, max_output_tokens=99)
    async with talking([text("a")]) as (server, model):
        await turn_of(model, asked())
        await turn_of(model, asked(tools=(READ, PING), tool_choice="any", settings=chosen))
        await turn_of(model, asked(tools=(READ,)))
    bare, full, auto = (request.body for request in server.requests)
    assert set(bare) == {"model", "messages", "stream", "stream_options", "max_tokens"}
    assert full["tool_choice"] == "required"
    assert auto["tool_choice"] == "auto"
    assert (full["temperature"], full["seed"], full["max_tokens"]) == (0.5, 7, 99)
    assert [tool["function"] for tool in full["tools"]] == [
        {"name": "read", "description": "Reads.", "parameters": READ.input_schema},
        {"name": "ping", "parameters": {"type": "object", "properties": {}}},
    ]
    assert not server.refusals


def test_the_output_limit_is_named_as_the_server_knows_it() -> None:
    """OpenAI refuses the old name for reasoning models; compatible servers drop the new one in silence."""
    for url, name in [
        (None, "max_completion_tokens"),
        ("https://eu.api.openai.com/v1", "max_completion_tokens"),
        ("http://127.0.0.1:8000/v1", "max_tokens"),
        ("https://api.openai.com.example/v1", "max_tokens"),
    ]:
        assert OpenAIChat("m", base_url=url, api_key=KEY)._output_limit() == name


async def test_equal_requests_are_equal_bytes() -> None:
    """Same inputs, same bytes."""
    async with talking([text("a")]) as (server, model):
        for _ in range(2):
            await turn_of(model, asked(UserEntry("ä"), tools=(READ, PING)))
    assert server.requests[0].raw == server.requests[1].raw


async def test_a_request_without_a_word_is_refused_before_it_is_sent() -> None:
    """H14."""
    async with talking([text("a")]) as (server, model):
        with pytest.raises(ModelError, match="nothing to say"):
            await turn_of(model, asked(UserEntry("")))
    assert not server.requests


# Broken streams


@pytest.mark.parametrize("cut", [0, 1, 200, 900])
async def test_a_connection_torn_inside_the_reply_is_a_broken_stream_and_is_not_retried_here(cut: int) -> None:
    """H10, R-153."""
    reply = calls(("read", {"path": "x" * 400}), text="first some words")
    async with talking([reply], [wire.CutAfter(bytes=cut, request=1)]) as (server, model):
        error = await error_of(model)
        assert isinstance(error, StreamFaultError)
        assert (error.kind, error.retryable) == ("connection", True)
        assert len(server.requests) == 1
        assert (await turn_of(model, asked())).calls[0].arguments == {"path": "x" * 400}


@pytest.mark.parametrize("reply", [text("a few words"), calls(("read", {"path": "p"}))])
async def test_a_reply_that_ends_cleanly_without_its_finish_reason_is_a_fault(reply: Reply) -> None:
    """H10: text, a whole call, and half a call."""
    for kind in ("no_terminal", "half_call"):
        async with talking([fault(kind, reply)]) as (_, model):
            assert (await error_of(model)).kind == "no_terminal"


@pytest.mark.slow
async def test_every_cut_before_the_finish_reason_is_a_fault_and_every_later_one_is_the_turn() -> None:
    """H10, R-153, R-154: swept over the bytes of a whole reply."""
    reply = calls(("ping", {"a": 1}), text="hello")
    async with talking([reply], chunk=4) as (_, model):
        whole = await turn_of(model, asked())
    from perdure.testing.wire.openai_chat import PROTOCOL

    asking = {"model": "any-model", "stream": True, "stream_options": {"include_usage": True}}
    pieces = PROTOCOL.answer(reply, asking, 0, 4).pieces
    end = len(b"".join(pieces[:-2]))
    for cut in (*range(0, end, 97), end - 3, end, end + 20):
        async with talking([reply], [wire.CutAfter(bytes=cut, clean=True)], chunk=4) as (_, model):
            if cut < end - 2:
                assert (await error_of(model)).kind in ("no_terminal", "protocol"), cut
            else:
                turn = await turn_of(model, asked())
                assert (turn.content, turn.stop) == (whole.content, whole.stop)
                assert turn.usage == Usage()
    async with talking([reply], [wire.CutAfter(bytes=end)], chunk=4) as (server, model):
        assert (await turn_of(model, asked())).content == whole.content
        assert len(server.requests) == 1


async def test_a_silent_server_is_cut_by_the_idle_limit_and_the_connection_is_given_up() -> None:
    """H10."""
    async with talking([text("x" * 100)], [wire.Stall(bytes=300, request=2)]) as (server, model):
        await turn_of(model, asked())
        error = await error_of(model, idle_timeout_s=0.3)
        assert error.kind == "idle"
        assert (await turn_of(model, asked())).text == "x" * 100
    assert len(server.requests) == 3


async def _raw(*chunks: object, content_type: str = "text/event-stream") -> AssistantTurn | ModelError:
    """What the adapter makes of an answer written by hand."""
    lines = [chunk if isinstance(chunk, str) else json.dumps(chunk) for chunk in chunks]
    body = "".join(f"data: {line}\n\n" for line in lines)
    async with talking([text("a")], [wire.Status(200, {"Content-Type": content_type}, body=body)]) as (_, model):
        try:
            return await turn_of(model, asked())
        except ModelError as error:
            return error


def _chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta or {}, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice], **more}


async def test_what_is_no_chunk_is_a_fault_of_the_protocol() -> None:
    """R-154: bytes that are no JSON, an error object in a chunk's place, an empty body."""
    for broken in (("{no json",), (_chunk({"content": "a"}), "<html>"), ()):
        error = await _raw(*broken)
        assert isinstance(error, StreamFaultError)
        assert (error.kind, error.retryable) == ("protocol", True)
    failed = {"error": {"message": "The server had an error", "type": "server_error", "param": None, "code": None}}
    error = await _raw(_chunk({"content": "a"}), failed)
    assert isinstance(error, StreamFaultError)
    assert (error.kind, error.retryable) == ("overloaded", True)
    spent = {"error": {"message": "No more", "type": "insufficient_quota", "code": "insufficient_quota"}}
    error = await _raw(_chunk({"content": "a"}), spent)
    assert isinstance(error, ModelError)
    assert (error.kind, error.retryable) == ("quota", False)


async def test_content_behind_the_finish_reason_is_a_fault_and_an_empty_delta_is_not() -> None:
    """R-152."""
    error = await _raw(_chunk({"content": "a"}, "stop"), _chunk({"content": "b"}))
    assert isinstance(error, StreamFaultError)
    assert error.kind == "after_end"
    turn = await _raw(_chunk({"content": "a"}, "stop"), _chunk({}, "stop"), _chunk(choices=[]), "[DONE]")
    assert isinstance(turn, AssistantTurn)
    assert turn.text == "a"


async def test_fragments_as_compatible_servers_write_them_find_their_calls() -> None:
    """H12 (a), (b), (d) through the SDK: equal or missing indexes, whole arguments as an object, null fields."""

    def call(index: int | None, wire_id: str | None, name: str | None, arguments: Any) -> dict[str, Any]:
        made = {"id": wire_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        return _chunk({"content": None, "tool_calls": [made if index is None else {**made, "index": index}]})

    streams = [
        [call(0, "a", "read", '{"p":1}'), call(0, "b", "write", '{"q":2}')],
        [call(None, "a", "read", '{"p"'), call(None, None, None, ":1}"), call(None, "b", "write", '{"q":2}')],
        [call(0, "a", "read", {"p": 1}), call(1, "a", "write", {"q": 2})],
        [call(0, "a", "read", None), call(0, None, "", '{"p":1}'), call(1, "", "write", '{"q":2}')],
    ]
    for stream in streams:
        turn = await _raw(*stream, _chunk({}, "tool_calls"))
        assert isinstance(turn, AssistantTurn), turn
        assert [(made.name, made.arguments) for made in turn.calls] == [("read", {"p": 1}), ("write", {"q": 2})]


async def test_a_refusal_in_words_is_a_reply_that_ended() -> None:
    """R-148."""
    turn = await _raw(_chunk({"refusal": "I can"}), _chunk({"refusal": "not."}), _chunk({}, "stop"))
    assert isinstance(turn, AssistantTurn)
    assert (turn.text, turn.stop) == ("I cannot.", StopReason.END)


async def test_an_answer_that_is_a_page_or_one_object_is_no_stream() -> None:
    """R-154."""
    for kind in ("text/html; charset=utf-8", "application/json"):
        error = await _raw("{}", content_type=kind)
        assert isinstance(error, ModelError)
        assert (error.kind, error.retryable) == ("protocol", False)


# Refusals


@pytest.mark.parametrize("kind", [kind for kind in REFUSALS if kind != "protocol"])
async def test_each_refusal_of_the_service_has_its_kind_and_is_asked_once(kind: str) -> None:
    """O14, R-162: foreign errors are translated at the adapter, once, and it retries nothing."""
    async with talking([fault(kind, retry_after_s=3)]) as (server, model):
        error = await error_of(model)
    assert (error.kind, error.retry_after_s) == (kind, 3.0)
    assert error.retryable is (kind in ("rate_limited", "overloaded", "timeout"))
    assert not isinstance(error, StreamFaultError)
    assert len(server.requests) == len(server.refusals) == 1


def _said(message: str, code: str | None = None, kind: str = "invalid_request_error") -> str:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})


@pytest.mark.parametrize(
    ("status", "body", "kind", "retryable"),
    [
        (400, "", "protocol", False),
        (400, "<html>no</html>", "protocol", False),
        (400, "plain words", "protocol", False),
        (400, "[]", "protocol", False),
        (400, '{"error": "in one word"}', "bad_request", False),
        (400, '{"detail": [{"loc": ["body"]}]}', "bad_request", False),
        (400, _said("This model's maximum context length is 10 tokens."), "context_too_long", False),
        (422, _said("no"), "bad_request", False),
        (401, "<html>", "auth", False),
        (402, "", "quota", False),
        (403, _said("no"), "auth", False),
        (404, "<html>nginx</html>", "not_found", False),
        (408, "", "timeout", True),
        (413, "<html>", "context_too_long", False),
        (429, "", "rate_limited", True),
        (429, _said("credit", "credit_balance_exhausted", "insufficient_quota"), "quota", False),
        (
            429,
            _said("Request too large for m on tokens per min", "rate_limit_exceeded", "tokens"),
            "context_too_long",
            False,
        ),
        (500, "", "overloaded", True),
        (502, "<html>bad gateway</html>", "overloaded", True),
        (503, _said("busy", "slow_down"), "overloaded", True),
        (529, "", "overloaded", True),
    ],
)
async def test_the_kind_of_an_error_comes_from_its_code_then_its_status(
    status: int, body: str, kind: str, retryable: bool
) -> None:
    """R-162, O6."""
    async with talking([text("a")], [wire.Status(status, body=body)]) as (server, model):
        error = await error_of(model)
    assert (error.kind, error.retryable) == (kind, retryable)
    assert str(status) in str(error)
    assert error.where == "openai:any-model"
    assert len(server.requests) == 1


async def test_a_server_that_is_not_there_is_a_connection_error() -> None:
    """H10."""
    async with talking([text("a")]) as (server, model):
        await server.stop()
        error = await error_of(model)
    assert (error.kind, error.retryable) == ("connection", True)


async def test_the_key_is_in_no_error_no_repr_and_no_recorded_header() -> None:
    """R-162."""
    echo = _said(f"Incorrect API key provided: {KEY}.", "invalid_api_key")
    async with talking([text("a")], [wire.Status(401, body=echo)]) as (server, model):
        error = await error_of(model)
        await turn_of(model, asked())
    for shown in (str(error), repr(error), error.found, repr(model), repr(vars(model)), repr(server.requests)):
        assert KEY not in shown
    assert "[key]" in str(error)


async def test_two_requests_may_be_under_way_at_once() -> None:
    """R-150: one client serves every run of a process."""
    async with talking([text("x" * 200)], chunk=3) as (server, model):
        turns = await asyncio.gather(*(turn_of(model, asked()) for _ in range(5)))
    assert {turn.text for turn in turns} == {"x" * 200}
    assert len(server.requests) == 5


@pytest.mark.slow
async def test_a_stream_left_early_gives_its_connection_back() -> None:
    """R-154."""
    async with talking([text("x" * 5000)], chunk=1) as (server, model):
        stream: AsyncIterator[ModelEvent] = model.stream(asked())
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        assert (await turn_of(model, asked())).text == "x" * 5000
    assert len(server.requests) == 2
