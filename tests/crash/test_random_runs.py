"""Runs nobody thought of, cut after every event: over a list, where a cut costs next to nothing."""

import asyncio
import functools
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.crash.errands import Report, Town, tools_over
from tests.runtime.runs import count, cut

from perdure import Agent, EmbeddedRun, Limits, run_embedded
from perdure.contracts.contract import canonical
from perdure.contracts.messages import StopReason
from perdure.testing.clocks import ManualClock, SeededEntropy
from perdure.testing.replies import Reply, ScriptedCall, text
from perdure.testing.scripted import ScriptedModel
from perdure.testing.sweeping import lasting

CALLS = [
    ("look", '{"place": "gate"}'),
    ("look", '{"place": "yard"}'),
    ("weigh", '{"thing": "ox"}'),
    ("weigh", '{"thing": "wagon"}'),
    ("signpost", '{"name": "east"}'),
    ("knock", '{"door": "mill"}'),
    ("knock", '{"door": "barn"}'),
    ("order", '{"thing": "rope"}'),
    ("order", '{"thing": "nails"}'),
    ("order", '{"thing": 7}'),
    ("order", '{"thing": "na'),
    ("send", '{"letter": "news"}'),
    ("answer", '{"done": true, "note": "x"}'),
    ("answer", '{"done": "yes"}'),
    ("fly", "{}"),
    ("look", "[]"),
]

replies = st.builds(
    Reply,
    text=st.sampled_from(["", "words"]),
    calls=st.lists(st.sampled_from(CALLS).map(lambda call: ScriptedCall(*call)), min_size=0, max_size=4).map(tuple),
    stop=st.sampled_from([None, None, None, StopReason.LENGTH]),
)


@functools.cache
def agent_for(structured: bool, on_exhausted: Literal["park", "finish"], tight: bool) -> Agent:
    """An agent over a town of its own, made once: a tool costs more to make than a run."""
    limits = Limits(max_model_turns=5, max_tool_calls=6, max_model_repairs=2) if tight else Limits(max_model_repairs=20)
    return Agent(
        name="random",
        tools=tools_over(Town()),
        limits=limits,
        output=Report if structured else None,
        on_exhausted=on_exhausted,
    )


async def drive(
    agent: Agent, script: list[Reply], recorded: EmbeddedRun | None
) -> tuple[EmbeddedRun, dict[int, bytes]]:
    model = ScriptedModel([*script, *[text("The end.")] * 9], chunk=0)
    run = await run_embedded(
        agent, "go", model=model, run_id="r", recorded=recorded, clock=ManualClock(), entropy=SeededEntropy()
    )
    forms = {request.transcript.turns: canonical(list(request.transcript)) for request in model.requests}
    return run, forms


async def goes_the_same_way(agent: Agent, script: list[Reply]) -> None:
    whole, asked = await drive(agent, script, None)
    for kept in range(1, len(whole.envelopes) + 1):
        again, asked_again = await drive(agent, script, cut(whole, kept))
        assert lasting(again.envelopes) == lasting(whole.envelopes)
        assert again.outcome.status == whole.outcome.status
        assert all(form == asked[turns] for turns, form in asked_again.items())


async def keeps_its_limits(agent: Agent, script: list[Reply]) -> None:
    whole, _ = await drive(agent, script, None)
    for kept in range(1, len(whole.envelopes) + 1):
        again, _ = await drive(agent, script, cut(whole, kept))
        for run in (whole, again):
            spent = run.outcome.usage
            assert spent.model_turns <= 5
            assert spent.tool_calls <= 6
            assert count(run.envelopes, "tool_call_requested") <= spent.tool_calls
            assert run.outcome.status in ("completed", "failed", "parked")


scripts = st.lists(replies, min_size=1, max_size=5)
ends = st.sampled_from(["park", "finish"])


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(scripts, st.booleans(), ends)
@pytest.mark.slow
def test_any_run_cut_after_any_event_goes_the_same_way(script: list[Reply], structured: bool, end: Any) -> None:
    """S-014, S-015, S-074, H01, H04, H11, H13, H14, O2, O17."""
    asyncio.run(goes_the_same_way(agent_for(structured, end, tight=False), script))


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(scripts, st.booleans(), ends)
def test_any_run_cut_after_any_event_keeps_its_limits(script: list[Reply], structured: bool, end: Any) -> None:
    """H19, S-030, O3, O4, C5: and no cut makes it diverge."""
    asyncio.run(keeps_its_limits(agent_for(structured, end, tight=True), script))


@pytest.mark.soak
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(scripts, st.booleans(), ends)
def test_very_many_runs_cut_after_any_event_go_the_same_way(script: list[Reply], structured: bool, end: Any) -> None:
    """S-014, S-015, S-074, O2, O17."""
    asyncio.run(goes_the_same_way(agent_for(structured, end, tight=False), script))


@pytest.mark.soak
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(scripts, st.booleans(), ends)
def test_very_many_runs_cut_after_any_event_keep_their_limits(script: list[Reply], structured: bool, end: Any) -> None:
    """H19, S-030, O3, O4, C5."""
    asyncio.run(keeps_its_limits(agent_for(structured, end, tight=True), script))
