"""An agent's declaration: what it holds, and what it refuses when it is made."""

import math
from typing import Any

import pydantic
import pytest

from perdure.agent import ANSWER_DESCRIPTION, Agent, label_problems
from perdure.contracts.agents import Settings
from perdure.contracts.limits import Limits, Price
from perdure.contracts.messages import Effect
from perdure.errors import AnswerToolNameTakenError, ConfigurationError, ToolDefinitionError
from perdure.loops.react import react
from perdure.tools.define import tool


class Report(pydantic.BaseModel):
    status: str


@tool(effect="read")
async def look(job_id: str) -> str:
    """Looks."""
    return job_id


@tool
async def act(job_id: str) -> str:
    """Acts."""
    return job_id


@tool(name="answer")
async def reply() -> None: ...


async def my_loop(ctx: Any, task: str) -> str:
    return task


def plain(a: int) -> int:
    return a


def test_the_definition_holds_the_tools_in_order_and_the_answer_tool_last() -> None:
    """S-024, S-040, S-049, R-021."""
    agent = Agent(name="a", instructions="Do.", tools=[look, act], output=Report)
    spec = agent.spec
    assert [one.name for one in spec.tools] == ["look", "act", "answer"]
    answer = spec.tools[-1]
    assert (answer.description, answer.effect) == (ANSWER_DESCRIPTION, Effect.READ)
    assert answer.input_schema == spec.output_schema
    assert spec.instructions == "Do."
    assert dict(agent.tools_by_name) == {"look": look, "act": act}


def test_without_an_output_there_is_no_answer_tool_and_its_name_is_free() -> None:
    """S-040."""
    agent = Agent(name="a", tools=[reply])
    assert [one.name for one in agent.spec.tools] == ["answer"]
    assert agent.answer_check is None
    assert agent.spec.output_schema is None


def test_a_tool_of_the_answer_tools_name_beside_an_output_is_refused() -> None:
    """S-041."""
    with pytest.raises(AnswerToolNameTakenError, match="agent a: a tool is named 'answer'") as raised:
        Agent(name="a", tools=[look, reply], output=Report)
    assert raised.value.code == "answer_tool_name_taken"
    assert isinstance(raised.value, ConfigurationError)


def test_an_agent_may_declare_its_output_as_a_schema() -> None:
    """S-040, S-049."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    agent = Agent(name="a", output_schema=schema)
    assert agent.spec.output_schema == schema
    assert agent.answer_check is not None
    assert agent.answer_check.problem({"n": 1}) is None
    assert agent.answer_check.problem({"n": "1"}) is not None


def test_equal_declarations_have_equal_digests_and_labels_do_not_count() -> None:
    """S-077, R-031."""

    def made(**more: Any) -> str:
        return Agent(name="a", tools=[look], output=Report, **more).spec.digest()

    assert made() == made(labels={"team": "x"}) == made(model="openai:a") == made(ref="/x/agent.toml")
    assert made() != made(limits=Limits(max_model_turns=7))
    assert made() != made(batch="strict")
    assert made() != made(loop=my_loop)


def test_a_default_that_is_spelled_out_changes_no_digest() -> None:
    """R-031: whatever the value was made from, as the words and numbers of a file are."""

    def anew(word: str) -> Any:
        return word.encode().decode()

    spelled = Agent(
        name="a",
        settings=Settings(max_output_tokens=int("4096"), timeout_s=float("120"), idle_timeout_s=float("60")),
        on_exhausted=anew("park"),
        batch=anew("lenient"),
        price=Price(1, 2, currency=anew("USD")),
    )
    assert spelled.spec.digest() == Agent(name="a", price=Price(1, 2)).spec.digest()
    assert spelled.spec.digest() != Agent(name="a", price=Price(1, 2, 2)).spec.digest()


def test_the_loop_is_react_or_the_users_own() -> None:
    assert Agent(name="a").loop_function is react
    assert Agent(name="a").spec.loop == "react"
    own = Agent(name="a", loop=my_loop)
    assert own.loop_function is my_loop
    assert own.spec.loop == f"{__name__}:my_loop"


def test_the_tools_of_an_agent_cannot_be_changed_once_it_is_made() -> None:
    """R-031."""
    offered = [look]
    agent = Agent(name="a", tools=offered)
    offered.append(act)  # type: ignore[arg-type]
    assert [one.name for one in agent.spec.tools] == ["look"]
    with pytest.raises(TypeError):
        agent.tools_by_name["act"] = act  # type: ignore[index]


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "a name in capitals": ({"name": "Agent"}, "the name is 'Agent'", "lower-case"),
    "an empty name": ({"name": ""}, "the name is ''", "lower-case"),
    "a long name": ({"name": "a" * 65}, "the name is", "1 to 64"),
    "a name that is no text": ({"name": 5}, "the name is 5", "lower-case"),
    "a model without provider": ({"model": "gpt"}, "the model is 'gpt'", "provider:name"),
    "a model that is no client": ({"model": 5}, "no `stream`", "ModelClient"),
    "a base_url that is no address": ({"base_url": "localhost:80"}, "base_url", "http://"),
    "instructions that are no text": ({"instructions": 5}, "instructions", "give text"),
    "tools that are no list": ({"tools": look}, "tools are", "give a list"),
    "two tools of one name": ({"tools": [look, look]}, "two tools are named 'look'", "rename one"),
    "two kinds of output": ({"output": Report, "output_schema": {"type": "object"}}, "both given", "keep one"),
    "an output that is a list": ({"output": list[str]}, "of type", "put the value into a field"),
    "an invalid output schema": ({"output_schema": {"type": "objet"}}, "no valid JSON schema", "correct"),
    "a plan": ({"strategy": "plan_react"}, "not available in this release", "use 'react'"),
    "a batch with a slip": ({"batch": "strickt"}, "batch is 'strickt'", "did you mean 'strict'?"),
    "another resume mode": ({"resume_mode": "x"}, "resume_mode is 'x'", "continue, conservative"),
    "another exhausted": ({"on_exhausted": "stop"}, "on_exhausted is 'stop'", "park, finish"),
    "another reject": ({"on_reject": None}, "on_reject is None", "continue, end"),
    "approvals": ({"approval": "ask"}, "approval = 'ask' is not available in this release", "use 'auto'"),
    "refusals": ({"approval": "never"}, "approval = 'never' is not available in this release", "use 'auto'"),
    "a loop that is not async": ({"loop": plain}, "the loop is", "async def"),
    "a loop that is text": ({"loop": "react"}, "the loop is 'react'", "async def"),
    "settings that are a dict": ({"settings": {}}, "settings is {}", "give Settings"),
    "a temperature that is no number": ({"settings": Settings(temperature=math.nan)}, "temperature is nan", "correct"),
    "no output tokens": ({"settings": Settings(max_output_tokens=0)}, "max_output_tokens is 0", "correct"),
    "no time": ({"settings": Settings(timeout_s=0)}, "timeout_s is 0", "correct"),
    "a seed that is text": ({"settings": Settings(seed="1")}, "seed", "that type"),  # type: ignore[arg-type]
    "limits that are a dict": ({"limits": {}}, "limits are {}", "give Limits"),
    "a zero limit": ({"limits": Limits(max_tool_calls=0)}, "max_tool_calls is 0", "correct it"),
    "two bad limits": (
        {"limits": Limits(max_tool_calls=0, max_total_tokens=-1)},
        "max_tool_calls is 0; it must be a whole number of at least 1; max_total_tokens is -1",
        "correct them",
    ),
    "a step limit above the global one": (
        {"limits": Limits(max_tool_calls=5, max_tool_calls_per_step=6)},
        "max_tool_calls_per_step (6) is above max_tool_calls (5)",
        "correct",
    ),
    "a fraction of repetitions": ({"limits": Limits(max_repeated_actions=2.0)}, "max_repeated_actions", "type"),  # type: ignore[arg-type]
    "a hard ceiling": ({"limits": Limits(hard_ceiling=True)}, "hard_ceiling is not available in this release", ""),
    "enforcement without a price": (
        {"limits": Limits(max_cost_microunits=5, require_cost_enforcement=True)},
        "no price is known",
        "correct",
    ),
    "a negative price": ({"price": Price(-1, 1)}, "price input is -1", "correct"),
    "a price in fractions": ({"price": Price(1.5, 1)}, "price", "type"),  # type: ignore[arg-type]
    "too many labels": ({"labels": {str(n): "" for n in range(17)}}, "17 labels; at most 16", "correct"),
    "a long label key": ({"labels": {"é" * 33: ""}}, "66 bytes", "correct"),
    "a long label": ({"labels": {"k": "é" * 129}}, "258 bytes", "correct"),
    "a label that is a number": ({"labels": {"k": 1}}, "label 'k' is 1", "correct"),
    "labels that are a list": ({"labels": ["k"]}, "labels are ['k']", "correct"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_declaration_that_cannot_be_used_is_refused_with_its_place_and_the_next_step(case: str) -> None:
    """R-071, R-072, S-077."""
    given, found, step = BAD[case]
    with pytest.raises(ConfigurationError) as raised:
        Agent(**{"name": "mine", **given})
    assert found in raised.value.found
    assert step in raised.value.next
    assert raised.value.where


@pytest.mark.parametrize(
    ("thing", "step"), [(plain, "@tool(effect="), (Report, "decorated with @tool"), ("look", "decorated with @tool")]
)
def test_a_thing_that_is_no_tool_is_refused_with_its_place_in_the_list(thing: Any, step: str) -> None:
    """R-031."""
    with pytest.raises(ToolDefinitionError, match=r"agent mine, tools\[1\]") as raised:
        Agent(name="mine", tools=[look, thing])
    assert step in raised.value.next


def test_a_cost_limit_with_a_price_may_be_enforced() -> None:
    limits = Limits(max_cost_microunits=5, require_cost_enforcement=True)
    assert Agent(name="a", limits=limits, price=Price(1, 2)).spec.policy.price == Price(1, 2)


def test_labels_at_their_limits_are_taken() -> None:
    """S-077."""
    labels = {f"{n:064}": "v" * 256 for n in range(16)}
    assert label_problems(labels) == []
    assert Agent(name="a", labels=labels).labels == labels
