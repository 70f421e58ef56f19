"""One call: its time limit, its retries, its context, and what overlaps."""

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.runs import RUN, agent_of, asked, embedded, kinds, observed, only, opened, script, started

from perdure import CallContext, Limits, ToolFailed, tool
from perdure.journal import events as ev
from perdure.runtime.executing import GRACE_S
from perdure.testing.clocks import ManualClock
from perdure.testing.replies import calls, fault, text

END = text("Done.")
ran: list[Any] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    ran.clear()


# Retries


def flaky(effect: Any, retries: int, failures: int, error: type[Exception] = RuntimeError) -> Any:
    @tool(effect=effect, retries=retries)
    async def flake(call: CallContext) -> str:
        """Fails a few times."""
        ran.append((call.attempt, call.idempotency_key))
        if len(ran) <= failures:
            raise error("no luck")
        return "luck"

    return flake


@pytest.mark.parametrize("effect", ["read", "idempotent"])
async def test_a_failed_read_or_idempotent_call_is_tried_again_up_to_three_times(effect: Any) -> None:
    """S-067, S-052: inside one call, each attempt charged, and with the same key."""
    run = await embedded(agent_of(flaky(effect, 2, 2)), script(calls(("flake", {})), END))
    assert [attempt for attempt, _ in ran] == [1, 2, 3]
    assert len({key for _, key in ran}) == 1
    assert observed(run.envelopes)["1.0"] == "'luck'"
    attempts = only(run.envelopes, ev.AttemptStarted)
    assert [(event.n, event.cause, event.error) for event in attempts] == [
        (2, "retry", "RuntimeError: no luck"),
        (3, "retry", "RuntimeError: no luck"),
    ]
    assert run.outcome.usage.tool_calls == 3


async def test_after_the_last_attempt_the_model_reads_one_failure() -> None:
    """S-067."""
    run = await embedded(agent_of(flaky("read", 2, 9)), script(calls(("flake", {})), END))
    assert len(ran) == 3
    assert kinds(run.envelopes).count("tool_call_failed") == 1


async def test_a_write_is_never_tried_again() -> None:
    """S-067: it cannot even be asked for."""
    with pytest.raises(Exception, match="retries"):
        flaky("write", 2, 1)


async def test_a_failure_told_by_the_tool_itself_is_final() -> None:
    """S-067: it is meant for the model."""
    run = await embedded(agent_of(flaky("read", 2, 9, ToolFailed)), script(calls(("flake", {})), END))
    assert len(ran) == 1
    assert observed(run.envelopes)["1.0"].endswith("no luck")


async def test_a_value_that_cannot_be_stored_is_not_tried_again() -> None:
    """S-067, S-069."""

    @tool(effect="read", retries=2)
    async def odd() -> Any:
        """Gives a set."""
        ran.append(1)
        return {1}

    await embedded(agent_of(odd), script(calls(("odd", {})), END))
    assert ran == [1]


async def test_retries_stop_at_the_limit() -> None:
    """S-067, C5."""
    agent = agent_of(flaky("read", 2, 9), limits=Limits(max_tool_calls=2))
    run = await embedded(agent, script(calls(("flake", {})), END))
    assert len(ran) == 2
    assert run.outcome.usage.tool_calls == 2


async def test_a_retry_is_durable_before_it_runs(tmp_path: Path) -> None:
    """S-063, O1."""
    stored: list[list[str]] = []

    @tool(effect="read", retries=1)
    async def flake() -> str:
        """Fails once."""
        stored.append(kinds(await engine.journal(RUN)))
        if len(stored) == 1:
            raise RuntimeError("no luck")
        return "luck"

    async with opened(tmp_path, ManualClock()) as engine:
        await (await started(engine, agent_of(flake), script(calls(("flake", {})), END))).wait()
    assert stored[0][-1] == "tool_call_requested"
    assert stored[1][-1] == "attempt_started"


# Time limits


def slow(effect: Any, swallow: bool = False, blocking: bool = False) -> Any:
    if blocking:

        @tool(name="slow", effect=effect, timeout=0.05)
        def waits(call: CallContext) -> str:
            """Blocks."""
            while not call.cancelled:
                time.sleep(0.005)
            ran.append("saw that it was given up")
            return "late"

        return waits

    @tool(name="slow", effect=effect, timeout=0.05)
    async def sleeps() -> str:
        """Takes too long."""
        ran.append("began")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ran.append("cancelled")
            if not swallow:
                raise
            await asyncio.sleep(60)
        return "late"

    return sleeps


async def test_a_write_that_times_out_has_an_unknown_outcome() -> None:
    """O10, C2, S-067: it is never taken for a failure."""
    run = await embedded(agent_of(slow("write")), script(calls(("slow", {})), END))
    failed = only(run.envelopes, ev.ToolCallFailed)[0]
    assert failed.reason == "unknown"
    assert "time limit of 0.05 s" in failed.message
    assert "may or may not have taken effect" in failed.observation
    assert ran == ["began", "cancelled"]


async def test_a_read_that_times_out_has_failed() -> None:
    """S-069."""
    run = await embedded(agent_of(slow("read")), script(calls(("slow", {})), END))
    assert only(run.envelopes, ev.ToolCallFailed)[0].reason == "timeout"
    assert run.outcome.output == "Done."


async def test_a_write_that_loses_its_connection_has_an_unknown_outcome_and_one_that_raises_has_failed() -> None:
    """O10, C2."""

    @tool
    async def lose() -> str:
        """Loses the connection."""
        raise ConnectionResetError("peer went away")

    @tool
    async def fail() -> str:
        """Raises an error of its own."""
        raise ValueError("bad amount")

    run = await embedded(agent_of(lose, fail), script(calls(("lose", {}), ("fail", {})), END))
    assert [event.reason for event in only(run.envelopes, ev.ToolCallFailed)] == ["unknown", "handler"]


async def test_a_tool_that_swallows_its_cancellation_is_left_behind_after_a_grace_period() -> None:
    """S-069."""
    began = time.monotonic()
    run = await embedded(agent_of(slow("read", swallow=True)), script(calls(("slow", {})), END))
    assert run.outcome.output == "Done."
    assert GRACE_S <= time.monotonic() - began < GRACE_S + 2


async def test_a_blocking_tool_is_told_that_it_was_given_up() -> None:
    """S-069."""
    run = await embedded(agent_of(slow("read", blocking=True)), script(calls(("slow", {})), END))
    assert only(run.envelopes, ev.ToolCallFailed)[0].reason == "timeout"
    for _ in range(200):
        if ran:
            break
        time.sleep(0.01)
    assert ran == ["saw that it was given up"]


async def test_a_tool_that_cancels_itself_or_exits_has_failed_and_the_run_goes_on() -> None:
    """S-069, R-012."""

    @tool
    async def cancels() -> str:
        """Cancels itself."""
        raise asyncio.CancelledError

    @tool
    def exits() -> str:
        """Exits."""
        raise SystemExit(3)

    run = await embedded(agent_of(cancels, exits), script(calls(("cancels", {}), ("exits", {})), END))
    assert run.outcome.output == "Done."
    assert len(only(run.envelopes, ev.ToolCallFailed)) == 2


def test_a_stuck_blocking_tool_does_not_hold_the_process(tmp_path: Path) -> None:
    """S-069: its thread is ours and a daemon."""
    program = """
import asyncio, sys, time
from perdure import Agent, Engine, tool
from perdure.testing import ScriptedModel, calls, text

@tool(effect="read", timeout=0.1)
def stuck() -> str:
    "Never returns."
    time.sleep(3600)
    return ""

async def main() -> None:
    async with Engine.open("sqlite:" + sys.argv[1]) as engine:
        model = ScriptedModel([calls(("stuck", {})), text("Done.")])
        run = await engine.start(Agent(name="a", tools=[stuck]), "x", model=model)
        print((await run.wait()).output)

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "p.db")], capture_output=True, text=True, timeout=50, check=True
    )
    assert done.stdout == "Done.\n"


# Context and overlap


async def test_a_blocking_tool_runs_in_a_thread_and_an_async_one_in_the_loop() -> None:
    """R-010."""
    threads: list[str] = []

    @tool(effect="read")
    def blocks() -> str:
        """In a thread."""
        threads.append(threading.current_thread().name)
        return "x"

    @tool(effect="read")
    async def awaits() -> str:
        """In the loop."""
        threads.append(threading.current_thread().name)
        return "x"

    await embedded(agent_of(blocks, awaits), script(calls(("blocks", {}), ("awaits", {})), END))
    assert threads == ["perdure-tool-blocks", "MainThread"]


async def test_a_tool_gets_the_small_context_of_its_call_and_the_model_never_sees_it() -> None:
    """R-010, S-051."""
    seen: list[CallContext] = []

    @tool(effect="idempotent", timeout=5)
    async def act(what: str, call: CallContext) -> str:
        """Acts."""
        seen.append(call)
        return what

    model = script(calls(("act", {"what": "x"})), END)
    await embedded(agent_of(act), model)
    call = seen[0]
    assert (call.run_id, call.call_id, call.attempt, call.epoch, call.cancelled) == (RUN, "1.0", 1, 1, False)
    assert call.idempotency_key
    assert call.deadline is not None
    assert "call" not in str(model.requests[0].tools[0].input_schema)


async def test_only_neighbouring_parallel_reads_overlap_and_results_go_back_in_call_order() -> None:
    """C12, S-029: writes are barriers."""
    at_once: list[set[str]] = []
    running: set[str] = set()

    async def work(name: str) -> str:
        running.add(name)
        at_once.append(set(running))
        await asyncio.sleep(0.02 if name == "a" else 0.001)
        running.discard(name)
        return name

    @tool(effect="read", parallel=True)
    async def many(name: str) -> str:
        """Overlaps."""
        return await work(name)

    @tool(effect="read")
    async def one(name: str) -> str:
        """Does not."""
        return await work(name)

    @tool
    async def act(name: str) -> str:
        """Acts."""
        return await work(name)

    batch = calls(
        ("many", {"name": "a"}), ("many", {"name": "b"}), ("act", {"name": "c"}), ("many", {"name": "d"}),
        ("one", {"name": "e"}), ("one", {"name": "f"}),
    )  # fmt: skip
    model = script(batch, END)
    run = await embedded(agent_of(many, one, act), model)
    assert at_once == [{"a"}, {"a", "b"}, {"c"}, {"d"}, {"e"}, {"f"}]
    assert [event.call for event in only(run.envelopes, ev.ToolCallCompleted)][:2] == ["1.1", "1.0"]
    results = [one.call for one in list(model.requests[1].transcript)[-1].observations]  # type: ignore[union-attr]
    assert results == [f"1.{n}" for n in range(6)]


async def test_an_intent_is_recorded_directly_before_its_own_dispatch(tmp_path: Path) -> None:
    """S-063, O1, C12: and durable then; a kill during the first call leaves no doubt about the second."""
    stored: dict[str, list[str]] = {}

    @tool
    async def act(what: str) -> str:
        """Acts."""
        stored[what] = kinds(await engine.journal(RUN))
        return what

    async with opened(tmp_path) as engine:
        replies = [calls(("act", {"what": "a"}), ("act", {"what": "b"})), END]
        await (await started(engine, agent_of(act), script(*replies))).wait()
    assert stored["a"][-2:] == ["batch_accepted", "tool_call_requested"]
    assert stored["b"][-2:] == ["tool_call_completed", "tool_call_requested"]


# Model calls


@pytest.mark.parametrize("kind", ["no_terminal", "half_call", "connection", "overloaded"])
async def test_a_broken_stream_is_another_attempt_and_nothing_of_it_runs(kind: str) -> None:
    """R-153, R-154, S-064, C5: nothing is the answer."""

    @tool
    async def act(text: str = "") -> str:
        """Acts."""
        ran.append("acted")
        return "x"

    reply = calls(("act", {"text": "x" * 40})) if kind in ("half_call", "no_terminal") else None
    model = script(fault(kind, reply, then=END))
    run = await embedded(agent_of(act), model)
    assert run.outcome.output == "Done."
    assert ran == []
    assert len(model.requests) == 2
    attempts = only(run.envelopes, ev.AttemptStarted)
    assert [(event.call, event.n, event.cause) for event in attempts] == [("1", 2, "retry")]


async def test_a_model_call_that_fails_three_times_fails_for_good() -> None:
    """S-013, R-012, O13."""
    model = script(fault("overloaded"))
    run = await embedded(agent_of(), model)
    assert len(model.requests) == 3
    assert (run.outcome.status, run.outcome.terminal_reason) == ("failed", "model_error")


async def test_a_refusal_that_will_not_pass_is_not_tried_again() -> None:
    """S-013."""
    model = script(fault("auth"))
    await embedded(agent_of(), model)
    assert len(model.requests) == 1


async def test_the_words_between_turns_are_stored_with_the_request_that_carries_them() -> None:
    """S-021, S-014."""
    from perdure.testing.replies import Reply

    model = script(Reply(), END)
    run = await embedded(agent_of(), model)
    requested = only(run.envelopes, ev.ModelCallRequested)
    assert requested[0].notice is None
    assert requested[1].notice is not None
    assert asked(model)[1][-1] == f"user: {requested[1].notice.text}"
