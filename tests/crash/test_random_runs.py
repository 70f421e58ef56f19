"""Runs nobody thought of, cut after every event: over a list, where a cut costs next to nothing."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perdure import Agent, EmbeddedRun, Limits, run_embedded
from perdure.contracts.contract import canonical
from perdure.contracts.messages import StopReason
from perdure.testing.clocks import ManualClock, SeededEntropy
from perdure.testing.replies import Reply, ScriptedCall, text
from perdure.testing.scripted import ScriptedModel
from perdure.testing.sweeping import lasting
from tests.crash.errands import Report, Town, tools_over
from tests.runtime.runs import cut

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
limits = st.builds(
    Limits,
    max_model_turns=st.sampled_from([50, 4]),
    max_tool_calls=st.sampled_from([200, 5]),
    max_model_repairs=st.sampled_from([9, 2]),
    max_repeated_actions=st.sampled_from([3, 2, 4]),
)
policies = st.fixed_dictionaries(
    {"on_exhausted": st.sampled_from(["park", "finish"]), "batch": st.sampled_from(["lenient", "strict"])}
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


async def cut_everywhere(script: list[Reply], structured: bool, given: Limits, policy: dict[str, str]) -> None:
    agent = Agent(
        name="random", tools=tools_over(Town()), limits=given, output=Report if structured else None, **policy
    )
    whole, asked = await drive(agent, script, None)
    for kept in range(1, len(whole.envelopes) + 1):
        again, asked_again = await drive(agent, script, cut(whole, kept))
        if again.outcome.status == "parked" or whole.outcome.status == "parked":
            # A call cut short is charged twice, so a limit may be met earlier: then less was done, and nothing else.
            ours = lasting(again.envelopes)[: -1 if again.envelopes[-1].kind == "budget_exceeded" else None]
            theirs = lasting(whole.envelopes)
            assert ours == theirs[: len(ours)]
            continue
        if again.outcome.terminal_reason == whole.outcome.terminal_reason:
            assert [kind for kind, _ in lasting(again.envelopes)] == [kind for kind, _ in lasting(whole.envelopes)]
            assert lasting(again.envelopes)[:-1] == lasting(whole.envelopes)[:-1]
        else:
            assert again.outcome.outcome == "exhausted" or again.outcome.terminal_reason == "invalid_decision"
        for turns, form in asked_again.items():
            assert form == asked[turns]


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.lists(replies, min_size=1, max_size=6), st.booleans(), limits, policies)
def test_any_run_cut_after_any_event_goes_the_same_way(
    script: list[Reply], structured: bool, given: Limits, policy: dict[str, str]
) -> None:
    """S-014, S-015, S-074, H01, H04, H11, H13, H14, O2, O17."""
    asyncio.run(cut_everywhere(script, structured, given, policy))


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(replies, min_size=1, max_size=8), st.booleans(), limits, policies)
def test_very_many_runs_cut_after_any_event_go_the_same_way(
    script: list[Reply], structured: bool, given: Limits, policy: dict[str, str]
) -> None:
    """S-014, S-015, S-074, O2, O17."""
    asyncio.run(cut_everywhere(script, structured, given, policy))
