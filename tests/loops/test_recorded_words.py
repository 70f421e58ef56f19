"""What a loop may be made of, and that words once recorded stay as they were."""

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from tests.runtime.runs import agent_of, asked, before, count, cut, embedded, extended, script

import perdure.loops.react
from perdure import Limits, RunContext, react, tool
from perdure.journal import events as ev
from perdure.testing import calls, text

SCHEMA = {"type": "object", "properties": {"total": {"type": "integer"}}, "required": ["total"]}


@tool(effect="read")
async def look() -> str:
    """Looks."""
    return "seen"


def test_the_loop_is_made_of_a_context_and_prompting_alone() -> None:
    """R-018, R-001: prompts, stores, tools and approvals lie behind the context."""
    tree = ast.parse(Path(perdure.loops.react.__file__).read_text("utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    rooms = {module.split(".")[1] for module in imported if module}
    assert rooms <= {"contracts", "prompting", "runtime"}
    assert {module for module in imported if module and "runtime" in module} == {"perdure.runtime.context"}


async def test_two_loops_share_one_journal_with_one_head_and_one_end() -> None:
    """S-008, S-009: a loop driven inside another's run leaves the end to its caller."""

    async def both(ctx: RunContext, task: str) -> Any:
        return [await react(ctx, task), await react(ctx, task)]

    model = script(calls(("look", {})), text("first"), text("second"))
    run = await embedded(agent_of(look, loop=both), model)
    assert run.outcome.output == ["first", "second"]
    assert (count(run.envelopes, "run_started"), count(run.envelopes, "run_completed")) == (1, 1)


async def test_the_words_of_a_refusal_are_read_back_and_not_made_again() -> None:
    """S-019, S-020, C33: another release's wording, or another library's verdict, changes no recorded run."""
    agent = agent_of(look, output_schema=SCHEMA)
    model = script(calls(("answer", {"total": "many"})), calls(("answer", {"total": 3})))
    whole = await embedded(agent, model)
    place = before(whole, "tool_call_refused")
    refused = ev.decode(whole.envelopes[place])
    assert isinstance(refused, ev.ToolCallRefused)
    older = extended(cut(whole, place), msgspec.structs.replace(refused, observation="as an older release said it"))
    again = script(calls(("answer", {"total": "many"})), calls(("answer", {"total": 3})))
    resumed = await embedded(agent, again, recorded=older)
    assert resumed.outcome.output == {"total": 3}
    assert "as an older release said it" in asked(again)[0][-1]


async def test_a_re_ask_for_the_answer_meets_limits_like_any_ask() -> None:
    """S-034: it parks, and goes on when the limit is raised."""
    agent = agent_of(look, output_schema=SCHEMA, limits=Limits(max_model_turns=1))
    run = await embedded(agent, script(text("three")))
    assert run.outcome.park is not None
    assert run.outcome.park.detail["limit"] == "max_model_turns"
    raised = extended(run, ev.BudgetChanged({"max_model_turns": 2}))
    model = script(text("three"), calls(("answer", {"total": 3})))
    resumed = await embedded(agent, model, recorded=replace(raised, outcome=run.outcome))
    assert resumed.outcome.output == {"total": 3}
    assert len(model.requests) == 1
