"""The ReAct loop over a list journal, driven by scripted replies."""

from typing import Any

import pytest
from pydantic import BaseModel, field_validator
from tests.runtime.runs import agent_of, asked, before, count, cut, embedded, kinds, observed, only, script, state_of

from perdure import Agent, Limits, ToolFailed, assemble, run_embedded, tool
from perdure.contracts.messages import StopReason, Usage
from perdure.errors import AnswerToolNameTakenError
from perdure.journal import events as ev
from perdure.testing.clocks import ManualClock, SeededEntropy
from perdure.testing.replies import Reply, ScriptedCall, calls, text
from perdure.testing.scripted import ScriptedModel


class Report(BaseModel):
    done: bool
    note: str = ""


ran: list[str] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    ran.clear()


@tool(effect="read")
async def look(place: str = "here") -> str:
    """Looks."""
    ran.append(f"look {place}")
    return f"seen {place}"


@tool
async def act(what: str) -> str:
    """Acts."""
    ran.append(f"act {what}")
    return f"did {what}"


@tool(effect="read")
async def silent() -> str:
    """Says nothing."""
    return ""


@tool(effect="read")
async def bare() -> str:
    """Takes nothing."""
    ran.append("bare")
    return "bare"


# How it ends


async def test_a_turn_of_text_without_calls_is_the_answer() -> None:
    """S-039, R-003, R-012, C9."""
    run = await embedded(agent_of(look), script(text("All is well.")))
    assert run.outcome.status == "completed"
    assert (run.outcome.outcome, run.outcome.terminal_reason) == ("success", "final")
    assert run.outcome.assurance == "unverified"
    assert run.outcome.output == run.outcome.answer == "All is well."


async def test_a_run_is_head_turns_proposal_and_one_end_in_that_order() -> None:
    """S-006, S-007, S-010, S-062, R-011, R-015, O5."""
    run = await embedded(agent_of(look), script(calls(("look", {})), text("Done.")))
    assert kinds(run.envelopes) == [
        "run_started",
        "drive_started",
        "model_call_requested",
        "model_call_completed",
        "tool_call_requested",
        "tool_call_completed",
        "model_call_requested",
        "model_call_completed",
        "proposal_received",
        "run_completed",
    ]
    head = only(run.envelopes, ev.RunStarted)[0]
    assert head.input == "the task"
    assert head.agent.name == "tester"


async def test_the_conversation_is_task_turn_and_all_results_of_the_turn_in_call_order() -> None:
    """S-023, S-028, S-029, R-014."""
    model = script(calls(("look", {"place": "b"}), ("act", {"what": "a"}), text="First."), text("Done."))
    await embedded(agent_of(look, act), model)
    assert asked(model) == [
        ["user: the task"],
        [
            "user: the task",
            "turn 1: First.['look', 'act']",
            "results: 1.0 look completed: seen b | 1.1 act completed: did a",
        ],
    ]


async def test_a_request_holds_the_instructions_and_the_tools_in_declared_order() -> None:
    """S-024, S-025, S-026: the choice is free unless there is a schema."""
    model = script(text("Done."))
    await embedded(agent_of(act, look), model)
    request = model.requests[0]
    assert request.instructions == "Do it."
    assert [descriptor.name for descriptor in request.tools] == ["act", "look"]
    assert set(request.tools[0].input_schema) >= {"type", "properties"}
    assert request.tool_choice == "auto"


async def test_text_that_looks_like_a_call_is_text() -> None:
    """R-004, O7, D-026."""
    words = '{"tool": "act", "arguments": {"what": "x"}}'
    run = await embedded(agent_of(act), script(text(words)))
    assert run.outcome.output == words
    assert ran == []


# A structured end


async def test_under_a_schema_a_call_is_asked_for_and_the_answer_tool_ends_the_run() -> None:
    """S-026, S-040, S-043, S-049, C10."""
    model = script(calls(("answer", {"done": True, "note": "x"})))
    run = await embedded(agent_of(look, output=Report), model)
    assert model.requests[0].tool_choice == "any"
    assert [descriptor.name for descriptor in model.requests[0].tools] == ["look", "answer"]
    assert run.outcome.output == {"done": True, "note": "x"}
    assert only(run.envelopes, ev.ProposalReceived)[0].output == {"done": True, "note": "x"}
    assert count(run.envelopes, "tool_call_requested") == 0


async def test_the_answer_is_the_call_verbatim_with_no_default_filled_in() -> None:
    """S-043."""
    run = await embedded(agent_of(output=Report), script(calls(("answer", {"done": True}))))
    assert run.outcome.output == {"done": True}


async def test_an_answer_beside_other_calls_is_told_to_come_alone_and_the_others_run() -> None:
    """S-044, C11."""
    model = script(
        calls(("answer", {"done": True}), ("act", {"what": "x"})),
        calls(("answer", {"done": True}), ("answer", {"done": False})),
        calls(("answer", {"done": True})),
    )
    run = await embedded(agent_of(act, output=Report), model)
    assert ran == ["act x"]
    assert run.outcome.output == {"done": True}
    shown = observed(run.envelopes)
    assert "only call of a turn" in shown["1.0"]
    assert shown["1.1"] == "'did x'"
    assert "only call of a turn" in shown["2.0"]
    assert "only call of a turn" in shown["2.1"]
    assert state_of(run.envelopes).spent.model_repairs == 0


async def test_an_answer_that_breaks_the_schema_is_told_so_and_costs_a_turn_only() -> None:
    """S-045, S-048."""
    model = script(*[calls(("answer", {"done": "perhaps"}))] * 7, calls(("answer", {"done": True})))
    run = await embedded(agent_of(output=Report), model)
    assert run.outcome.output == {"done": True}
    assert "does not fit its schema" in observed(run.envelopes)["1.0"]
    assert state_of(run.envelopes).spent.model_repairs == 0


async def test_the_same_violation_again_is_one_counted_line() -> None:
    """S-046."""
    model = script(*[calls(("answer", {"done": "perhaps"}))] * 3, calls(("answer", {"done": True})))
    shown = observed((await embedded(agent_of(output=Report), model)).envelopes)
    assert "failed" not in shown["1.0"]
    assert "2 times in a row" in shown["2.0"]
    assert "3 times in a row" in shown["3.0"]
    assert "\n" not in shown["3.0"]


async def test_a_turn_without_a_call_under_a_schema_is_asked_again_and_costs_a_turn_only() -> None:
    """S-047, S-048, C10."""
    model = script(*[text("I am done.")] * 5, calls(("answer", {"done": True})))
    run = await embedded(agent_of(output=Report), model)
    assert run.outcome.output == {"done": True}
    notices = [event.notice for event in only(run.envelopes, ev.ModelCallRequested) if event.notice]
    assert [notice.kind for notice in notices] == ["no_call"] * 5
    assert len({notice.text for notice in notices}) == 1
    assert state_of(run.envelopes).spent.model_repairs == 0
    assert "`answer`" in asked(model)[1][-1]


def test_a_tool_of_the_answer_tools_name_is_refused_before_anything_is_asked() -> None:
    """S-013, S-041, S-042, C21: not even a head is recorded, since the agent cannot be made."""

    @tool(name="answer")
    async def mine(x: int) -> int:
        """Mine."""
        return x

    with pytest.raises(AnswerToolNameTakenError, match="answer"):
        agent_of(mine, output=Report)


async def test_a_limit_met_by_a_re_ask_parks_like_any_other() -> None:
    """S-034."""
    agent = agent_of(output=Report, limits=Limits(max_model_turns=2))
    run = await embedded(agent, ScriptedModel(lambda _: text("I am done.")))
    assert run.outcome.park is not None
    assert run.outcome.park.detail == {"limit": "max_model_turns", "max": 2, "used": 2, "need": 1}


async def test_what_a_validator_said_is_on_record_and_read_from_there() -> None:
    """S-019, S-020, C33, O8: with other words of a library's, or another validator, an old run reads the old words."""

    class Strict(BaseModel):
        done: bool

        @field_validator("done")
        @classmethod
        def _must_hold(cls, value: bool) -> bool:
            raise ValueError(words[0])

    words = ["the old words"]
    replies = [calls(("answer", {"done": True})), calls(("look", '{"place": 7}')), text("x"), text("y")]
    agent = agent_of(look, output=Strict, limits=Limits(max_model_turns=4))
    whole = await embedded(agent, script(*replies))
    refused = only(whole.envelopes, ev.ToolCallRefused)
    assert "the old words" in refused[0].observation
    words[0] = "the new words"
    model = script(*replies)
    kept = cut(whole, before(whole, "model_call_completed", 2))
    await embedded(agent, model, recorded=kept)
    assert "the old words" in asked(model)[0][2]
    assert "the new words" not in "".join(asked(model)[0])
    assert refused[1].observation in asked(model)[0][4]


# Bad calls


async def test_nothing_with_an_effect_runs_beside_a_bad_call_and_valid_reads_do() -> None:
    """H13, C11, S-053, S-017, R-009."""
    model = script(
        calls(("act", {"what": "a"}), ("look", {"place": "b"}), ("fly", {}), ("act", {"what": "c"})), text("Done.")
    )
    run = await embedded(agent_of(look, act), model)
    assert ran == ["look b"]
    shown = observed(run.envelopes)
    assert "Nothing of this call happened" in shown["1.0"]
    assert shown["1.1"] == "'seen b'"
    assert "no tool named `fly`" in shown["1.2"]
    assert "look, act" in shown["1.2"]
    assert "Nothing of this call happened" in shown["1.3"]
    assert state_of(run.envelopes).spent.model_repairs == 1


async def test_a_strict_batch_holds_reads_back_too() -> None:
    """C11."""
    model = script(calls(("look", {"place": "b"}), ("fly", {})), text("Done."))
    run = await embedded(agent_of(look, batch="strict"), model)
    assert ran == []
    assert "Nothing of this call happened" in observed(run.envelopes)["1.0"]


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("Look", "{}", "no tool named `Look`"),
        ("look<|x|>", "{}", "no tool named"),
        ("look", '["x"]', "not a JSON object"),
        ("look", '"ls"', "not a JSON object"),
        ("look", "null", "not a JSON object"),
        ("look", '{"place": "x', "not valid JSON"),
        ("look", '"{\\"place\\": \\"x\\"}"', "not a JSON object"),
        ("act", "", "what"),
        ("look", '{"place": 7}', "place"),
        ("look", '{"place": "x", "extra": 1}', "extra"),
    ],
)
async def test_a_call_that_cannot_be_run_as_sent_gets_one_answer_that_says_why(
    name: str, arguments: str, told: str
) -> None:
    """H13, S-053, R-008, R-158, O8: and the run goes on."""
    model = script(calls((name, arguments), ("act", {"what": "y"})), text("Done."))
    run = await embedded(agent_of(look, act), model)
    assert run.outcome.output == "Done."
    assert ran == []
    assert told in observed(run.envelopes)["1.0"]
    turn = only(run.envelopes, ev.ModelCallCompleted)[0].turn
    assert all(isinstance(call.arguments, dict) for call in turn.calls)


async def test_no_arguments_at_all_count_as_an_empty_object_where_that_fits() -> None:
    """H13."""
    await embedded(agent_of(bare), script(calls(("bare", "")), text("Done.")))
    assert ran == ["bare"]


async def test_bad_calls_without_end_stop_the_run_with_a_reason() -> None:
    """H13, C11: three repairs by default, then it parks."""
    model = ScriptedModel(lambda request: calls(("fly", {"n": request.transcript.turns})))
    run = await embedded(agent_of(look), model)
    assert run.outcome.status == "parked"
    assert run.outcome.park is not None
    assert run.outcome.park.kind == "budget_exceeded"
    assert run.outcome.park.detail == {"limit": "max_model_repairs", "max": 3, "used": 3, "need": 1}
    assert len(model.requests) == 4


# Cut and empty replies


async def test_a_broken_call_of_a_reply_cut_by_the_output_limit_is_told_to_send_less() -> None:
    """H11 (a): nothing is repaired into an empty object."""
    cut = Reply(calls=(ScriptedCall("act", '{"what": "aaaaaaaa'),), stop=StopReason.LENGTH)
    model = script(cut, text("Done."))
    run = await embedded(agent_of(act), model)
    assert ran == []
    assert "cut off by the output limit" in observed(run.envelopes)["1.0"]
    assert state_of(run.envelopes).spent.model_repairs == 1


async def test_a_cut_call_that_happens_to_be_whole_json_but_lacks_a_field_is_not_run() -> None:
    """H11 (b)."""
    cut = Reply(calls=(ScriptedCall("act", "{}"),), stop=StopReason.LENGTH)
    run = await embedded(agent_of(act), script(cut, text("Done.")))
    assert ran == []
    assert "what" in observed(run.envelopes)["1.0"]


async def test_a_whole_write_beside_a_cut_one_is_not_run() -> None:
    """H11 (c): and what goes back is valid JSON."""
    cut = Reply(
        calls=(ScriptedCall("act", '{"what": "a"}'), ScriptedCall("act", '{"what": "b')), stop=StopReason.LENGTH
    )
    run = await embedded(agent_of(act), script(cut, text("Done.")))
    assert ran == []
    assert "Nothing of this call happened" in observed(run.envelopes)["1.0"]
    assert only(run.envelopes, ev.ModelCallCompleted)[0].turn.calls[1].arguments == {}


async def test_broken_arguments_of_a_reply_that_claims_to_be_whole_are_no_json() -> None:
    """H11: the stop reason says calls, the JSON is broken."""
    run = await embedded(agent_of(act), script(calls(("act", '{"what": "b')), text("Done.")))
    assert ran == []
    assert "not valid JSON" in observed(run.envelopes)["1.0"]


async def test_the_same_oversize_call_again_and_again_is_bounded() -> None:
    """H11."""
    cut = Reply(calls=(ScriptedCall("act", '{"what": "aaaa'),), stop=StopReason.LENGTH)
    run = await embedded(agent_of(act), ScriptedModel(lambda _: cut))
    assert run.outcome.park is not None
    assert run.outcome.park.detail["limit"] == "max_model_repairs"


@pytest.mark.parametrize("empty", [Reply(), Reply(text=" \n ")])
async def test_an_empty_reply_is_not_the_answer_and_is_asked_again(empty: Reply) -> None:
    """H14: each spends one repair."""
    model = script(empty, text("Done."))
    run = await embedded(agent_of(look), model)
    assert run.outcome.output == "Done."
    assert state_of(run.envelopes).spent.model_repairs == 1
    assert "empty" in asked(model)[1][-1]


async def test_a_text_cut_by_the_output_limit_is_not_the_answer() -> None:
    """H14, C11: half a text never becomes the final one."""
    model = script(Reply(text="Half of the ans", stop=StopReason.LENGTH), text("Short."))
    run = await embedded(agent_of(look), model)
    assert run.outcome.output == "Short."
    assert state_of(run.envelopes).spent.model_repairs == 1


async def test_empty_replies_without_end_park_or_end_invalid() -> None:
    """H14, R-012."""
    run = await embedded(agent_of(look), ScriptedModel(lambda _: Reply()))
    assert run.outcome.status == "parked"
    ended = await embedded(agent_of(look, on_exhausted="finish"), ScriptedModel(lambda _: Reply()))
    assert (ended.outcome.outcome, ended.outcome.terminal_reason) == ("failed", "invalid_decision")


async def test_calls_beside_empty_text_run() -> None:
    """H14."""
    await embedded(agent_of(look), script(calls(("look", {}), text="  "), text("Done.")))
    assert ran == ["look here"]


async def test_an_empty_result_is_shown_as_having_no_output() -> None:
    """H14."""
    model = script(calls(("silent", {})), text("Done."))
    await embedded(agent_of(silent), model)
    assert asked(model)[1][-1] == "results: 1.0 silent completed: (the tool ran and returned no output)"


# What replay sees


async def test_usage_the_provider_leaves_out_is_estimated_and_flagged() -> None:
    """S-027, O3."""
    model = script(Reply(text="Done.", usage=None))
    run = await embedded(agent_of(look), model)
    assert run.outcome.usage.estimated
    assert run.outcome.usage.input_tokens
    known = await embedded(agent_of(look), script(Reply(text="Done.", usage=Usage(7, 5))))
    assert (known.outcome.usage.input_tokens, known.outcome.usage.output_tokens) == (7, 5)
    assert not known.outcome.usage.estimated


async def test_the_same_kernel_drives_a_list_as_drives_a_store() -> None:
    """R-002, R-019: the outcome names the run and its use."""

    @tool(effect="read")
    async def fails() -> str:
        """Fails."""
        raise ToolFailed("no")

    run = await run_embedded(
        Agent(name="e", tools=[fails], limits=Limits(max_model_turns=5)),
        {"any": ["json", 1]},
        model=script(calls(("fails", {})), text("Done.")),
        clock=ManualClock(),
        entropy=SeededEntropy(),
    )
    assert run.outcome.status == "completed"
    assert run.outcome.usage.model_turns == 2
    assert only(run.envelopes, ev.RunStarted)[0].input == {"any": ["json", 1]}


def test_assembling_is_a_function_of_the_definition_and_the_view() -> None:
    """S-002, S-014, S-021, O12."""
    from perdure.contracts.contract import canonical
    from perdure.journal.transcript import Transcript, UserEntry

    def request() -> Any:
        transcript = Transcript()
        transcript.append(UserEntry("x"))
        made = assemble(agent_of(look, act).spec, transcript.view())
        return canonical([made.instructions, made.tools, list(made.transcript), made.settings, made.tool_choice])

    assert request() == request()
