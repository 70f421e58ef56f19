"""OpenAI Chat Completions on the wire: the gate in front of the rules, and replies as chunks or as one object.

The form of the answers follows the API reference, "chat completion object" and "chat completion chunk object", and the
streaming events beside them. `RULES` names every rule by which a request is refused, each with its public source.
"""

import json
import time
from collections.abc import Iterator, Mapping

from perdure.contracts.contract import JsonObject
from perdure.contracts.messages import StopReason, Usage
from perdure.testing.replies import Reply, ScriptedCall
from perdure.testing.wire.openai_messages import MESSAGE_RULES, message_refusals
from perdure.testing.wire.openai_parameters import PARAMETER_RULES, parameter_refusals
from perdure.testing.wire.protocol import Answer, Received, Refusal

PREFIX = "/v1"
INDEXES = ("index",)
PATH = "/v1/chat/completions"

HTTP_RULES = {
    "path_unknown": "openai/openai-python#271 (Invalid URL)",
    "method": "API reference: POST /chat/completions; RFC 9110 15.5.6",
    "key_missing": "openai/openai-python#1434; error codes guide, 401 Invalid Authentication",
    "media_type": "openai/openai-openapi#502, #194 (code unsupported_content_type)",
    "json_malformed": "ChatGPTNextWeb/NextChat#4064, developersdigest/llm-answer-engine#58",
}

RULES = {**HTTP_RULES, **PARAMETER_RULES, **MESSAGE_RULES}
"""Every rule by its id, with where it is publicly stated or seen."""

_FINISH = {
    StopReason.END: "stop",
    StopReason.CALLS: "tool_calls",
    StopReason.LENGTH: "length",
    StopReason.REFUSED: "content_filter",
    StopReason.OTHER: "stop",
}

# Error codes guide: the status of each, and the codes of the billing errors.
_SCRIPTED = {
    "rate_limited": (429, "requests", "rate_limit_exceeded", "Rate limit reached for requests."),
    "overloaded": (503, "service_unavailable_error", "server_is_overloaded", "The engine is currently overloaded."),
    "timeout": (408, "request_timeout", None, "Request timed out."),
    "context_too_long": (
        400,
        "invalid_request_error",
        "context_length_exceeded",
        "This model's maximum context length is 8192 tokens.",
    ),
    "quota": (429, "insufficient_quota", "insufficient_quota", "You exceeded your current quota."),
    "auth": (401, "invalid_request_error", "invalid_api_key", "Incorrect API key provided."),
    "refused": (400, "invalid_request_error", "content_policy_violation", "The request was rejected."),
    "bad_request": (400, "invalid_request_error", None, "This refusal was scripted."),
    "not_found": (404, "invalid_request_error", "model_not_found", "The model does not exist."),
}


class OpenAIChatWire:
    """The protocol; see `WireProtocol`."""

    def check(self, request: Received, keys: Mapping[str, str]) -> Refusal | JsonObject:
        """The decoded body, or the first rule the request breaks."""
        refusal = _gate(request, keys.get("authorization", ""))
        if refusal is not None:
            return refusal
        try:
            body = json.loads(request.raw)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            found = "We could not parse the JSON body of your request. The API expects a JSON payload."
            return Refusal("json_malformed", found)
        for problem in parameter_refusals(body):
            return problem
        for problem in message_refusals(body):
            return problem
        return body

    def number(self, body: JsonObject) -> int:
        """The count of assistant messages."""
        return sum(message["role"] == "assistant" for message in body["messages"])

    def warnings(self, body: JsonObject) -> list[str]:
        """Calls sent back with arguments that are no JSON object: the service takes any string."""
        found = []
        for index, message in enumerate(body["messages"]):
            for place, call in enumerate(message.get("tool_calls") or ()):
                if not _is_object(call["function"]["arguments"]):
                    found.append(f"messages[{index}].tool_calls[{place}]: the arguments are no JSON object")
        return found

    def answer(self, reply: Reply, body: JsonObject, number: int, chunk: int) -> Answer:
        """A stream of chunks, or one object, as the body asks."""
        if reply.fault == "protocol":
            return Answer("text/html", (b"<html><body>A proxy's page.</body></html>",))
        if not body.get("stream"):
            return Answer("application/json", (json.dumps(_whole(reply, body, number)).encode(),))
        pieces = tuple(_sse(piece) for piece in _chunks(reply, body, number, chunk))
        if reply.fault is None:
            return Answer("text/event-stream", (*pieces, b"data: [DONE]\n\n"))
        ending = {"idle": "hang", "connection": "abort"}.get(reply.fault, "end")
        return Answer("text/event-stream", pieces, ending)  # type: ignore[arg-type]  # one of the three words

    def refused(self, reply: Reply) -> Refusal:
        """A scripted fault as the service would answer it."""
        status, kind, code, message = _SCRIPTED[reply.fault or "bad_request"]
        headers = {} if reply.retry_after_s is None else {"Retry-After": f"{reply.retry_after_s:g}"}
        return Refusal("fault", message, status, type=kind, code=code, headers=headers)

    def error(self, refusal: Refusal) -> bytes:
        """Error codes guide: one object under `error`."""
        error = {
            "message": refusal.message,
            "type": refusal.type,
            "param": refusal.param,
            "code": refusal.code,
        }
        return json.dumps({"error": error}, indent=2).encode()


PROTOCOL = OpenAIChatWire()


def _gate(request: Received, authorization: str) -> Refusal | None:
    if request.path != PATH:
        return Refusal("path_unknown", f"Invalid URL ({request.method} {request.path})", status=404)
    if request.method != "POST":
        found = f"Not allowed to {request.method} on {PATH}. (HINT: Perhaps you meant to use a different HTTP method?)"
        return Refusal("method", found, status=405, headers={"Allow": "POST"})
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        found = "You didn't provide an API key. You need to provide it in an Authorization header using Bearer auth."
        return Refusal("key_missing", found, status=401)
    media = request.headers.get("content-type", "")
    if media.partition(";")[0].strip().lower() != "application/json":
        found = (
            f"Unsupported content type: '{media}'. This API method only accepts 'application/json' requests, "
            f"but you specified the header 'Content-Type: {media}'."
        )
        return Refusal("media_type", found, code="unsupported_content_type")
    return None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _sse(chunk: JsonObject) -> bytes:
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()


def _wire_id(call: ScriptedCall, number: int, place: int) -> str:
    return f"call_{number:04d}{place:04d}" if call.wire_id is None else call.wire_id


def _usage(usage: Usage) -> JsonObject:
    prompt, completion = usage.input_tokens or 0, usage.output_tokens or 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0, "audio_tokens": 0},
    }


def _head(body: JsonObject, number: int, kind: str) -> JsonObject:
    return {
        "id": f"chatcmpl-{number:08d}",
        "object": kind,
        "created": int(time.time()),
        "model": body["model"],
        "service_tier": "default",
        "system_fingerprint": None,
    }


def _whole(reply: Reply, body: JsonObject, number: int) -> JsonObject:
    message: JsonObject = {"role": "assistant", "content": reply.text or None, "refusal": None}
    if reply.calls:
        message["tool_calls"] = [
            {
                "id": _wire_id(call, number, place),
                "type": "function",
                "function": {"name": call.name, "arguments": call.text},
            }
            for place, call in enumerate(reply.calls)
        ]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _FINISH[reply.ending]}
    whole = {**_head(body, number, "chat.completion"), "choices": [choice]}
    return whole if reply.usage is None else {**whole, "usage": _usage(reply.usage)}


def _chunks(reply: Reply, body: JsonObject, number: int, size: int) -> Iterator[JsonObject]:
    """The chunks of a streamed reply; a fault of the stream leaves out how it ends."""
    head = _head(body, number, "chat.completion.chunk")
    with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    if with_usage:
        head["usage"] = None

    def chunk(delta: JsonObject, finish: str | None = None) -> JsonObject:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**head, "choices": [choice]}

    yield chunk({"role": "assistant", "content": "" if reply.text else None, "refusal": None})
    for piece in _pieces(reply.text, size):
        yield chunk({"content": piece})
    for place, call in enumerate(reply.calls):
        function = {"name": call.name, "arguments": ""}
        opening = {"index": place, "id": _wire_id(call, number, place), "type": "function", "function": function}
        yield chunk({"tool_calls": [opening]})
        arguments = call.text
        if reply.fault == "half_call" and place == len(reply.calls) - 1:
            arguments = arguments[: len(arguments) // 2]
        for piece in _pieces(arguments, size):
            yield chunk({"tool_calls": [{"index": place, "function": {"arguments": piece}}]})
    if reply.fault is not None:
        return
    yield chunk({}, _FINISH[reply.ending])
    if with_usage and reply.usage is not None:
        yield {**head, "choices": [], "usage": _usage(reply.usage)}


def _pieces(words: str, size: int) -> Iterator[str]:
    for start in range(0, len(words), size or len(words) or 1):
        yield words[start : start + (size or len(words))]
