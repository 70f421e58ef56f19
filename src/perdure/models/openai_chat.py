"""OpenAI Chat Completions, streaming, over the official SDK; also for servers that speak the same protocol.

Owns how a transcript looks on this wire and how its chunks become model events. Ids on the wire are made from places:
what a provider sent as an id may repeat or be missing, and is never sent back.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from perdure.contracts.contract import JsonObject, canonical
from perdure.contracts.messages import StopReason, ToolDescriptor, Usage
from perdure.errors import ModelError, StreamFaultError
from perdure.models.failures import refuse_other_content
from perdure.models.history import Answered, Said, history
from perdure.models.openai_errors import translate
from perdure.models.schemas import object_schema
from perdure.models.sdk import bounded_hook, cause_of, count, key_from, must_be_installed
from perdure.ports import CallDelta, ModelEvent, TextDelta, TurnDone, UsageReport
from perdure.prompting.request import ModelRequest
from perdure.prompting.wire_names import wire_name

if TYPE_CHECKING:
    from openai import AsyncOpenAI

PROVIDER = "openai-chat"
"""Whose opaque parts are sent back."""
KEY_VARIABLE = "OPENAI_API_KEY"
URL_VARIABLE = "OPENAI_BASE_URL"

_STOPS = {
    "stop": StopReason.END,
    "length": StopReason.LENGTH,
    "tool_calls": StopReason.CALLS,
    "function_call": StopReason.CALLS,
    "content_filter": StopReason.REFUSED,
}


class OpenAIChat:
    """A model behind Chat Completions.

    Args:
        model: the model's name as the server knows it.
        base_url: another server that speaks the protocol; None: the variable OPENAI_BASE_URL, else OpenAI itself.
        api_key: None: the variable OPENAI_API_KEY.

    Raises:
        ConfigurationError: the SDK is not installed, or there is no key.
    """

    strict = True

    def __init__(self, model: str, *, base_url: str | None = None, api_key: str | None = None) -> None:
        self.model = model
        self.target = f"openai:{model}"
        must_be_installed("openai", "openai", self.target)
        hint = " (any word, for a server of your own that asks for none)"
        self._key = key_from((KEY_VARIABLE,), api_key, self.target, hint=hint)
        self.base_url = base_url or os.environ.get(URL_VARIABLE) or None
        self._client: AsyncOpenAI | None = None

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """As `ModelClient.stream`."""
        arguments = {"model": self.model, **self._arguments(request)}
        if not arguments["messages"]:
            raise ModelError("bad_request", "there is nothing to say: no instructions and no text", where=self.target)
        client = await self._connected()
        from openai import OpenAIError

        begun = False
        response: Any = None
        try:
            response = await client.chat.completions.create(**arguments, timeout=request.settings.timeout_s)
            refuse_other_content(response.response.headers.get("content-type", ""), self.target)
            begun = True
            async for event in _events(response, self.target):
                yield event
        except (OpenAIError, ValueError) as error:  # a ValueError: the SDK met a chunk that is no JSON
            raise cause_of(error) or translate(error, self.target, self._key(), streaming=begun) from error
        finally:
            if response is not None:
                await response.close()

    async def close(self) -> None:
        """Gives back connections; safe to call twice."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _connected(self) -> "AsyncOpenAI":
        if self._client is None:
            # In a thread: importing the SDK takes seconds on a cold machine, and other runs share this event loop.
            client = await asyncio.to_thread(self._make_client)
            self._client = self._client or client
        return self._client

    def _make_client(self) -> "AsyncOpenAI":
        import httpx2
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient
        from openai.resources.chat import AsyncCompletions  # noqa: F401 (else imported by the first request)

        http = DefaultAsyncHttpxClient(event_hooks={"response": [bounded_hook(httpx2, self.target)]})
        # Retries are the runtime's: each attempt is counted and recorded before it is made.
        return AsyncOpenAI(api_key=self._key(), base_url=self.base_url, max_retries=0, http_client=http)

    def _arguments(self, request: ModelRequest) -> JsonObject:
        settings = request.settings
        arguments: JsonObject = {
            "messages": chat_messages(request),
            "stream": True,
            "stream_options": {"include_usage": True},
            self._output_limit(): settings.max_output_tokens,
        }
        if request.tools:
            arguments["tools"] = [_tool(tool) for tool in request.tools]
            arguments["tool_choice"] = "required" if request.tool_choice == "any" else "auto"
        if settings.temperature is not None:
            arguments["temperature"] = settings.temperature
        if settings.seed is not None:
            arguments["seed"] = settings.seed
        return arguments

    def _output_limit(self) -> str:
        """OpenAI deprecates `max_tokens` and refuses it for reasoning models; many compatible servers know only that
        one and silently drop the newer (llama-cpp-python#1907, llama.cpp#13700, ray#53922)."""
        host = urlsplit(self.base_url).hostname if self.base_url else "api.openai.com"
        official = host == "api.openai.com" or (host or "").endswith(".api.openai.com")
        return "max_completion_tokens" if official else "max_tokens"


def chat_messages(request: ModelRequest) -> list[JsonObject]:
    """The request's instructions and transcript as messages. Pure: equal requests give equal messages."""
    messages: list[JsonObject] = []
    if request.instructions.strip():
        messages.append({"role": "system", "content": request.instructions})
    for item in history(request.transcript, PROVIDER):
        if isinstance(item, Said):
            messages.append({"role": "user", "content": item.text})
            continue
        message: JsonObject = {"role": "assistant", "content": item.text or None}
        if item.answers:
            message["tool_calls"] = [_call(answer) for answer in item.answers]
        messages.append(message)
        messages.extend(
            {"role": "tool", "tool_call_id": answer.wire_id, "content": answer.result.text} for answer in item.answers
        )
    return messages


def _call(call: Answered) -> JsonObject:
    arguments = canonical(call.arguments).decode("utf-8")
    return {"id": call.wire_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _tool(tool: ToolDescriptor) -> JsonObject:
    function: JsonObject = {"name": wire_name(tool.name), "parameters": object_schema(tool.input_schema)}
    if tool.description:
        function["description"] = tool.description
    return {"type": "function", "function": function}


async def _events(chunks: Any, target: str) -> AsyncIterator[ModelEvent]:
    """The chunks of one stream as events. A reply is whole once a chunk gave a finish reason; usage comes after it."""
    from openai import APIConnectionError

    finish: str | None = None
    model: str | None = None
    empty = True
    try:
        async for chunk in chunks:
            empty = False
            model = model or (chunk.model if isinstance(chunk.model, str) else None)
            if chunk.usage is not None:
                yield UsageReport(_usage(chunk.usage))
            choice = chunk.choices[0] if chunk.choices else None
            if choice is None or choice.index:
                continue
            for event in _delta(choice.delta, target):
                if finish is not None:
                    raise StreamFaultError("after_end", "content came after the finish reason", where=target)
                yield event
            finish = choice.finish_reason or finish
    except APIConnectionError:
        # The finish reason closes a reply; a connection lost behind it costs the usage and nothing else.
        if finish is None:
            raise
    if empty:
        raise StreamFaultError("protocol", "the body of the answer was empty", where=target)
    if finish is not None:
        yield TurnDone(_STOPS.get(finish, StopReason.OTHER), model)


def _delta(delta: Any, target: str) -> Iterator[ModelEvent]:
    if delta is None:
        return
    for text in (delta.content, delta.refusal):
        if text:
            if not isinstance(text, str):
                raise StreamFaultError("protocol", f"text of type {type(text).__name__} in a chunk", where=target)
            yield TextDelta(text)
    for call in delta.tool_calls or ():
        function = call.function
        name, arguments = (function.name, function.arguments) if function is not None else (None, None)
        # Some servers send whole arguments as an object where the protocol has a string.
        if isinstance(arguments, dict):
            arguments = canonical(arguments).decode("utf-8")
        yield CallDelta(call.index, call.id or None, name or None, arguments or "")


def _usage(usage: Any) -> Usage:
    prompt, completion = usage.prompt_tokens_details, usage.completion_tokens_details
    return Usage(
        input_tokens=count(usage.prompt_tokens),
        output_tokens=count(usage.completion_tokens),
        cached_tokens=count(prompt.cached_tokens) if prompt is not None else None,
        reasoning_tokens=count(completion.reasoning_tokens) if completion is not None else None,
    )
