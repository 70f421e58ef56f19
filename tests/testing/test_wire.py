"""The stand-in for Chat Completions: it refuses what the service refuses, and answers as the service answers."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from perdure.contracts.messages import Usage
from perdure.errors import ConfigurationError
from perdure.testing import wire
from perdure.testing.replies import Reply, ScriptedCall, calls, fault, text
from perdure.testing.wire.openai_chat import HTTP_RULES, RULES
from perdure.testing.wire.openai_messages import MAX_CONTENT

KNOWN = ", ".join(sorted(wire.PROTOCOLS))
GOOD_HEADERS = {"Authorization": "Bearer key-for-tests", "Content-Type": "application/json"}
CALL = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
OTHER = {"id": "c2", "type": "function", "function": {"name": "read", "arguments": "{}"}}
TOOL = {
    "type": "function",
    "function": {"name": "read", "description": "Reads.", "parameters": {"type": "object", "properties": {}}},
}


def good() -> dict[str, Any]:
    """A request the service takes."""
    return {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "go"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL, OTHER]},
            {"role": "tool", "tool_call_id": "c2", "content": "two"},
            {"role": "tool", "tool_call_id": "c1", "content": "one"},
        ],
        "tools": [TOOL],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 1,
        "max_tokens": 10,
    }


async def send(
    base_url: str,
    body: object,
    *,
    method: str = "POST",
    path: str = "/chat/completions",
    headers: dict[str, str] | None = None,
) -> tuple[int, dict[str, str], str]:
    """One request over a socket, written by hand: status, headers, body (chunks joined)."""
    url = urlsplit(base_url)
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {url.path}{path} HTTP/1.1", f"Host: {url.netloc}", f"Content-Length: {len(raw)}"]
    lines += [f"{name}: {value}" for name, value in (GOOD_HEADERS if headers is None else headers).items()]
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write("\r\n".join([*lines, "Connection: close", "", ""]).encode() + raw)
    answer = (await reader.read()).decode()
    writer.close()
    head, _, rest = answer.partition("\r\n\r\n")
    status, *pairs = head.split("\r\n")
    found = {name.lower(): value for name, _, value in (pair.partition(": ") for pair in pairs)}
    if found.get("transfer-encoding") == "chunked":
        rest = "".join(_chunks(rest))
    return int(status.split()[1]), found, rest


def _chunks(rest: str) -> list[str]:
    data, found, length = rest.encode(), [], 1
    while length:
        size, line_end, data = data.partition(b"\r\n")
        if not line_end:
            raise ConnectionResetError("the answer broke off")
        length = int(size, 16)
        found.append(data[:length].decode())
        data = data[length + 2 :]
    return found


def _message(index: int, **changed: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        body["messages"][index] = {**body["messages"][index], **changed}

    return change


def _without(index: int, name: str) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["messages"][index].pop(name)


def _called(**changed: Any) -> Callable[[dict[str, Any]], None]:
    """The first call of the assistant's message, changed; a None takes the field away."""
    call = {name: value for name, value in {**CALL, **changed}.items() if value is not None}
    return _message(2, tool_calls=[call, OTHER])


def _function(**changed: Any) -> Callable[[dict[str, Any]], None]:
    function = {"name": "read", "arguments": "{}", **changed}
    return _called(function={name: value for name, value in function.items() if value is not None})


def _tool(**changed: Any) -> Callable[[dict[str, Any]], None]:
    function = {**TOOL["function"], **changed}  # type: ignore[dict-item]
    return _set(tools=[{**TOOL, "function": {name: value for name, value in function.items() if value is not None}}])


def _set(**changed: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body.update(changed)


def _schema(**schema: Any) -> Callable[[dict[str, Any]], None]:
    return _tool(parameters=schema)


# One request for each rule: what is changed in a good one, and the `param` and `code` of the answer.
BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str | None, str | None]] = {
    "argument_unknown": (_set(top_k=3), None, None),
    "model_missing": (lambda body: body.pop("model"), None, None),
    "model_type": (_set(model=4), "model", "invalid_type"),
    "stream_type": (_set(stream="yes"), "stream", "invalid_type"),
    "stream_options_alone": (_set(stream=False), "stream_options", None),
    "temperature_range": (_set(temperature=2.5), "temperature", "decimal_above_max_value"),
    "top_p_range": (_set(top_p=-0.1), "top_p", "decimal_below_min_value"),
    "penalty_range": (_set(presence_penalty=3), "presence_penalty", "decimal_above_max_value"),
    "number_type": (_set(seed="x"), "seed", "invalid_type"),
    "max_tokens_range": (_set(max_tokens=0), "max_tokens", "integer_below_min_value"),
    "max_tokens_twice": (_set(max_completion_tokens=5), "max_tokens", "invalid_parameter_combination"),
    "n_range": (_set(n=129), "n", "integer_above_max_value"),
    "stop_too_many": (_set(stop=list("abcde")), "stop", "array_above_max_length"),
    "metadata_too_many": (_set(metadata={str(n): "" for n in range(17)}), "metadata", "object_above_max_properties"),
    "tools_type": (_set(tools={}), "tools", "invalid_type"),
    "tools_empty": (_set(tools=[]), "tools", "empty_array"),
    "tools_too_many": (_set(tools=[TOOL] * 129), "tools", "array_above_max_length"),
    "tool_type": (_set(tools=[{**TOOL, "type": "magic"}]), "tools[0].type", "invalid_value"),
    "tool_function_missing": (_set(tools=[{"type": "function"}]), "tools[0].function", "missing_required_parameter"),
    "tool_name_missing": (_tool(name=None), "tools[0].function.name", "missing_required_parameter"),
    "tool_name_pattern": (_tool(name="a.b"), "tools[0].function.name", "invalid_value"),
    "tool_name_too_long": (_tool(name="a" * 65), "tools[0].function.name", "string_above_max_length"),
    "tool_description_too_long": (
        _tool(description="a" * 1025),
        "tools[0].function.description",
        "string_above_max_length",
    ),
    "tool_schema_type": (_tool(parameters=[]), "tools[0].function.parameters", "invalid_function_parameters"),
    "tool_schema_not_object": (
        _schema(type="string"),
        "tools[0].function.parameters",
        "invalid_function_parameters",
    ),
    "tool_schema_no_properties": (
        _schema(type="object"),
        "tools[0].function.parameters",
        "invalid_function_parameters",
    ),
    "tool_schema_no_items": (
        _schema(type="object", properties={"a": {"anyOf": [{"type": "null"}, {"type": "array"}]}}),
        "tools[0].function.parameters",
        "invalid_function_parameters",
    ),
    "tool_choice_alone": (lambda body: body.pop("tools"), "tool_choice", None),
    "tool_choice_unknown": (_set(tool_choice="any"), "tool_choice", "invalid_value"),
    "tool_choice_not_offered": (
        _set(tool_choice={"type": "function", "function": {"name": "gone"}}),
        "tool_choice",
        None,
    ),
    "parallel_alone": (
        lambda body: [body.pop("tools"), body.update(parallel_tool_calls=True)],
        "parallel_tool_calls",
        None,
    ),
    "messages_missing": (lambda body: body.pop("messages"), "messages", "missing_required_parameter"),
    "messages_type": (_set(messages="hi"), "messages", "invalid_type"),
    "messages_empty": (_set(messages=[]), "messages", "empty_array"),
    "message_type": (_set(messages=["hi"]), "messages[0]", "invalid_type"),
    "role_missing": (_without(0, "role"), "messages[0].role", "missing_required_parameter"),
    "role_unknown": (_message(0, role="robot"), "messages[0].role", "invalid_value"),
    "content_null": (_message(1, content=None), "messages.[1].content", None),
    "content_type": (_message(1, content={}), "messages[1].content", "invalid_type"),
    "content_empty_array": (_message(1, content=[]), "messages[1].content", "empty_array"),
    "content_part_type": (_message(1, content=[{"type": "song"}]), "messages[1].content[0].type", "invalid_value"),
    "content_part_text": (
        _message(1, content=[{"type": "text"}]),
        "messages[1].content[0].text",
        "missing_required_parameter",
    ),
    "content_too_long": (
        _message(1, content="x" * (MAX_CONTENT + 1)),
        "messages[1].content",
        "string_above_max_length",
    ),
    "calls_empty": (_message(2, tool_calls=[]), "messages[2].tool_calls", "empty_array"),
    "calls_type": (_message(2, tool_calls="x"), "messages[2].tool_calls", "invalid_type"),
    "call_id_missing": (_called(id=None), "messages[2].tool_calls[0].id", "missing_required_parameter"),
    "call_type_missing": (_called(type=None), "messages[2].tool_calls[0].type", "missing_required_parameter"),
    "call_function_missing": (
        _called(function=None),
        "messages[2].tool_calls[0].function",
        "missing_required_parameter",
    ),
    "call_name_empty": (_function(name=""), "messages[2].tool_calls[0].function.name", "empty_string"),
    "call_name_pattern": (_function(name="a.b"), "messages[2].tool_calls[0].function.name", "invalid_value"),
    "call_arguments_missing": (
        _function(arguments=None),
        "messages[2].tool_calls[0].function.arguments",
        "missing_required_parameter",
    ),
    "call_arguments_type": (
        _function(arguments={}),
        "messages[2].tool_calls[0].function.arguments",
        "invalid_type",
    ),
    "tool_without_calls": (lambda body: body["messages"].pop(2), "messages.[2].role", None),
    "tool_id_missing": (_without(3, "tool_call_id"), "messages.[3].tool_call_id", None),
    "tool_id_unknown": (_message(3, tool_call_id="c9"), "messages.[3].tool_call_id", None),
    "tool_id_twice": (_message(4, tool_call_id="c2"), "messages.[4].tool_call_id", None),
    "calls_unanswered": (
        lambda body: body["messages"].insert(4, {"role": "user", "content": "hurry"}),
        "messages.[4].role",
        None,
    ),
}


def test_every_rule_names_its_public_source_and_has_a_test() -> None:
    """O14: the stand-in keeps to rules anyone can look up."""
    assert set(BROKEN) | set(HTTP_RULES) == set(RULES)
    assert all(len(source) > 10 for source in RULES.values())
    assert len(RULES) >= 25


async def test_a_good_request_breaks_no_rule() -> None:
    """O14."""
    async with wire.serve("openai-chat", lambda body: text("ok")) as server:
        status, headers, body = await send(server.base_url, good())
    assert (status, headers["content-type"]) == (200, "text/event-stream")
    assert body.endswith("data: [DONE]\n\n")
    assert not server.refusals


@pytest.mark.parametrize("rule", sorted(BROKEN))
async def test_a_request_that_breaks_one_rule_is_refused_by_that_rule_in_the_service_s_form(rule: str) -> None:
    """O14, H14."""
    change, param, code = BROKEN[rule]
    body = good()
    change(body)
    async with wire.serve("openai-chat", lambda body: text("never")) as server:
        status, headers, answer = await send(server.base_url, body)
    error = json.loads(answer)["error"]
    assert ([refusal.rule for refusal in server.refusals], status) == ([rule], 400)
    assert headers["content-type"] == "application/json"
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert error["message"]


@pytest.mark.parametrize(
    ("rule", "status", "request_"),
    [
        ("path_unknown", 404, {"path": "/completions/chat"}),
        ("method", 405, {"method": "GET"}),
        ("key_missing", 401, {"headers": {"Content-Type": "application/json"}}),
        ("key_missing", 401, {"headers": {"Content-Type": "application/json", "Authorization": "Basic eDp5"}}),
        ("key_missing", 401, {"headers": {"Content-Type": "application/json", "Authorization": "Bearer "}}),
        ("media_type", 400, {"headers": {"Authorization": "Bearer key-for-tests", "Content-Type": "text/plain"}}),
        ("json_malformed", 400, {"body": b"{"}),
        ("json_malformed", 400, {"body": b"[]"}),
        ("json_malformed", 400, {"body": b"\xff"}),
    ],
)
async def test_what_is_no_proper_request_is_refused_before_its_body_is_looked_at(
    rule: str, status: int, request_: dict[str, Any]
) -> None:
    """O14."""
    async with wire.serve("openai-chat", lambda body: text("never")) as server:
        got, headers, answer = await send(server.base_url, **{"body": good(), **request_})
    assert (got, [refusal.rule for refusal in server.refusals]) == (status, [rule])
    assert json.loads(answer)["error"]["message"]
    if rule == "method":
        assert headers["allow"] == "POST"


async def test_arguments_that_are_no_object_are_taken_and_noted() -> None:
    """H13: the service takes any string, a well-kept client sends an object."""
    body = good()
    _function(arguments="{bro")(body)
    async with wire.serve("openai-chat", lambda body: text("ok")) as server:
        assert (await send(server.base_url, body))[0] == 200
    assert server.warnings == ["messages[2].tool_calls[0]: the arguments are no JSON object"]


# Answers


def _events(body: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_a_streamed_answer_has_the_chunks_of_the_service() -> None:
    """O14: role first, then text, then calls, the finish reason, the usage in a chunk without choices, [DONE]."""
    reply = Reply("four", (ScriptedCall("read", {"a": 1}),), usage=Usage(5, 6, 2, 1))
    async with wire.serve("openai-chat", lambda body: reply, chunk=2) as server:
        _, _, body = await send(server.base_url, good())
    chunks = _events(body)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert deltas[0]["role"] == "assistant"
    assert [delta["content"] for delta in deltas[1:3]] == ["fo", "ur"]
    opening, *fragments = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert (opening["id"], opening["type"], opening["function"]) == (
        "call_00010000",
        "function",
        {"name": "read", "arguments": ""},
    )
    assert "".join(fragment["function"]["arguments"] for fragment in fragments) == '{"a":1}'
    assert all(set(fragment) == {"index", "function"} for fragment in fragments)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + [
        "tool_calls"
    ]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 11
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


async def test_without_stream_the_answer_is_one_object() -> None:
    """O14."""
    body = good()
    del body["stream"], body["stream_options"]
    async with wire.serve("openai-chat", lambda body: calls(("read", '{"a":'), text="t")) as server:
        _, headers, answer = await send(server.base_url, body)
    whole = json.loads(answer)
    assert headers["content-type"] == "application/json"
    assert (whole["object"], whole["usage"]["completion_tokens"]) == ("chat.completion", 20)
    message = whole["choices"][0]["message"]
    assert (message["content"], message["tool_calls"][0]["function"]["arguments"]) == ("t", '{"a":')


async def test_the_reply_s_number_is_the_count_of_assistant_messages() -> None:
    """formats.md: a server started anew goes on where the conversation is."""
    async with wire.serve("openai-chat", [text("zero"), text("one")]) as server:
        assert '"content": "one"' in (await send(server.base_url, good()))[2]
        status, _, answer = await send(server.base_url, {**good(), "messages": good()["messages"] * 2})
    assert status == 400
    assert "reply 2 was asked for and the script has 2" in json.loads(answer)["error"]["message"]
    assert [refusal.rule for refusal in server.refusals] == ["script_exhausted"]


async def test_a_script_that_raises_shows_at_the_client() -> None:
    """O14."""

    def replies(body: dict[str, Any]) -> Reply:
        raise KeyError("gone")

    async with wire.serve("openai-chat", replies) as server:
        status, _, answer = await send(server.base_url, good())
    assert (status, json.loads(answer)["error"]["code"]) == (400, "script_failed")
    assert "KeyError" in answer


async def test_faults_strike_the_request_they_name_and_once() -> None:
    """O14."""
    faults = [wire.Status(429, {"Retry-After": "2"}), wire.CutAfter(bytes=60, request=3), wire.Status(500, request=2)]
    async with wire.serve("openai-chat", lambda body: text("ok"), faults) as server:
        answers = [await send(server.base_url, good()) for _ in range(2)]
        with pytest.raises(ConnectionError):
            await send(server.base_url, good())
        answers.append(await send(server.base_url, good()))
    assert [status for status, _, _ in answers] == [429, 500, 200]
    assert answers[0][1]["retry-after"] == "2"
    assert json.loads(answers[0][2])["error"]["message"]
    assert [refusal.status for refusal in server.refusals] == [429, 500]
    assert [request.number for request in server.requests] == [1, 2, 3, 4]


async def test_a_clean_cut_is_a_proper_end_of_the_body_after_so_many_bytes() -> None:
    """H10."""
    async with wire.serve("openai-chat", lambda body: text("ok"), [wire.CutAfter(bytes=60, clean=True)]) as server:
        _, _, cut = await send(server.base_url, good())
        _, _, whole = await send(server.base_url, good())
    assert len(cut) == 60
    assert cut[:30] == whole[:30]


async def test_a_connection_serves_one_request_after_another() -> None:
    """O14."""
    async with wire.serve("openai-chat", lambda body: text("ok")) as server:
        url = urlsplit(server.base_url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        raw = json.dumps({**good(), "stream": False, "stream_options": None}).encode()
        head = f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n"
        head += "Authorization: Bearer key-for-tests\r\nContent-Type: application/json\r\n\r\n"
        for _ in range(3):
            writer.write(head.encode() + raw)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line[16:]) for line in answer.split(b"\r\n") if line.lower().startswith(b"content-length")
            )
            assert json.loads(await reader.readexactly(length))["object"] == "chat.completion"
        writer.close()
    assert len(server.requests) == 3


async def test_a_stalled_answer_ends_with_the_server() -> None:
    """H10: nothing keeps the stand-in from stopping."""
    async with wire.serve("openai-chat", [fault("idle")]) as server:
        url = urlsplit(server.base_url)
        task = asyncio.create_task(send(server.base_url, {**good(), "messages": good()["messages"][:2]}))
        await asyncio.sleep(0.2)
        assert not task.done()
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(task, 5)
    with pytest.raises(ConnectionError):
        await asyncio.open_connection(url.hostname, url.port)


async def test_bytes_that_are_no_http_end_their_own_connection_only() -> None:
    """O14."""
    async with wire.serve("openai-chat", lambda body: text("ok")) as server:
        url = urlsplit(server.base_url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(b"no http at all\r\n\r\n")
        assert await reader.read() == b""
        writer.close()
        assert (await send(server.base_url, good()))[0] == 200


async def test_an_unknown_protocol_is_refused_with_the_known_ones() -> None:
    """O15."""
    with pytest.raises(ConfigurationError, match=f"known are: {KNOWN}"):
        async with wire.serve("openai-chats", []):
            pass


# As a process


async def _process(folder: Path, *arguments: str) -> asyncio.subprocess.Process:
    source = str(Path(__file__).parents[2] / "src")
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "perdure.testing.wire", *arguments),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": source},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_as_a_process_it_says_where_it_listens_logs_requests_and_ends_on_sigterm(tmp_path: Path) -> None:
    """formats.md, testing kit."""
    (tmp_path / "script.py").write_text(
        "from perdure.testing.replies import text\n\ndef reply(body):\n    return text('about ' + body['model'])\n"
    )
    log = tmp_path / "requests.jsonl"
    arguments = ("openai-chat", "--replies", "script:reply", "--port", "0", "--request-log", str(log))
    process = await _process(tmp_path, *arguments)
    assert process.stdout is not None
    assert process.stderr is not None
    line = json.loads(await asyncio.wait_for(process.stdout.readline(), 20))
    assert list(line) == ["base_url"]
    _, _, body = await send(line["base_url"], good())
    assert '"about m"' in body
    assert (await send(line["base_url"], {**good(), "messages": []}))[0] == 400
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 20) == 0
    assert await process.stderr.read() == b""
    logged = [json.loads(entry) for entry in log.read_text().splitlines()]
    assert [(entry["number"], entry["status"], entry["rule"], entry["reply"]) for entry in logged] == [
        (1, 200, None, 1),
        (2, 400, "messages_empty", None),
    ]
    assert "key-for-tests" not in log.read_text()


@pytest.mark.parametrize(
    ("protocol", "replies", "says"),
    [
        ("smoke-signals", "script:replies", f"known are: {KNOWN}"),
        ("openai-chat", "script:gone", "'gone' is nothing"),
        ("openai-chat", "nowhere:replies", "importing nowhere failed"),
        ("openai-chat", "script", "named module:attribute"),
    ],
)
async def test_a_process_that_cannot_serve_says_why_and_exits_2(
    tmp_path: Path, protocol: str, replies: str, says: str
) -> None:
    """O15."""
    (tmp_path / "script.py").write_text("replies = []\n")
    process = await _process(tmp_path, protocol, "--replies", replies)
    out, err = await asyncio.wait_for(process.communicate(), 20)
    assert (process.returncode, out) == (2, b"")
    assert says in err.decode()
    assert "Traceback" not in err.decode()
