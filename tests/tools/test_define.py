"""What `@tool` takes, what the model is shown, and what a declaration may not say."""

import dataclasses
import enum
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Literal, TypedDict

import pydantic
import pytest
import typing_extensions

from perdure.calls import CallContext
from perdure.contracts.contract import canonical
from perdure.contracts.messages import Effect
from perdure.errors import ConfigurationError, ToolDefinitionError
from perdure.ports import Tool
from perdure.tools.define import FunctionTool, tool


class Kind(enum.Enum):
    GOOD = "good"
    BAD = "bad"


class Item(pydantic.BaseModel):
    title: str
    count: Annotated[int, pydantic.Field(ge=1, le=5)]


@dataclasses.dataclass
class When:
    at: datetime


class Options(typing_extensions.TypedDict, total=False):
    deep: bool


@tool(effect="read", parallel=True, retries=2, timeout=3)
async def job_status(job_id: str, lines: int = 20) -> dict[str, Any]:
    """Current state of one job.

    Says what it waits for.
    """
    return {"job_id": job_id, "lines": lines}


async def test_a_tool_stays_callable_as_the_plain_function() -> None:
    """S-050."""
    assert await job_status("7", lines=3) == {"job_id": "7", "lines": 3}
    assert job_status.__name__ == "job_status"
    assert job_status.__module__ == __name__


def test_a_tool_fills_the_port_and_carries_its_declaration() -> None:
    """S-024, S-050."""
    port: Tool = job_status
    assert port.descriptor.name == "job_status"
    assert port.descriptor.description == "Current state of one job.\n\nSays what it waits for."
    assert (port.descriptor.effect, port.descriptor.parallel, port.descriptor.repeatable) == (Effect.READ, True, None)
    assert (port.timeout_s, port.retries) == (3, 2)


def test_a_tool_that_declares_nothing_is_a_write_without_retries() -> None:
    """S-050."""

    @tool
    def act() -> None: ...

    assert act.descriptor.effect is Effect.WRITE
    assert (act.timeout_s, act.retries, act.descriptor.parallel, act.descriptor.repeatable) == (None, 0, False, None)
    assert act.descriptor.description == "act"


def test_a_name_given_in_the_declaration_is_the_one_the_model_sees() -> None:
    """S-024."""

    @tool(name="find-1")
    def look() -> None: ...

    assert look.descriptor.name == "find-1"


def test_a_schema_says_types_defaults_descriptions_and_takes_no_unknown_field() -> None:
    """S-024, R-031."""

    @tool(effect="read")
    def find(
        job_id: Annotated[str, pydantic.Field(description="Which job.")],
        call: CallContext,
        kind: Kind = Kind.GOOD,
        mode: Literal["fast", "slow"] = "fast",
        limit: int = pydantic.Field(default=5, ge=1),
        when: datetime | None = None,
    ) -> None: ...

    assert find.descriptor.input_schema == {
        "$defs": {"Kind": {"enum": ["good", "bad"], "type": "string"}},
        "additionalProperties": False,
        "properties": {
            "job_id": {"type": "string", "description": "Which job."},
            "kind": {"$ref": "#/$defs/Kind", "default": "good"},
            "mode": {"default": "fast", "enum": ["fast", "slow"], "type": "string"},
            "limit": {"default": 5, "minimum": 1, "type": "integer"},
            "when": {"anyOf": [{"format": "date-time", "type": "string"}, {"type": "null"}], "default": None},
        },
        "required": ["job_id"],
        "type": "object",
    }


def test_a_property_named_title_stays_in_the_schema() -> None:
    """S-024."""

    @tool
    def add(item: Item, title: str) -> None: ...

    schema = add.descriptor.input_schema
    assert list(schema["properties"]) == ["item", "title"]
    assert list(schema["$defs"]["Item"]["properties"]) == ["title", "count"]


def test_parameters_may_carry_names_that_pydantic_keeps_for_itself() -> None:
    """S-024."""

    @tool
    def act(model_config: int, schema: int, self_: int, copy: int, _private: int, json: int) -> None: ...

    assert list(act.descriptor.input_schema["properties"]) == [
        "model_config",
        "schema",
        "self_",
        "copy",
        "_private",
        "json",
    ]


def test_records_dataclasses_and_typed_dicts_are_taken() -> None:
    """S-024."""

    @tool
    def act(items: list[Item], when: When, options: Options) -> None: ...

    assert set(act.descriptor.input_schema["$defs"]) == {"Item", "When", "Options"}


def test_annotations_written_as_text_are_resolved_where_the_tool_is_defined() -> None:
    """S-024."""

    class Local(pydantic.BaseModel):
        x: int

    @tool
    def act(local: "Local", item: "list[Item] | None", call: "CallContext") -> "Unknown": ...  # type: ignore[name-defined]  # noqa: F821

    assert list(act.descriptor.input_schema["properties"]) == ["local", "item"]


PROGRAM = """
from perdure.contracts.contract import canonical
from perdure.tools.define import tool
import enum, sys
class Kind(enum.Enum):
    A = "a"
    B = "b"
@tool
def act(tags: set[str] = {"a", "b", "c", "d"}, kinds: frozenset[Kind] = frozenset(Kind), more: dict = {"x": 1}):
    "Acts."
sys.stdout.buffer.write(canonical(act.descriptor))
"""


@pytest.mark.slow
def test_a_descriptor_has_the_same_bytes_in_every_process() -> None:
    """R-031, S-024."""
    forms = set()
    for seed in ("0", "1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, capture_output=True)
        forms.add(done.stdout)
    assert len(forms) == 1
    assert b"title" not in forms.pop()


def test_a_descriptor_is_pinned_when_the_tool_is_defined() -> None:
    """R-031."""
    before = canonical(job_status.descriptor)
    job_status.__doc__ = "Something else."
    assert canonical(job_status.descriptor) == before


def test_a_default_without_a_json_form_is_left_out_of_the_schema() -> None:
    """S-024."""
    nothing = object()

    @tool
    def act(limit: int | None = nothing) -> None: ...  # type: ignore[assignment]

    assert act.descriptor.input_schema["properties"] == {"limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}


def test_a_self_referring_record_has_its_object_at_the_top() -> None:
    """S-024."""

    @tool
    def act(tree: "Tree") -> None: ...

    assert act.descriptor.input_schema["type"] == "object"


class Tree(pydantic.BaseModel):
    children: list["Tree"] = []


class Opaque:
    pass


def no_type(a) -> None: ...  # type: ignore[no-untyped-def]  # noqa: ANN001
def many(*args: int) -> None: ...
def named(**kwargs: int) -> None: ...
def placed(a: int, /) -> None: ...
def opaque(a: int, thing: Opaque) -> None: ...
def callback(thing: Callable[[], int]) -> None: ...
def nowhere(thing: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821
def twice(a: CallContext, b: CallContext) -> None: ...
def stream() -> Iterator[int]:
    yield 1


async def async_stream() -> AsyncIterator[int]:
    yield 1


def with_std_typed_dict(options: "StdOptions") -> None: ...


class StdOptions(TypedDict):
    deep: bool


class Owner:
    def method(self, a: int) -> int:
        """Does it."""
        return a


BAD_FUNCTIONS: dict[str, tuple[Any, str, str]] = {
    "a parameter without a type": (no_type, "no_type, parameter a", "write its type"),
    "any number of arguments": (many, "parameter args", "name each parameter"),
    "any keywords": (named, "parameter kwargs", "name each parameter"),
    "a positional-only parameter": (placed, "placed, parameter a", "remove the /"),
    "a type without a schema": (opaque, "opaque, parameter thing", "use JSON types"),
    "a callable": (callback, "callback, parameter thing", "use JSON types"),
    "a type that is not there": (nowhere, "nowhere, parameter thing", "import that name"),
    "two contexts": (twice, "twice", "keep one"),
    "a generator": (stream, "stream", "return the whole result"),
    "an async generator": (async_stream, "async_stream", "return the whole result"),
    "a class": (Opaque, "Opaque", "decorate a function"),
    "a value": (3, "", "decorate a function"),
    "a tool": (job_status, "job_status", "remove one @tool"),
    "a method without its instance": (Owner.method, "Owner.method, parameter self", "tool(instance.method)"),
    "a lambda": (lambda: None, "lambda", 'give one: @tool(name="...")'),
    "a partial": (partial(len), "partial", 'give one: @tool(name="...")'),
}


@pytest.mark.parametrize("case", BAD_FUNCTIONS)
def test_a_function_that_cannot_be_offered_is_refused_with_its_place_and_the_next_step(case: str) -> None:
    """R-031."""
    function, place, step = BAD_FUNCTIONS[case]
    with pytest.raises(ToolDefinitionError) as raised:
        tool(function)
    assert place in raised.value.where
    assert step in raised.value.next
    assert isinstance(raised.value, ConfigurationError)


BAD_WORDS: dict[str, tuple[dict[str, Any], str]] = {
    "an effect with a slip": ({"effect": "reed"}, "did you mean 'read'?"),
    "an effect in capitals": ({"effect": "WRITE"}, "did you mean 'write'?"),
    "no effect": ({"effect": None}, "It is one of read, idempotent, write"),
    "a name with a dot": ({"name": "a.b"}, "@tool(name="),
    "an empty name": ({"name": ""}, "@tool(name="),
    "a long name": ({"name": "a" * 65}, "@tool(name="),
    "a name that ends a line": ({"name": "a\n"}, "@tool(name="),
    "a timeout of zero": ({"timeout": 0}, "above zero"),
    "an endless timeout": ({"timeout": float("inf")}, "above zero"),
    "a timeout that is a truth": ({"timeout": True}, "above zero"),
    "three retries": ({"effect": "read", "retries": 3}, "0 to 2"),
    "a negative retry": ({"effect": "read", "retries": -1}, "0 to 2"),
    "retries of a write": ({"retries": 1}, "idempotency_key"),
    "parallel writes": ({"parallel": True}, "remove parallel"),
    "parallel idempotent calls": ({"effect": "idempotent", "parallel": True}, "remove parallel"),
}


@pytest.mark.parametrize("case", BAD_WORDS)
def test_a_declaration_that_makes_no_sense_is_refused_with_the_next_step(case: str) -> None:
    """S-050, S-067."""
    words, step = BAD_WORDS[case]

    def act() -> None: ...

    with pytest.raises(ToolDefinitionError, match="act") as raised:
        tool(**words)(act)
    assert step in raised.value.next


@pytest.mark.parametrize("word", ["probe", "settles_within", "key_valid_for", "compensate", "approval"])
def test_a_word_of_a_later_release_is_not_taken(word: str) -> None:
    with pytest.raises(TypeError, match=word):
        tool(**{word: 1})


def test_a_bound_method_a_partial_and_an_object_are_tools() -> None:
    """S-024."""

    class Caller:
        """Calls."""

        def __call__(self, a: int) -> int:
            return a

    def base(a: int, b: int) -> int:
        return a + b

    offered: list[FunctionTool[..., Any]] = [
        tool(Owner().method),
        tool(name="partly")(partial(base, b=2)),
        tool(name="caller")(Caller()),
    ]
    assert [one.descriptor.description for one in offered] == ["Does it.", "partly", "Calls."]
    assert list(offered[0].descriptor.input_schema["properties"]) == ["a"]


def test_importing_the_module_imports_no_pydantic_and_no_jsonschema() -> None:
    program = "import perdure.tools.define, perdure.agent, sys, json\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert not {"pydantic", "jsonschema", "openai"} & set(json.loads(done.stdout))


def test_the_context_of_a_call_carries_no_service_of_the_runtime() -> None:
    """R-010."""
    public = {name.name for name in dataclasses.fields(CallContext) if not name.name.startswith("_")}
    assert public == {"run_id", "call_id", "attempt", "epoch", "idempotency_key", "deadline"}
