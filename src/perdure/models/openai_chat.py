"""OpenAI Chat Completions, streaming, over the official SDK; also for servers that speak the same protocol.

Owns how a transcript looks on this wire and how its chunks become model events. Ids on the wire are made from places:
what a provider sent as an id may repeat or be missing, and is never sent back.
"""

import asyncio
import importlib.util
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from perdure.contracts.contract import JsonObject, canonical
from perdure.contracts.limits import LARGEST
from perdure.contracts.messages import Observation, StopReason, ToolCall, ToolDescriptor, Usage
from perdure.errors import ConfigurationError, ModelError, StreamFaultError
from perdure.journal.transcript import ResultsEntry, TurnEntry, UserEntry
from perdure.models.openai_errors import translate
from perdure.ports import CallDelta, ModelEvent, TextDelta, TurnDone, UsageReport
from perdure.prompting.request import ModelRequest

if TYPE_CHECKING:
    from openai import AsyncOpenAI

KEY_VARIABLE = "OPENAI_API_KEY"
URL_VARIABLE = "OPENAI_BASE_URL"

_STOPS = {
    "stop": StopReason.END,
    "length": StopReason.LENGTH,
    "tool_calls": StopReason.CALLS,
    "function_call": StopReason.CALLS,
    "content_filter": StopReason.REFUSED,
}

_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_-]")


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
        if importlib.util.find_spec("openai") is None:
            raise ConfigurationError(
                "the OpenAI SDK is not installed", where=f"openai:{model}", next="run: pip install 'perdure[openai]'"
            )
        key = api_key or os.environ.get(KEY_VARIABLE, "")
        if not key:
            raise ConfigurationError(
                "there is no API key",
                where=f"openai:{model}",
                next=f"set {KEY_VARIABLE} (any word, for a server of your own that asks for none)",
            )
        self.model = model
        self.target = f"openai:{model}"
        self.base_url = base_url or os.environ.get(URL_VARIABLE) or None
        # Behind a function, so that no repr, log line or pickle of this object shows it.
        self._key: Callable[[], str] = lambda: key
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
            _refuse_other_content(response.response.headers.get("content-type", ""), self.target)
            begun = True
            async for event in _events(response, self.target):
                yield event
        except (OpenAIError, ValueError) as error:  # a ValueError: the SDK met a chunk that is no JSON
            raise translate(error, self.target, self._key(), streaming=begun) from error
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
        from openai import AsyncOpenAI
        from openai.resources.chat import AsyncCompletions  # noqa: F401 (else imported by the first request)

        # Retries are the runtime's: each attempt is counted and recorded before it is made.
        return AsyncOpenAI(api_key=self._key(), base_url=self.base_url, max_retries=0)

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
    """The request's instructions and transcript as messages. Pure: equal requests give equal messages.

    Nothing empty goes on the wire: blank texts, and turns with neither text nor calls, are left out. Results stand
    directly behind their turn, which is where the protocol wants them, and a call without a result is left out.
    """
    messages: list[JsonObject] = []
    if request.instructions.strip():
        messages.append({"role": "system", "content": request.instructions})
    turn: TurnEntry | None = None
    number = -1
    between: list[JsonObject] = []
    answers: list[Observation] = []
    for entry in request.transcript:
        if isinstance(entry, UserEntry):
            if entry.text.strip():
                between.append({"role": "user", "content": entry.text})
        elif isinstance(entry, ResultsEntry):
            answers.extend(entry.observations)
        else:
            messages.extend(_segment(turn, number, answers, between))
            turn, number, between, answers = entry, number + 1, [], []
    messages.extend(_segment(turn, number, answers, between))
    return messages


def _segment(
    entry: TurnEntry | None, number: int, answers: list[Observation], between: list[JsonObject]
) -> Iterator[JsonObject]:
    """One turn, the results of its calls in call order, then what people said before the next turn."""
    if entry is not None:
        given = {answer.call: answer.text for answer in answers}
        answered = [
            (f"call_{number}_{place}", call, given[f"{entry.id}.{place}"])
            for place, call in enumerate(entry.turn.calls)
            if f"{entry.id}.{place}" in given
        ]
        text = entry.turn.text
        said = text if text.strip() else None
        if answered:
            wire = [_call(wire_id, call) for wire_id, call, _ in answered]
            yield {"role": "assistant", "content": said, "tool_calls": wire}
        elif said is not None:
            yield {"role": "assistant", "content": said}
        for wire_id, _, result in answered:
            yield {"role": "tool", "tool_call_id": wire_id, "content": result}
    yield from between


def _call(wire_id: str, call: ToolCall) -> JsonObject:
    # A name the model made up may hold characters the service refuses in a history (mcp-use#90), for ever after.
    name = _NOT_A_NAME.sub("_", call.name)[:64]
    arguments = canonical(call.arguments).decode("utf-8")
    return {"id": wire_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool(tool: ToolDescriptor) -> JsonObject:
    schema = tool.input_schema
    if schema.get("type") == "object" and "properties" not in schema:
        # An object schema without properties is refused (github-mcp-server#1548).
        schema = {**schema, "properties": {}}
    function: JsonObject = {"name": tool.name, "parameters": schema}
    if tool.description:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _refuse_other_content(content_type: str, target: str) -> None:
    kind = content_type.partition(";")[0].strip().lower()
    if kind in ("text/html", "application/json"):
        raise ModelError(
            "protocol",
            f"the answer is {kind}, not a stream of events",
            where=target,
            next="check that the base URL leads to a server that streams Chat Completions",
        )


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
        input_tokens=_count(usage.prompt_tokens),
        output_tokens=_count(usage.completion_tokens),
        cached_tokens=_count(prompt.cached_tokens) if prompt is not None else None,
        reasoning_tokens=_count(completion.reasoning_tokens) if completion is not None else None,
    )


def _count(value: object) -> int | None:
    # What is no count, or none that a store could hold, says nothing.
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST else None
