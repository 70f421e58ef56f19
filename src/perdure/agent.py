"""What a user declares: an agent, checked when it is made, and its definition as data.

Owns the rules of a declaration. Resolves no model, opens nothing, runs nothing.
"""

import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args, get_type_hints

import msgspec

from perdure.contracts.agents import ANSWER_TOOL, AgentSpec, Settings
from perdure.contracts.contract import JsonObject, JsonValue
from perdure.contracts.limits import LARGEST, Limits, Policy, Price, limit_problems
from perdure.contracts.messages import Effect, ToolDescriptor
from perdure.errors import AnswerToolNameTakenError, ConfigurationError, ToolDefinitionError
from perdure.named import nearest
from perdure.ports import ModelClient, Tool
from perdure.prompting.texts import ANSWER_DESCRIPTION
from perdure.tools.output import AnswerCheck

MAX_LABELS = 16
MAX_LABEL_KEY_BYTES = 64
MAX_LABEL_VALUE_BYTES = 256

LoopFunction = Callable[[Any, Any], Awaitable[JsonValue]]
"""A loop: takes its run's context and the task, gives the answer."""

_NAME = re.compile(r"[a-z0-9-]{1,64}")
_MODEL = re.compile(r"[^\s:]+:\S+")


@dataclass(frozen=True, kw_only=True, eq=False)
class Agent:
    """An agent's declaration, checked as a whole when it is made.

    Raises:
        ConfigurationError: something in it cannot be used; the error names it and the next step.
        ToolDefinitionError: something in `tools` is no tool.
        AnswerToolNameTakenError: there is an output, and a tool named `answer`.
    """

    name: str
    """1 to 64 of `a-z`, `0-9` and `-`."""
    model: str | ModelClient | None = None
    """`provider:name`, or a client. None: it is named when a run starts."""
    base_url: str | None = None
    """Address of the provider's service, for a model given by name; None: the provider's usual one."""
    instructions: str = ""
    tools: Sequence[Tool] = ()
    """In the order the model sees them."""
    output: Any = None
    """What the answer is: a pydantic model, a dataclass, a msgspec Struct or a TypedDict. None: text."""
    output_schema: JsonObject | None = None
    """The same as a JSON schema (Draft 2020-12) of an object; instead of `output`."""
    limits: Limits = field(default_factory=Limits)
    loop: LoopFunction | None = None
    """An async function of the run's context and the task; None: the ReAct loop."""
    strategy: Literal["react"] = "react"
    batch: Literal["lenient", "strict"] = "lenient"
    """What a batch with a bad call does: `lenient` runs its valid reads, `strict` runs nothing."""
    resume_mode: Literal["continue", "conservative"] = "continue"
    on_exhausted: Literal["park", "finish"] = "park"
    on_reject: Literal["continue", "end"] = "continue"
    approval: Literal["auto"] = "auto"
    settings: Settings = field(default_factory=Settings)
    price: Price | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    """At most 16; keys up to 64 bytes, values up to 256. Never part of the definition."""
    ref: str | None = None
    """Where the command line finds this agent again: a file's absolute path, or `module:attribute`."""

    words: ClassVar[tuple[str, ...]] = ("strategy", "batch", "resume_mode", "on_exhausted", "on_reject", "approval")
    """The fields that hold one word of a few."""

    def __post_init__(self) -> None:
        """Checks everything; see the class."""
        name: object = self.name
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"the name is {name!r:.80}", where="agent", next="use 1 to 64 lower-case letters, digits and -"
            )
        where = f"agent {name}"
        _check_model(self.model, self.base_url, where)
        _check_text("instructions", self.instructions, where)
        for word in self.words:
            _check_word(word, getattr(self, word), where)
        _check_loop(self.loop, where)
        _check_settings(self.settings, where)
        _check_limits(self.limits, self.price, where)
        _check_labels(self.labels, where)
        object.__setattr__(self, "tools", _checked_tools(self.tools, where))
        # Made here, so that a wrong output or a taken name is found when the agent is made and not when it runs.
        if self.answer_check is not None and ANSWER_TOOL in self.tools_by_name:
            raise AnswerToolNameTakenError(
                f"a tool is named {ANSWER_TOOL!r}, which is the tool that carries a structured answer",
                where=where,
                next='rename it: @tool(name="...")',
            )

    @cached_property
    def answer_check(self) -> AnswerCheck | None:
        """Checks structured answers; None when the answer is text."""
        if self.output is not None and self.output_schema is not None:
            raise ConfigurationError(
                "output and output_schema are both given", where=f"agent {self.name}", next="keep one of them"
            )
        if self.output is None and self.output_schema is None:
            return None
        return AnswerCheck(self.output if self.output is not None else self.output_schema)

    @cached_property
    def tools_by_name(self) -> Mapping[str, Tool]:
        """The tools, by the name the model uses. The answer tool is none of them."""
        return MappingProxyType({tool.descriptor.name: tool for tool in self.tools})

    @cached_property
    def spec(self) -> AgentSpec:
        """The definition as recorded in the head of each run."""
        descriptors = [tool.descriptor for tool in self.tools]
        schema = None if self.answer_check is None else self.answer_check.schema
        if schema is not None:
            descriptors.append(ToolDescriptor(ANSWER_TOOL, ANSWER_DESCRIPTION, schema, Effect.READ))
        policy = Policy(
            limits=self.limits,
            strategy=self.strategy,
            batch=self.batch,
            resume_mode=self.resume_mode,
            on_exhausted=self.on_exhausted,
            on_reject=self.on_reject,
            price=self.price,
        )
        loop = "react" if self.loop is None else _loop_name(self.loop)
        return AgentSpec(self.name, self.instructions, tuple(descriptors), policy, self.settings, schema, loop)

    @property
    def loop_function(self) -> LoopFunction:
        """The loop that drives this agent."""
        if self.loop is not None:
            return self.loop
        from perdure.loops.react import react

        built_in: LoopFunction = react
        return built_in


def label_problems(labels: object) -> list[str]:
    """Every rule the labels break, as sentences; empty when they are sound."""
    if not isinstance(labels, Mapping):
        return [f"labels are {labels!r:.80}; they must be a table of texts"]
    problems = []
    if len(labels) > MAX_LABELS:
        problems.append(f"there are {len(labels)} labels; at most {MAX_LABELS} are kept")
    for key, value in labels.items():
        if not isinstance(key, str) or not isinstance(value, str):
            problems.append(f"label {key!r:.80} is {value!r:.80}; key and value must be texts")
        elif not 0 < _size(key) <= MAX_LABEL_KEY_BYTES:
            problems.append(f"label key {key!r:.80} is {_size(key)} bytes; it must be 1 to {MAX_LABEL_KEY_BYTES}")
        elif _size(value) > MAX_LABEL_VALUE_BYTES:
            problems.append(f"label {key} is {_size(value)} bytes long; it must be at most {MAX_LABEL_VALUE_BYTES}")
    return problems


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _check_model(model: object, base_url: object, where: str) -> None:
    if isinstance(model, str) and not _MODEL.fullmatch(model):
        raise ConfigurationError(
            f"the model is {model!r:.80}", where=where, next='write "provider:name" or "module:attribute"'
        )
    if model is not None and not isinstance(model, str) and not hasattr(model, "stream"):
        raise ConfigurationError(
            f"the model is {model!r:.80}, which has no `stream`",
            where=where,
            next='give "provider:name" or a ModelClient',
        )
    if base_url is None:
        return
    if not isinstance(base_url, str) or not base_url.startswith(("http://", "https://")):
        raise ConfigurationError(
            f"base_url is {base_url!r:.80}", where=where, next="give an http:// or https:// address"
        )
    if model is not None and not isinstance(model, str):
        raise ConfigurationError(
            "base_url is given beside a client", where=where, next="give the address to the client"
        )


def _check_text(name: str, value: object, where: str) -> None:
    if not isinstance(value, str):
        raise ConfigurationError(f"{name}: {value!r:.80}", where=where, next="give text")


def _check_word(name: str, value: object, where: str) -> None:
    words = _words_of(name)
    if value in words:
        return
    later = {("strategy", "plan_react"), ("approval", "ask"), ("approval", "never")}
    if (name, value) in later:
        raise ConfigurationError(
            f"{name} = {value!r} is not available in this release",
            where=where,
            next=f"use {words[0]!r} or leave it out",
        )
    hint = nearest(str(value), words)
    raise ConfigurationError(
        f"{name} is {value!r:.80}", where=where, next=f"{hint} It is one of {', '.join(words)}".strip()
    )


@cache
def _words_of(name: str) -> tuple[str, ...]:
    """The words that a field of an agent may hold. Kept: reading the hints costs more than the rest of the check."""
    return get_args(get_type_hints(Agent)[name])


def _check_loop(loop: object, where: str) -> None:
    if loop is None:
        return
    call = getattr(loop, "__call__", None)  # noqa: B004 - an object with an async __call__ is a loop too
    if not callable(loop) or not (inspect.iscoroutinefunction(loop) or inspect.iscoroutinefunction(call)):
        raise ConfigurationError(
            f"the loop is {loop!r:.80}", where=where, next="give an async function: async def my_loop(ctx, task)"
        )


def _loop_name(loop: Any) -> str:
    name = getattr(loop, "__qualname__", type(loop).__qualname__)
    return f"{getattr(loop, '__module__', type(loop).__module__)}:{name}"


def _check_settings(given: object, where: str) -> None:
    settings: Settings = _checked_record(given, Settings, "settings", where)
    problems = []
    if settings.temperature is not None and not (math.isfinite(settings.temperature) and settings.temperature >= 0):
        problems.append(f"temperature is {settings.temperature!r}; it must be 0 or more")
    if settings.max_output_tokens < 1:
        problems.append(f"max_output_tokens is {settings.max_output_tokens}; it must be at least 1")
    for name in ("timeout_s", "idle_timeout_s"):
        seconds = getattr(settings, name)
        if not math.isfinite(seconds) or seconds <= 0:
            problems.append(f"{name} is {seconds!r}; it must be above 0 seconds")
    _refuse(problems, f"{where}, settings")


def _check_limits(limits: object, price: object, where: str) -> None:
    if not isinstance(limits, Limits):
        raise ConfigurationError(f"limits are {limits!r:.80}", where=where, next="give Limits(...)")
    problems = limit_problems(limits)
    if price is not None:
        _checked_record(price, Price, "price", where)
        for name in ("input", "output", "cached_input"):
            amount = getattr(price, name)
            if amount is not None and amount < 0:
                problems.append(f"price {name} is {amount}; it must be 0 or more micro-units per million tokens")
    if limits.hard_ceiling:
        problems.append("hard_ceiling is not available in this release; leave it out")
    if limits.require_cost_enforcement and limits.max_cost_microunits is not None and price is None:
        problems.append(
            "require_cost_enforcement is set, but no price is known; give [price], or Agent(price=Price(...))"
        )
    _refuse(problems, f"{where}, limits")
    _checked_record(limits, Limits, "limits", where)


def _checked_record(value: Any, kind: Any, name: str, where: str) -> Any:
    if not isinstance(value, kind):
        raise ConfigurationError(f"{name} is {value!r:.80}", where=where, next=f"give {kind.__name__}(...)")
    fields = msgspec.structs.asdict(value)
    try:
        # A record made in Python has unchecked fields.
        checked = msgspec.convert(fields, kind, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{name}: {error}", where=where, next="give a value of that type") from error
    for field_name, number in fields.items():
        if isinstance(number, int) and abs(number) > LARGEST:
            raise ConfigurationError(
                f"{name}: {field_name} is a whole number of {number.bit_length()} bits",
                where=where,
                next="give one within 64 bits",
            )
    return checked


def _check_labels(labels: Mapping[str, str], where: str) -> None:
    _refuse(label_problems(labels), where)


def _refuse(problems: list[str], where: str) -> None:
    if problems:
        raise ConfigurationError(
            "; ".join(problems), where=where, next="correct " + ("it" if len(problems) == 1 else "them")
        )


def _checked_tools(tools: object, where: str) -> tuple[Tool, ...]:
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise ConfigurationError(f"tools are {tools!r:.80}", where=where, next="give a list of tools")
    seen: set[str] = set()
    for place, tool in enumerate(tools):
        if not isinstance(getattr(tool, "descriptor", None), ToolDescriptor) or not hasattr(tool, "bind"):
            plain = callable(tool) and not isinstance(tool, type)
            raise ToolDefinitionError(
                f"{getattr(tool, '__qualname__', repr(tool)[:80])} is no tool",
                where=f"{where}, tools[{place}]",
                next='decorate the function: @tool(effect="read")' if plain else "give functions decorated with @tool",
            )
        name = tool.descriptor.name
        if name in seen:
            raise ConfigurationError(
                f"two tools are named {name!r}", where=f"{where}, tools[{place}]", next='rename one: @tool(name="...")'
            )
        seen.add(name)
    return tuple(tools)
