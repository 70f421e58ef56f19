"""What Chat Completions refuses among the other parameters. `PARAMETER_RULES` names each rule with its public source.

Sources are written as in `openai_messages`.
"""

import re
from collections.abc import Iterator

from perdure.contracts.contract import JsonObject, JsonValue
from perdure.testing.wire.openai_messages import NAME_PATTERN
from perdure.testing.wire.openai_refusals import (
    bad_pattern,
    empty_array,
    long_array,
    long_string,
    missing,
    not_among,
    outside,
    wrong_type,
)
from perdure.testing.wire.protocol import Refusal

PARAMETER_RULES = {
    "argument_unknown": "coroot/coroot#698, davidmigloz/langchain_dart#712",
    "model_missing": "danielmiessler/Fabric#239, lss233/kirara-ai#800",
    "model_type": "API reference: model, string",
    "stream_type": "API reference: stream, boolean",
    "stream_options_alone": "lobehub/lobehub#6735, BerriAI/litellm#5803 (param stream_options)",
    "temperature_range": "API reference: temperature between 0 and 2",
    "top_p_range": "API reference: top_p, a probability mass between 0 and 1",
    "penalty_range": "API reference: frequency_penalty and presence_penalty between -2.0 and 2.0",
    "number_type": "API reference: temperature and its like are numbers; seed, n and the token limits integers",
    "max_tokens_range": "OpenBMB/ChatDev#446 (code integer_below_min_value)",
    "max_tokens_twice": "langchain-ai/langgraph#5943 (code invalid_parameter_combination)",
    "n_range": "OpenAPI description of the API: n, minimum 1, maximum 128",
    "stop_too_many": "API reference: stop, up to 4 sequences",
    "metadata_too_many": "API reference: metadata, set of 16 key-value pairs",
    "tools_type": "API reference: tools, array",
    "tools_empty": "vllm-project/vllm#39741 and #39780 (OpenAI answers 400, code empty_array)",
    "tools_too_many": "vishalmysore/Tools4AI#16, zed-industries/zed#32946 (maximum 128)",
    "tool_type": "API reference: tools[].type, required, function or custom",
    "tool_function_missing": "API reference: tools[].function, required",
    "tool_name_missing": "API reference: tools[].function.name, required",
    "tool_name_pattern": "brekkylab/ailoy#109 (code invalid_value)",
    "tool_name_too_long": "API reference: name, maximum length of 64",
    "tool_description_too_long": "nanbingxyz/5ire#33 (maximum length 1024)",
    "tool_schema_type": "maltekuhr/laravel-gpt#8, FoundationAgents/OpenManus#1162 (not of type 'object')",
    "tool_schema_not_object": "alibaba/spring-ai-alibaba#4576 (a schema must have type object)",
    "tool_schema_no_properties": "github/github-mcp-server#1548 (object schema missing properties)",
    "tool_schema_no_items": "PrefectHQ/fastmcp#2464 (array schema missing items)",
    "tool_choice_alone": "dapr/dapr-agents#248, anomalyco/opencode#48857 (param tool_choice)",
    "tool_choice_unknown": "API reference: tool_choice, none, auto or required, or a named tool",
    "tool_choice_not_offered": "CherryHQ/cherry-studio#11138 (not found in 'tools' parameter)",
    "parallel_alone": "openai/swarm#30, Upsonic/Upsonic#323 (param parallel_tool_calls)",
}

# API reference: the parameters of the method, deprecated ones included.
KNOWN = frozenset(
    (
        "audio",
        "frequency_penalty",
        "function_call",
        "functions",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "metadata",
        "modalities",
        "model",
        "moderation",
        "n",
        "parallel_tool_calls",
        "prediction",
        "presence_penalty",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning_effort",
        "response_format",
        "safety_identifier",
        "seed",
        "service_tier",
        "stop",
        "store",
        "stream",
        "stream_options",
        "temperature",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
        "user",
        "verbosity",
        "web_search_options",
    )
)

_DECIMALS = {
    "temperature": ("temperature_range", 0.0, 2.0),
    "top_p": ("top_p_range", 0.0, 1.0),
    "frequency_penalty": ("penalty_range", -2.0, 2.0),
    "presence_penalty": ("penalty_range", -2.0, 2.0),
}
_INTEGERS: dict[str, tuple[str, int, int | None]] = {
    "max_tokens": ("max_tokens_range", 1, None),
    "max_completion_tokens": ("max_tokens_range", 1, None),
    "n": ("n_range", 1, 128),
    "seed": ("number_type", -(2**63), 2**63 - 1),
}


def parameter_refusals(body: JsonObject) -> Iterator[Refusal]:
    """What is wrong with the parameters beside the messages."""
    for name in body:
        if name not in KNOWN:
            yield Refusal("argument_unknown", f"Unrecognized request argument supplied: {name}")
    model = body.get("model")
    if not isinstance(model, str) and model is not None:
        yield wrong_type("model_type", "model", "a string", model)
    if not model:
        yield Refusal("model_missing", "you must provide a model parameter")
    yield from _streaming(body)
    yield from _numbers(body)
    yield from _lists(body)
    yield from _tools(body)
    yield from _choice(body)


def _streaming(body: JsonObject) -> Iterator[Refusal]:
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        yield wrong_type("stream_type", "stream", "a boolean", stream)
    if body.get("stream_options") is not None and not stream:
        found = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
        yield Refusal("stream_options_alone", found, param="stream_options")


def _numbers(body: JsonObject) -> Iterator[Refusal]:
    for name, (rule, low, high) in _DECIMALS.items():
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            yield wrong_type("number_type", name, "a decimal", value)
        elif (refusal := outside(rule, name, value, low, high)) is not None:
            yield refusal
    for name, (rule, least, most) in _INTEGERS.items():
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            yield wrong_type("number_type", name, "an integer", value)
        elif (refusal := outside(rule, name, value, least, most)) is not None:
            yield refusal
    if body.get("max_tokens") is not None and body.get("max_completion_tokens") is not None:
        found = "Setting 'max_tokens' and 'max_completion_tokens' at the same time is not supported."
        yield Refusal("max_tokens_twice", found, param="max_tokens", code="invalid_parameter_combination")


def _lists(body: JsonObject) -> Iterator[Refusal]:
    stop, metadata = body.get("stop"), body.get("metadata")
    if isinstance(stop, list) and len(stop) > 4:
        yield long_array("stop_too_many", "stop", 4, len(stop))
    if isinstance(metadata, dict) and len(metadata) > 16:
        found = f"Invalid 'metadata': too many properties. Expected at most 16, but got {len(metadata)} instead."
        yield Refusal("metadata_too_many", found, param="metadata", code="object_above_max_properties")


def _tools(body: JsonObject) -> Iterator[Refusal]:
    tools = body.get("tools")
    if tools is None:
        return
    if not isinstance(tools, list):
        yield wrong_type("tools_type", "tools", "an array of objects", tools)
        return
    if not tools:
        yield empty_array("tools_empty", "tools")
    if len(tools) > 128:
        yield long_array("tools_too_many", "tools", 128, len(tools))
    for index, tool in enumerate(tools):
        yield from _tool(f"tools[{index}]", tool)


def _tool(path: str, tool: JsonValue) -> Iterator[Refusal]:
    if not isinstance(tool, dict):
        yield wrong_type("tools_type", path, "an object", tool)
        return
    if tool.get("type") is None:
        yield missing("tool_type", f"{path}.type")
    if tool.get("type") not in ("function", "custom"):
        yield not_among("tool_type", f"{path}.type", tool.get("type"), ("function", "custom"))
    if tool.get("type") != "function":
        return
    function = tool.get("function")
    if not isinstance(function, dict):
        yield missing("tool_function_missing", f"{path}.function")
        return
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str):
        yield missing("tool_name_missing", f"{path}.function.name")
        return
    if not re.fullmatch(NAME_PATTERN, name):
        yield bad_pattern("tool_name_pattern", f"{path}.function.name", NAME_PATTERN)
    if len(name) > 64:
        yield long_string("tool_name_too_long", f"{path}.function.name", 64, len(name))
    if isinstance(description, str) and len(description) > 1024:
        yield long_string("tool_description_too_long", f"{path}.function.description", 1024, len(description))
    if "parameters" in function:
        yield from _schema(f"{path}.function.parameters", name, function["parameters"])


def _schema(path: str, tool: str, schema: JsonValue) -> Iterator[Refusal]:
    def refuse(rule: str, found: str) -> Refusal:
        whole = f"Invalid schema for function '{tool}': {found}"
        return Refusal(rule, whole, param=path, code="invalid_function_parameters")

    if not isinstance(schema, dict):
        yield refuse("tool_schema_type", f"{schema!r} is not of type 'object', 'boolean'.")
        return
    if schema.get("type") != "object":
        kind = schema.get("type", "None")
        found = f"schema must be a JSON Schema of 'type: \"object\"', got 'type: \"{kind}\"'."
        yield refuse("tool_schema_not_object", found)
        return
    if "properties" not in schema:
        yield refuse("tool_schema_no_properties", "In context=(), object schema missing properties.")
        return
    for place in _arrays_without_items(schema, ()):
        yield refuse("tool_schema_no_items", f"In context={place!r}, array schema missing items.")


def _arrays_without_items(schema: JsonValue, place: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if isinstance(schema, list):
        for index, item in enumerate(schema):
            yield from _arrays_without_items(item, (*place, str(index)))
    if not isinstance(schema, dict):
        return
    if schema.get("type") == "array" and "items" not in schema:
        yield place
    for word in ("properties", "$defs"):
        if isinstance(schema.get(word), dict):
            for name, item in schema[word].items():
                yield from _arrays_without_items(item, (*place, word, name))
    for word in ("items", "anyOf", "allOf", "oneOf", "prefixItems"):
        yield from _arrays_without_items(schema.get(word), (*place, word))


def _choice(body: JsonObject) -> Iterator[Refusal]:
    choice, tools = body.get("tool_choice"), body.get("tools")
    if body.get("parallel_tool_calls") is not None and not tools:
        found = (
            "Invalid value for 'parallel_tool_calls': 'parallel_tool_calls' is only allowed when 'tools' are specified."
        )
        yield Refusal("parallel_alone", found, param="parallel_tool_calls")
    if choice is None:
        return
    if not tools:
        found = "Invalid value for 'tool_choice': 'tool_choice' is only allowed when 'tools' are specified."
        yield Refusal("tool_choice_alone", found, param="tool_choice")
        return
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            yield not_among("tool_choice_unknown", "tool_choice", choice, ("none", "auto", "required"))
    elif not isinstance(choice, dict):
        yield wrong_type("tool_choice_unknown", "tool_choice", "one of a string or object", choice)
    elif choice.get("type") == "function":
        wanted = (choice.get("function") or {}).get("name")
        if wanted not in [(tool.get("function") or {}).get("name") for tool in tools]:
            found = f"Tool choice '{wanted}' not found in 'tools' parameter."
            yield Refusal("tool_choice_not_offered", found, param="tool_choice")
