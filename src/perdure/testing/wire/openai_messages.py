"""What Chat Completions refuses among the messages. `MESSAGE_RULES` names each rule with its public source.

"API reference" is the OpenAI API reference, resource "chat completions", method "create"; names like `owner/repo#1` are
public GitHub threads that quote the service's own error.
"""

import re
from collections.abc import Iterator

from perdure.contracts.contract import JsonObject, JsonValue
from perdure.testing.wire.openai_refusals import (
    bad_pattern,
    empty_array,
    empty_string,
    long_string,
    missing,
    not_among,
    wrong_type,
)
from perdure.testing.wire.protocol import Refusal

MESSAGE_RULES = {
    "messages_missing": "API reference: messages, required array",
    "messages_type": "API reference: messages, array of objects",
    "messages_empty": "CopilotKit/CopilotKit#529 (code empty_array)",
    "message_type": "microsoft/graphrag#672 (the form of the error); API reference: each message is an object",
    "role_missing": "API reference: messages[].role, required",
    "role_unknown": "run-llama/llama_index#17748 (code invalid_value)",
    "content_null": "run-llama/llama_index#17921, vercel/ai#14950; API reference: required unless tool_calls is set",
    "content_type": "pydantic/pydantic-ai#2653 (code invalid_type)",
    "content_empty_array": "OpenAPI description of the API: minItems 1; openai/openai-go#423 for assistant messages",
    "content_part_type": "API reference: the content parts of each role",
    "content_part_text": "API reference: text content part, text is required",
    "content_too_long": "VectorlyApp/bluebox#31, gptscript-ai/clio#41 (code string_above_max_length)",
    "calls_empty": "home-assistant/core#118577, openai/openai-python#2061 (code empty_array)",
    "calls_type": "API reference: tool_calls, array",
    "call_id_missing": "API reference: tool_calls[].id, required",
    "call_type_missing": "API reference: tool_calls[].type, required",
    "call_function_missing": "API reference: tool_calls[].function, required",
    "call_name_empty": "continuedev/continue#11645, #9784 (empty string)",
    "call_name_pattern": "mcp-use/mcp-use#90 (messages[9].tool_calls[0].function.name, code invalid_value)",
    "call_arguments_missing": "API reference: tool_calls[].function.arguments, required",
    "call_arguments_type": "API reference: tool_calls[].function.arguments, string",
    "tool_without_calls": "miurla/morphic#136, smarter-sh/smarter#264 (param messages.[3].role)",
    "tool_id_missing": "run-llama/multi-agent-concierge#16, MadcowD/ell#325 (param messages.[15].tool_call_id)",
    "tool_id_unknown": "dapr/dapr-agents#145",
    "tool_id_twice": "agno-agi/agno#5116, neuron-core/neuron-ai#46 (param messages.[8].tool_call_id)",
    "calls_unanswered": "joseferben.com, openai-tool-calls-must-be-followed-by-tool-messages; agno-agi/agno#4345",
}

ROLES = ("system", "assistant", "user", "function", "tool", "developer")
PART_TYPES = {
    "user": ("text", "image_url", "input_audio", "file"),
    "assistant": ("text", "refusal"),
}
MAX_CONTENT = 10_485_760
"""Characters of one content string (VectorlyApp/bluebox#31; 1,048,576 in 2024, gptscript-ai/clio#41)."""
NAME_PATTERN = "^[a-zA-Z0-9_-]+$"


def message_refusals(body: JsonObject) -> Iterator[Refusal]:
    """What is wrong with the messages, in the order the service looks; a later one relies on the earlier ones."""
    messages = body.get("messages")
    if messages is None:
        yield missing("messages_missing", "messages")
    elif not isinstance(messages, list):
        yield wrong_type("messages_type", "messages", "an array of objects", messages)
    elif not messages:
        yield empty_array("messages_empty", "messages")
    else:
        for index, message in enumerate(messages):
            yield from _message(f"messages[{index}]", message)
        yield from _pairing(messages)


def _message(path: str, message: JsonValue) -> Iterator[Refusal]:
    if not isinstance(message, dict):
        yield wrong_type("message_type", path, "an object", message)
        return
    role = message.get("role")
    if role is None:
        yield missing("role_missing", f"{path}.role")
    if role not in ROLES:
        yield not_among("role_unknown", f"{path}.role", role, ROLES)
    yield from _content(path, message)
    if role == "assistant" and message.get("tool_calls") is not None:
        yield from _calls(f"{path}.tool_calls", message["tool_calls"])


def _content(path: str, message: JsonObject) -> Iterator[Refusal]:
    content, role = message.get("content"), message["role"]
    if content is None:
        excused = role == "assistant" and (message.get("tool_calls") is not None or message.get("function_call"))
        if not excused and not message.get("refusal"):
            place = path.replace("[", ".[") + ".content"
            yield Refusal("content_null", "Invalid value for 'content': expected a string, got null.", param=place)
    elif isinstance(content, str):
        if len(content) > MAX_CONTENT:
            yield long_string("content_too_long", f"{path}.content", MAX_CONTENT, len(content))
    elif not isinstance(content, list):
        yield wrong_type("content_type", f"{path}.content", "one of a string or array of objects", content)
    elif not content:
        yield empty_array("content_empty_array", f"{path}.content")
    else:
        known = PART_TYPES.get(role, ("text",))
        for index, part in enumerate(content):
            yield from _part(f"{path}.content[{index}]", part, known)


def _part(path: str, part: JsonValue, known: tuple[str, ...]) -> Iterator[Refusal]:
    if not isinstance(part, dict):
        yield wrong_type("content_part_type", path, "an object", part)
        return
    if part.get("type") not in known:
        listed = known if len(known) > 1 else (*known, *known)
        yield not_among("content_part_type", f"{path}.type", part.get("type"), listed)
    if part.get("type") == "text" and not isinstance(part.get("text"), str):
        yield missing("content_part_text", f"{path}.text")


def _calls(path: str, calls: JsonValue) -> Iterator[Refusal]:
    if not isinstance(calls, list):
        yield wrong_type("calls_type", path, "an array of objects", calls)
        return
    if not calls:
        yield empty_array("calls_empty", path)
    for index, call in enumerate(calls):
        yield from _call(f"{path}[{index}]", call)


def _call(path: str, call: JsonValue) -> Iterator[Refusal]:
    if not isinstance(call, dict):
        yield wrong_type("calls_type", path, "an object", call)
        return
    if not isinstance(call.get("id"), str):
        yield missing("call_id_missing", f"{path}.id")
    if call.get("type") != "function":
        yield missing("call_type_missing", f"{path}.type")
    function = call.get("function")
    if not isinstance(function, dict):
        yield missing("call_function_missing", f"{path}.function")
        return
    name = function.get("name")
    if not name:
        yield empty_string("call_name_empty", f"{path}.function.name")
    if not re.fullmatch(NAME_PATTERN, str(name)):
        yield bad_pattern("call_name_pattern", f"{path}.function.name", NAME_PATTERN)
    arguments = function.get("arguments")
    if arguments is None:
        yield missing("call_arguments_missing", f"{path}.function.arguments")
    if not isinstance(arguments, str):
        yield wrong_type("call_arguments_type", f"{path}.function.arguments", "a string", arguments)


def _pairing(messages: list[JsonObject]) -> Iterator[Refusal]:
    """Tool messages directly behind the calls they answer: each call once, and each of them."""
    asked: list[str] = []
    answered: dict[str, int] = {}
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            yield from _tool_message(index, message, asked, answered)
            continue
        yield from _unanswered(index, asked, answered)
        asked = [call["id"] for call in message.get("tool_calls") or ()] if message["role"] == "assistant" else []
        answered = {}
    yield from _unanswered(len(messages), asked, answered)


def _tool_message(index: int, message: JsonObject, asked: list[str], answered: dict[str, int]) -> Iterator[Refusal]:
    place = f"messages.[{index}]"
    call = message.get("tool_call_id")
    if not isinstance(call, str):
        found = "Missing parameter 'tool_call_id': messages with role 'tool' must have a 'tool_call_id'."
        yield Refusal("tool_id_missing", found, param=f"{place}.tool_call_id")
        return
    if not asked:
        found = (
            "Invalid parameter: messages with role 'tool' must be a response to a preceeding message with 'tool_calls'."
        )
        yield Refusal("tool_without_calls", found, param=f"{place}.role")
    if call not in asked:
        found = f"Invalid parameter: 'tool_call_id' of '{call}' not found in 'tool_calls' of previous message."
        yield Refusal("tool_id_unknown", found, param=f"{place}.tool_call_id")
    if call in answered:
        found = (
            f"Invalid parameter: Duplicate value for 'tool_call_id' of '{call}', "
            f"in messages[{answered[call]}] and messages[{index}]."
        )
        yield Refusal("tool_id_twice", found, param=f"{place}.tool_call_id")
    answered[call] = index


def _unanswered(index: int, asked: list[str], answered: dict[str, int]) -> Iterator[Refusal]:
    open_calls = [call for call in asked if call not in answered]
    if open_calls:
        found = (
            "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
            "'tool_call_id'. The following tool_call_ids did not have response messages: " + ", ".join(open_calls)
        )
        yield Refusal("calls_unanswered", found, param=f"messages.[{index}].role")
