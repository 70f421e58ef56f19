"""Calls that go on after their time limit: the outcome is unknown, the same effect is held back, a late result is
recorded as late."""

import asyncio
import gc
import os
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.runs import (
    RUN,
    agent_of,
    before,
    count,
    cut,
    embedded,
    kinds,
    observed,
    only,
    opened,
    script,
    started,
    state_of,
)

from perdure import CallContext, Limits, LoopStoppedError, RunContext, Sleep, ToolFailed, Unknown, assemble, tool
from perdure.clock import SystemClock, SystemEntropy
from perdure.engine import Engine
from perdure.journal import events as ev
from perdure.journal.render import line
from perdure.ports import Lease, Store
from perdure.prompting import texts
from perdure.runtime import left_behind
from perdure.stores.url import open_store
from perdure.testing.replies import calls, text
from perdure.testing.sweeping import lasting, sweep

END = text("Done.")
LIMIT_S = 0.05
LONG_S = 30.0
"""A deadline for what happens in an instant on an idle machine."""
acts: list[str] = []
go_on = threading.Event()
"""Lets what is past its time limit come to its end."""


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    acts.clear()
    go_on.clear()
    yield
    go_on.set()
    waited_for(no_thread_is_left)  # what it did would be taken for the next test's


def no_thread_is_left() -> bool:
    return not any(thread.name == "perdure-tool-pay" for thread in threading.enumerate())


def waited_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def late(effect: Any, blocking: bool, comes_to: Callable[[], Any] = lambda: "receipt 7") -> Any:
    """A tool that acts long after its time limit, when it is let."""
    if blocking:

        @tool(name="pay", effect=effect, timeout=LIMIT_S)
        def pay_blocking(amount: int) -> Any:
            """Pays."""
            acts.append("began")
            go_on.wait(LONG_S)
            acts.append(f"paid {amount}")
            return comes_to()

        return pay_blocking

    @tool(name="pay", effect=effect, timeout=LIMIT_S)
    async def pay(amount: int) -> Any:
        """Pays."""
        acts.append("began")
        cancels = 0
        while not go_on.is_set():
            try:
                await asyncio.sleep(0.005)
            except asyncio.CancelledError:
                cancels += 1
                if cancels > 1:  # the end of the event loop
                    raise
        acts.append(f"paid {amount}")
        return comes_to()

    return pay


@tool(effect="read")
async def look() -> str:
    """Looks at the books."""
    return "nothing is paid"


@tool(effect="idempotent", repeatable=True)
async def release() -> str:
    """Lets what is late go on, and returns once it has ended. Looks at nothing, so it lifts no doubt."""
    go_on.set()
    until = time.monotonic() + LONG_S
    while len(acts) != 2 * acts.count("began"):
        assert time.monotonic() < until
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)  # a thread that has ended is yet to be heard of
    return "it went on"


@tool(effect="read")
async def hold() -> str:
    """Takes long."""
    acts.append("held")
    await asyncio.Event().wait()
    return ""


HOLD = calls(("hold", {}))
PAY = calls(("pay", {"amount": 5}))
both = pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "async"])
effects = pytest.mark.parametrize("effect", ["write", "idempotent"])


@both
@effects
async def test_while_a_call_goes_on_past_its_limit_the_same_one_is_not_started_not_even_after_a_read(
    effect: Any, blocking: bool
) -> None:
    """H26, O10, C2: the model asks again at once, looks, and asks once more."""
    model = script(PAY, PAY, calls(("look", {})), PAY, calls(("pay", {"amount": 6}), ("look", {})), END)
    run = await embedded(agent_of(late(effect, blocking), look), model)
    assert run.outcome.output == "Done."
    waited_for(lambda: acts.count("began") > 1)
    assert acts.count("began") == 2  # 5 once, and 6, which is another action
    closed = only(run.envelopes, ev.ToolCallFailed)[0]
    assert (closed.call, closed.reason) == ("1.0", "unknown")
    assert "may or may not have taken effect" in closed.observation
    refused = only(run.envelopes, ev.ToolCallRefused)
    assert [(one.call, one.reason) for one in refused] == [("2.0", "still_going"), ("4.0", "still_going")]
    assert refused[0].observation == texts.STILL_GOING
    assert count(run.envelopes, "attempt_started") == 0


@effects
async def test_a_call_is_held_back_in_whatever_words_it_is_asked_for_again(effect: Any) -> None:
    """H26, O10: what counts is what the function would be called with, while the first goes on, when it has ended, and
    when nothing is known of it."""

    @tool(effect=effect, timeout=LIMIT_S)
    def pay(amount: float, to: str = "bob") -> str:
        """Pays, or says that it cannot tell."""
        acts.append("began")
        if amount < 1:
            raise ConnectionError("gone")
        go_on.wait(LONG_S)
        acts.append(f"paid {amount}")
        return "receipt 7"

    first, again = calls(("pay", {"amount": 5})), calls(("pay", {"amount": 5.0, "to": "bob"}))
    small, small_again = calls(("pay", {"amount": 0})), calls(("pay", {"to": "bob", "amount": 0.0}))
    going = await embedded(agent_of(pay, look), script(first, calls(("look", {})), again, END))
    assert [(one.call, one.reason) for one in only(going.envelopes, ev.ToolCallRefused)] == [("3.0", "still_going")]
    ended = await embedded(agent_of(pay, release), script(first, calls(("release", {})), again, again, END))
    assert [(one.call, one.reason) for one in only(ended.envelopes, ev.ToolCallRefused)] == [("3.0", "ended_late")]
    assert only(ended.envelopes, ev.ToolCallRequested)[-1].call == "4.0"
    unknown = await embedded(agent_of(pay), script(small, small_again, END))
    refused = [(one.call, one.reason) for one in only(unknown.envelopes, ev.ToolCallRefused)]
    assert refused == [("2.0", "outcome_unknown")]


@both
@effects
async def test_a_late_result_is_recorded_as_late_and_told_once_when_the_same_call_is_asked_for_again(
    effect: Any, blocking: bool
) -> None:
    """H26, O1, O10: what the model read of the call stays as it was, and nothing is charged for it."""
    tools = (late(effect, blocking), look, release)
    model = script(PAY, calls(("release", {})), calls(("look", {})), PAY, PAY, END)
    run = await embedded(agent_of(*tools), model)
    assert run.outcome.output == "Done."
    assert only(run.envelopes, ev.LateResultObserved) == [ev.LateResultObserved("1.0", 1, "receipt 7")]
    assert only(run.envelopes, ev.ToolCallFailed)[0].reason == "unknown"
    told = only(run.envelopes, ev.ToolCallRefused)
    assert [(one.call, one.reason, one.about) for one in told] == [("4.0", "ended_late", "1.0")]
    assert "(1.0)" in told[0].observation
    assert "receipt 7" in told[0].observation
    waited_for(
        lambda: acts.count("paid 5") == 2
    )  # the second, in turn 5, is a new action, asked for by a model that knows
    assert [one.call for one in only(run.envelopes, ev.ToolCallRequested)] == ["1.0", "2.0", "3.0", "5.0"]
    assert run.outcome.usage.tool_calls == 4
    assert "1.0 attempt 1 -> receipt 7" in line(run.envelopes[before(run, "late_result_observed")])


@effects
async def test_a_run_cut_after_the_limit_and_resumed_repeats_nothing_and_tells_what_the_journal_knows(
    effect: Any,
) -> None:
    """H26, S-014, O2: in the new process nothing is still going."""
    agent = agent_of(late(effect, blocking=True), release)
    replies = [PAY, calls(("release", {})), PAY, END]
    whole = await embedded(agent, script(*replies))
    known, told = before(whole, "late_result_observed"), before(whole, "tool_call_refused")
    for kept in range(before(whole, "tool_call_failed") + 1, len(whole.envelopes) + 1):
        acts.clear()
        again = await embedded(agent, script(*replies), recorded=cut(whole, kept))
        assert (again.outcome.output, acts) == ("Done.", []), kept
        refused = only(again.envelopes, ev.ToolCallRefused)
        reason = "ended_late" if kept > known else "outcome_unknown"
        assert [(one.call, one.reason) for one in refused] == [("3.0", reason)], kept
        if kept > known:
            assert lasting(again.envelopes) == lasting(whole.envelopes), kept
    assert told > known


async def test_a_resumed_run_knows_that_the_model_was_told() -> None:
    """H26, S-014: the same call after that is a new action there, too."""
    agent = agent_of(late("write", blocking=True), release)
    replies = [PAY, calls(("release", {})), PAY, PAY, END]
    whole = await embedded(agent, script(*replies))
    acts.clear()
    again = await embedded(agent, script(*replies), recorded=cut(whole, before(whole, "model_call_completed", 3)))
    assert [one.call for one in only(again.envelopes, ev.ToolCallRefused)] == ["3.0"]
    waited_for(lambda: acts == ["began", "paid 5"])


def raises(error: Exception) -> Any:
    raise error


def exits() -> Any:
    raise SystemExit(3)


LATE: dict[str, tuple[Callable[[], Any], tuple[Any, str | None, str]]] = {
    "an error": (lambda: raises(ValueError("stopped")), (None, "handler", "ValueError: stopped")),
    "a failure": (lambda: ToolFailed("no money"), (None, "handler", "no money")),
    "a loss": (lambda: raises(ConnectionError("gone")), (None, "unknown", "ConnectionError: gone")),
    "a doubt": (lambda: Unknown("who knows"), (None, "unknown", "who knows")),
    "no value": (lambda: {1, 2}, (None, "output_form", "cannot be stored")),
    "a wish to wait": (lambda: Sleep(datetime(2100, 1, 1, tzinfo=UTC)), (None, "output_form", "asked to wait")),
    "an exit": (exits, (None, "handler", "SystemExit")),
}


@pytest.mark.parametrize("what", LATE)
async def test_a_late_end_without_a_value_is_recorded_and_settles_nothing(what: str) -> None:
    """H26, O10: an error may come of having been told to stop."""
    comes_to, (output, reason, message) = LATE[what]
    model = script(PAY, calls(("release", {})), PAY, calls(("look", {})), PAY, END)
    run = await embedded(agent_of(late("write", True, comes_to), look, release), model)
    found = only(run.envelopes, ev.LateResultObserved)[0]
    assert (found.output, found.reason) == (output, reason)
    assert message in found.message
    assert [(one.call, one.reason) for one in only(run.envelopes, ev.ToolCallRefused)] == [("3.0", "outcome_unknown")]
    assert only(run.envelopes, ev.ToolCallRequested)[-1].call == "5.0"


async def test_a_large_late_value_is_kept_in_part() -> None:
    """H26, S-063: the journal does not grow by what nobody asked for."""
    run = await embedded(
        agent_of(late("write", True, lambda: "a" + "x" * texts.INLINE_CAP + "z"), release),
        script(PAY, calls(("release", {})), PAY, END),
    )
    output = only(run.envelopes, ev.LateResultObserved)[0].output
    assert len(output) < texts.SHOWN_HEAD + texts.SHOWN_TAIL + 100
    assert (output[0], output[-1]) == ("a", "z")
    assert len(observed(run.envelopes)["3.0"]) < 2 * texts.FAILURE_CAP


async def test_a_late_read_is_recorded_and_holds_nothing_back() -> None:
    """H26."""
    run = await embedded(agent_of(late("read", True), release), script(PAY, calls(("release", {})), PAY, END))
    assert only(run.envelopes, ev.ToolCallFailed)[0].reason == "timeout"
    assert only(run.envelopes, ev.LateResultObserved)[0].output == "receipt 7"
    assert only(run.envelopes, ev.ToolCallRequested)[-1].call == "3.0"
    assert only(run.envelopes, ev.ToolCallRefused) == []


class Held:
    """A world in which a late call is held anew in each drive."""

    def snapshot(self) -> Any:
        return None

    def restore(self, snapshot: Any) -> None:
        go_on.clear()

    def effects(self) -> list[Any]:
        return []


@pytest.mark.slow
async def test_a_run_with_a_late_result_is_cut_everywhere_and_ends_the_same(tmp_path: Path) -> None:
    """H26, S-014: a late result belongs to the drive it fell into, so one more or less is no difference."""
    agent = agent_of(late("read", True), release)
    replies = [PAY, calls(("release", {})), END]
    report = await sweep(agent, lambda: script(*replies), "the task", Held(), directory=tmp_path)
    assert report.problems == []
    assert count(report.recording.envelopes, "late_result_observed") == 1
    assert len(report.cuts) > 10


async def test_an_earlier_attempt_that_ends_late_does_not_take_the_place_of_the_later_ones_result() -> None:
    """H26, S-067: with one key, so that the second is no second effect; and it is no attempt more."""
    first: list[int] = []

    @tool(effect="idempotent", timeout=1.5, retries=1)
    def pay(amount: int, call: CallContext) -> str:
        """The first attempt hangs, the second is quick."""
        acts.append("began")
        first.append(call.attempt)
        if call.attempt == 1:
            go_on.wait(LONG_S)
            acts.append("paid late")
            return "first"
        acts.append("paid")
        return "second"

    run = await embedded(agent_of(pay, release), script(PAY, calls(("release", {})), END))
    assert first == [1, 2]
    assert [one.output for one in only(run.envelopes, ev.ToolCallCompleted)] == ["second", "it went on"]
    assert only(run.envelopes, ev.LateResultObserved) == [ev.LateResultObserved("1.0", 1, "first")]
    assert state_of(run.envelopes).spent.tool_calls == 3
    assert state_of(run.envelopes).settled_late() == []


# Programs


RECEIPT = f"touch {{0}}/began; while [ ! -e {{0}}/go ] && [ $((n += 1)) -lt {int(LONG_S * 50)} ]; do sleep 0.02; done; \
touch {{0}}/paid; echo receipt 7"
"""A program that pays once it is let."""


def ended(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    # Of an orphan nobody may have taken notice yet.
    return ") Z " in Path(f"/proc/{process}/stat").read_text()


def noted(path: Path) -> int:
    """The process number a program wrote down."""
    waited_for(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())


@effects
async def test_a_program_run_for_a_call_is_ended_at_its_time_limit_with_its_group(effect: Any, tmp_path: Path) -> None:
    """H26, H27, O10: so nothing is still going, and the doubt stands until a read."""
    shell = f"echo $$ > {tmp_path}/parent; (echo $BASHPID > {tmp_path}/child; {RECEIPT.format(tmp_path)}) & wait"

    @tool(name="pay", effect=effect, timeout=1)
    async def pay(amount: int, call: CallContext) -> str:
        """Pays by a program."""
        acts.append("began")
        return (await call.run(["bash", "-c", shell])).stdout.decode()

    run = await embedded(agent_of(pay, look), script(PAY, PAY, calls(("look", {})), END))
    assert run.outcome.output == "Done."
    assert only(run.envelopes, ev.ToolCallFailed)[0].reason == "unknown"
    refused = only(run.envelopes, ev.ToolCallRefused)
    assert [(one.call, one.reason) for one in refused] == [("2.0", "outcome_unknown")]
    assert count(run.envelopes, "late_result_observed") == 0
    assert acts == ["began"]
    waited_for(lambda: ended(noted(tmp_path / "parent")) and ended(noted(tmp_path / "child")))
    assert not (tmp_path / "paid").exists()


async def test_a_process_that_left_the_group_of_its_call_is_not_waited_for_past_the_time_limit(tmp_path: Path) -> None:
    """H26, H27: it holds the output open, and the call ends all the same."""
    shell = f"setsid bash -c 'echo $$ > {tmp_path}/stray; {RECEIPT.format(tmp_path)}' & wait"

    @tool(name="pay", timeout=1)
    async def pay(amount: int, call: CallContext) -> str:
        """Pays by a program that starts another."""
        return (await call.run(["bash", "-c", shell])).stdout.decode()

    run = await embedded(agent_of(pay), script(PAY, PAY, END))
    stray = noted(tmp_path / "stray")
    alive = not ended(stray)
    (tmp_path / "go").touch()
    assert alive
    refused = only(run.envelopes, ev.ToolCallRefused)
    assert [(one.call, one.reason) for one in refused] == [("2.0", "outcome_unknown")]
    waited_for(lambda: ended(stray))


@effects
async def test_a_program_that_a_blocking_tool_waits_for_goes_on_past_the_limit_and_is_heard_of_late(
    effect: Any, tmp_path: Path
) -> None:
    """H26, O10: a program the tool itself started is the tool's to end."""

    @tool(name="pay", effect=effect, timeout=LIMIT_S)
    def pay(amount: int) -> str:
        """Pays by a program."""
        acts.append("began")
        program = ["bash", "-c", RECEIPT.format(tmp_path)]
        done = subprocess.run(program, capture_output=True, text=True, check=True).stdout
        acts.append("paid 5")
        return done

    @tool(effect="idempotent", repeatable=True)
    async def let() -> str:
        """Lets the program pay."""
        (tmp_path / "go").touch()
        until = time.monotonic() + LONG_S
        while "paid 5" not in acts or not no_thread_is_left():
            assert time.monotonic() < until
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)  # a thread that has ended is yet to be heard of
        return "it went on"

    run = await embedded(agent_of(pay, look, let), script(PAY, PAY, calls(("let", {})), PAY, END))
    assert only(run.envelopes, ev.LateResultObserved) == [ev.LateResultObserved("1.0", 1, "receipt 7\n")]
    refused = only(run.envelopes, ev.ToolCallRefused)
    assert [(one.call, one.reason) for one in refused] == [("2.0", "still_going"), ("4.0", "ended_late")]
    assert acts == ["began", "paid 5"]


# Several engines in one process


PARKS = {"limits": Limits(max_model_turns=1)}
"""Parks the run after its first turn."""


async def parked_past_its_limit(directory: Path, agent: Any, replies: list[Any]) -> None:
    """One engine's drive, which leaves its write behind."""
    async with opened(directory) as engine:
        assert (await (await started(engine, agent, script(*replies))).wait()).status == "parked"
        await engine.limit(RUN, max_model_turns=9)


async def resumed(directory: Path, agent: Any, replies: list[Any]) -> list[Any]:
    """The refusals of a run that another engine brings to its end."""
    async with opened(directory) as engine:
        assert (await (await engine.resume(RUN, agent, model=script(*replies))).wait()).output == "Done."
        return only(await engine.journal(RUN), ev.ToolCallRefused)


def entries() -> int:
    """How many runs are known to have left something behind, once what nobody uses is gone."""
    gc.collect()
    return len(left_behind._by_run)


@both
@effects
async def test_what_one_engine_left_behind_holds_another_engine_of_the_process_back(
    effect: Any, blocking: bool, tmp_path: Path
) -> None:
    """H26, O10: the second reaches the store by another path."""
    agent = agent_of(late(effect, blocking), look, **PARKS)
    replies = [PAY, calls(("look", {})), PAY, END]
    store, link = tmp_path / "store", tmp_path / "link"
    store.mkdir()
    link.symlink_to(store)
    await parked_past_its_limit(store, agent, replies)
    assert [(one.call, one.reason) for one in await resumed(link, agent, replies)] == [("3.0", "still_going")]
    assert acts == ["began"]


@both
async def test_what_was_left_behind_holds_no_run_of_another_store_back(blocking: bool, tmp_path: Path) -> None:
    """H26: not even one of the same name."""
    agent = agent_of(late("write", blocking), **PARKS)
    for directory in (tmp_path / "one", tmp_path / "two"):
        directory.mkdir()
        await parked_past_its_limit(directory, agent, [PAY, END])
    assert acts == ["began", "began"]


def test_a_thread_outlives_its_event_loop_and_holds_the_next_one_back_until_it_ends(tmp_path: Path) -> None:
    """H26: nobody hears how it ended, so the model is told of no result."""
    agent = agent_of(late("write", True), look, **PARKS)
    replies = [PAY, calls(("look", {})), PAY, calls(("look", {})), PAY, END]

    async def second_drive() -> None:
        async with opened(tmp_path) as engine:
            await engine.limit(RUN, max_model_turns=3)
            assert (await (await engine.resume(RUN, agent, model=script(*replies))).wait()).status == "parked"
            await engine.limit(RUN, max_model_turns=9)
            refused = only(await engine.journal(RUN), ev.ToolCallRefused)
            assert [(one.call, one.reason) for one in refused] == [("3.0", "still_going")]

    asyncio.run(parked_past_its_limit(tmp_path, agent, replies))
    asyncio.run(second_drive())
    assert acts == ["began"]
    go_on.set()
    waited_for(no_thread_is_left)
    assert [one.call for one in asyncio.run(resumed(tmp_path, agent, replies))] == ["3.0"]
    waited_for(lambda: acts.count("paid 5") == 2)


async def test_a_resume_starts_a_keyed_call_again_under_its_key_while_its_first_attempt_still_runs_in_the_process(
    tmp_path: Path,
) -> None:
    """H26, O2: the call was left open by its drive, and has passed no time limit."""
    keys: list[str | None] = []
    left: list[asyncio.Task[Any]] = []

    @tool(name="pay", effect="idempotent")
    def pay(amount: int, call: CallContext) -> str:
        """The first attempt hangs, the second is quick."""
        keys.append(call.idempotency_key)
        if call.attempt == 1:
            go_on.wait(LONG_S)
            acts.append("the first ended")
        return f"receipt {call.attempt}"

    async def loop(ctx: RunContext, task: str) -> Any:
        asking = asyncio.ensure_future(ctx.use((await ctx.ask(assemble(ctx.agent, ctx.transcript.view()))).calls))
        if left:
            return (await asking)[0].output
        left.append(asking)
        await asyncio.to_thread(waited_for, lambda: len(keys) == 1)
        return "early"

    agent = agent_of(pay, loop=loop)
    async with opened(tmp_path) as engine:
        with pytest.raises(LoopStoppedError):
            await (await started(engine, agent, script(PAY))).wait()
    async with opened(tmp_path) as engine:
        assert (await (await engine.resume(RUN, agent, model=script(PAY))).wait()).output == "receipt 2"
        journal = await engine.journal(RUN)
        assert acts == []
        go_on.set()
        await asyncio.gather(*left, return_exceptions=True)
        assert await engine.journal(RUN) == journal
    assert (len(keys), len(set(keys))) == (2, 1)


@both
async def test_nothing_is_kept_of_a_run_that_left_nothing_behind_or_whose_rest_has_ended(
    blocking: bool, tmp_path: Path
) -> None:
    """H26: a process that drives many runs does not grow by them."""
    pay = late("write", blocking)
    await nothing_is_left()
    before = entries()
    async with opened(tmp_path) as engine:
        for number in range(3):
            run = await engine.start(agent_of(look), "the task", run_id=f"clean-{number}", model=script(END))
            await run.wait()
        del run
        assert entries() == before
        await (await started(engine, agent_of(pay), script(PAY, END))).wait()
        assert entries() == before + 1
        go_on.set()
        await asyncio.to_thread(waited_for, lambda: "paid 5" in acts)
        await nothing_is_left()
        assert entries() == before


# Ends and cancels


@both
async def test_what_ends_after_the_run_changes_nothing(blocking: bool, tmp_path: Path) -> None:
    """H26, R-012: nobody waits for it."""
    async with opened(tmp_path) as engine:
        outcome = await (await started(engine, agent_of(late("write", blocking)), script(PAY, END))).wait()
        assert outcome.output == "Done."
        journal = await engine.journal(RUN)
        go_on.set()
        await asyncio.to_thread(waited_for, lambda: "paid 5" in acts)
        await asyncio.sleep(0.1)
        assert await engine.journal(RUN) == journal
    assert kinds(journal)[-1] == "run_completed"


@both
async def test_what_ends_after_the_run_parked_changes_nothing_and_what_still_goes_on_holds_the_next_drive_back(
    blocking: bool, tmp_path: Path
) -> None:
    """H26, O10: the next drive is of the same process, and looks before it asks for the same again."""
    pay, spare = late("write", blocking), calls(("look", {}))
    agent = agent_of(pay, look, release, limits=Limits(max_model_turns=1))
    replies = [PAY, spare, PAY, calls(("release", {})), PAY, END]
    async with opened(tmp_path) as engine:
        assert (await (await started(engine, agent, script(*replies))).wait()).status == "parked"
        await engine.limit(RUN, max_model_turns=3)
        assert (await (await engine.resume(RUN, agent, model=script(*replies))).wait()).status == "parked"
        journal = await engine.journal(RUN)
        assert [(one.call, one.reason) for one in only(journal, ev.ToolCallRefused)] == [("3.0", "still_going")]
        go_on.set()
        await asyncio.to_thread(waited_for, lambda: "paid 5" in acts)
        await asyncio.sleep(0.1)
        assert await engine.journal(RUN) == journal
        await engine.limit(RUN, max_model_turns=9)
        assert (await (await engine.resume(RUN, agent, model=script(*replies))).wait()).output == "Done."
        # The read lifted the doubt, and nothing is still going.
        assert only(await engine.journal(RUN), ev.ToolCallRequested)[-1].call == "5.0"


class HeldRelease:
    """A store that takes its time over giving a lease back."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.reached, self.go = asyncio.Event(), asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def release(self, lease: Lease) -> None:
        self.reached.set()
        await self.go.wait()
        await self._store.release(lease)


@both
async def test_what_ends_while_a_parked_drive_gives_its_lease_back_is_dropped(blocking: bool, tmp_path: Path) -> None:
    """H26: nobody would wait for it to be durable."""
    store = await open_store(f"sqlite:{tmp_path / 'perdure.db'}", clock=SystemClock(), entropy=SystemEntropy())
    held: Any = HeldRelease(store)
    async with Engine(held, SystemClock(), SystemEntropy()) as engine:
        run = await started(engine, agent_of(late("write", blocking), **PARKS), script(PAY, END))
        await held.reached.wait()
        journal = await engine.journal(RUN)
        go_on.set()
        await asyncio.to_thread(waited_for, lambda: "paid 5" in acts)
        await nothing_is_left()
        await asyncio.sleep(0.1)  # what were recorded would be stored by now
        held.go.set()
        assert (await run.wait()).status == "parked"
        assert await engine.journal(RUN) == journal
    assert kinds(journal)[-1] == "budget_exceeded"


@both
@pytest.mark.parametrize("passed", [False, True], ids=["in the call", "after its limit"])
async def test_a_cancel_is_for_good_and_what_ends_later_changes_nothing(
    passed: bool, blocking: bool, tmp_path: Path
) -> None:
    """H26, R-012, R-016, O13: every call has one result."""
    pay = late("write", blocking)
    pay.timeout_s = LIMIT_S if passed else LONG_S
    async with opened(tmp_path) as engine:
        run = await engine.start(agent_of(pay, hold), "the task", run_id=RUN, model=script(PAY, HOLD, END))
        await asyncio.to_thread(waited_for, lambda: ("held" if passed else "began") in acts)
        await run.cancel("enough")
        assert (await run.wait()).status == "cancelled"
        journal = await engine.journal(RUN)
        go_on.set()
        if blocking:
            await asyncio.to_thread(waited_for, lambda: "paid 5" in acts)
        await asyncio.sleep(0.1)
        again = await (await engine.resume(RUN, agent_of(pay, hold), model=script())).wait()
        assert (again.status, again.terminal_reason) == ("cancelled", "user_cancelled")
        assert await engine.journal(RUN) == journal
    closed = [one.call for one in only(journal, ev.ToolCallFailed)]
    assert closed == (["1.0", "2.0"] if passed else ["1.0"])
    assert state_of(journal).open == {}
    assert only(journal, ev.ToolCallFailed)[0].reason == "unknown"
    assert count(journal, "late_result_observed") == 0


def complaints() -> list[str]:
    """What asyncio finds nobody to tell, from here on."""
    heard: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context["message"]))
    return heard


async def nothing_is_left() -> None:
    """Returns once the tool's threads have ended and what came of them is forgotten."""
    waited_for(no_thread_is_left)
    for _ in range(5):
        await asyncio.sleep(0)
        gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["timed out", "cancelled", "cancelled after its limit"])
async def test_an_error_that_comes_after_the_runs_end_is_printed_by_nobody(how: str, tmp_path: Path) -> None:
    """H26: of a blocking tool, whose thread cannot be stopped. What can be recorded of it is recorded already."""
    heard = complaints()
    assert await ended_before_the_error(how, tmp_path) == ("completed" if how == "timed out" else "cancelled")
    await nothing_is_left()
    assert heard == []


async def ended_before_the_error(how: str, directory: Path) -> str:
    limited = late("write", blocking=True, comes_to=lambda: raises(ValueError("too late")))
    agent = agent_of(tool(name="pay")(endless) if how == "cancelled" else limited, hold)
    async with opened(directory) as engine:
        run = await started(engine, agent, script(PAY, END) if how == "timed out" else script(PAY, HOLD, END))
        if how != "timed out":
            await under_way("began" if how == "cancelled" else "held")
            await run.cancel("enough")
        status: str = (await run.wait()).status
        before = await engine.journal(RUN)
        go_on.set()
        await nothing_is_left()
        assert await engine.journal(RUN) == before
    return status


async def under_way(act: str) -> None:
    until = time.monotonic() + LONG_S
    while act not in acts:
        assert time.monotonic() < until
        await asyncio.sleep(0.005)


def endless(amount: int) -> str:
    """Pays, without a time limit of its own."""
    acts.append("began")
    go_on.wait(LONG_S)
    raise ValueError("too late")


def test_an_async_tool_that_raises_when_the_event_loop_ends_it_is_printed_by_nobody(tmp_path: Path) -> None:
    """H26: one that swallowed its first cancel outlives its run, and the loop cancels it once more."""
    heard: list[str] = []

    @tool(name="pay", effect="write", timeout=LIMIT_S)
    async def pay(amount: int) -> str:
        """Pays."""
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                acts.append("cancelled")
                if acts.count("cancelled") > 1:
                    raise ValueError("too late") from None

    async def one_run() -> str:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context["message"]))
        async with opened(tmp_path) as engine:
            run = await started(engine, agent_of(pay), script(PAY, END))
            status: str = (await run.wait()).status
        return status

    assert asyncio.run(one_run()) == "completed"
    assert acts == ["cancelled", "cancelled"]
    assert heard == []
