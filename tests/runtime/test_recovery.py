"""What becomes of a call that was in flight when its driver died."""

import asyncio
import json
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.runs import (
    RUN,
    agent_of,
    asked,
    before,
    count,
    cut,
    decoded,
    embedded,
    extended,
    kinds,
    observed,
    only,
    script,
    state_of,
)

from perdure import CallContext, RunContext, ToolCall, assemble, tool
from perdure.contracts.contract import canonical
from perdure.embedded import EmbeddedRun
from perdure.engine import Engine
from perdure.errors import InvalidAnswerError, RefusedError
from perdure.journal import events as ev
from perdure.journal.cursor import Cursor
from perdure.journal.fold import fold
from perdure.ports import ModelClient
from perdure.prompting.request import ModelRequest
from perdure.runtime.drive import Bindings, Drive
from perdure.runtime.ending import run_loop
from perdure.runtime.journaling import ListJournal, RunJournal, index_row
from perdure.stores.url import open_store
from perdure.testing.clocks import ManualClock, SeededEntropy
from perdure.testing.replies import ScriptedCall, calls, text
from perdure.testing.scripted import ScriptedModel

ran: list[Any] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    ran.clear()


@tool(effect="read")
async def look(place: str) -> str:
    """Looks."""
    ran.append(place)
    return f"seen {place}"


@tool
async def act(what: str) -> str:
    """Acts."""
    ran.append(what)
    return f"did {what}"


@tool(effect="idempotent")
async def order(what: str, call: CallContext) -> str:
    """Orders."""
    ran.append((what, call.idempotency_key, call.attempt))
    return f"ordered {what}"


def bytes_of(request: ModelRequest) -> bytes:
    """Everything a request is made of, in one form."""
    form = [request.instructions, request.tools, list(request.transcript), request.settings, request.tool_choice]
    return canonical(form)


END = text("Done.")


async def store_with(run: EmbeddedRun, directory: Path, kept: int) -> str:
    """A store that holds the run's first events, given up by its driver."""
    url = f"sqlite:{directory / f'{kept}.db'}"
    store = await open_store(url, clock=ManualClock(), entropy=SeededEntropy(77))
    envelopes = run.envelopes[:kept]
    lease = await store.create(RUN, run.key, envelopes, index_row(state_of(envelopes)))
    await store.release(lease)
    await store.close()
    return url


# H01


@pytest.mark.parametrize("first", ["A", "B", "C"])
async def test_what_finished_first_changes_neither_what_runs_again_nor_the_next_request(first: str) -> None:
    """H01, R-003, S-015, S-029, O12, C12."""
    release = {name: asyncio.Event() for name in "ABC"}

    @tool(effect="read", parallel=True)
    async def weigh(thing: str) -> str:
        """Weighs."""
        ran.append(thing)
        await release[thing].wait()
        return f"{thing} weighs"

    batch = calls(*[("weigh", {"thing": name}) for name in "ABC"])

    async def finish_in(order: str) -> None:
        for name in order:
            release[name].set()
            await asyncio.sleep(0.01)

    whole_model = script(batch, END)
    rest = [name for name in "CBA" if name != first]
    ending = asyncio.create_task(finish_in(first + "".join(rest)))
    whole = await embedded(agent_of(weigh), whole_model)
    await ending
    done = [event.call for event in only(whole.envelopes, ev.ToolCallCompleted)]
    assert done[0] == {"A": "1.0", "B": "1.1", "C": "1.2"}[first]
    ran.clear()
    again_model = script(batch, END)
    kept = before(whole, "tool_call_completed", 2)
    again = await embedded(agent_of(weigh), again_model, recorded=cut(whole, kept))
    assert ran == rest[-1:]
    assert again.outcome.output == "Done."
    assert [bytes_of(request) for request in again_model.requests] == [bytes_of(whole_model.requests[-1])]


async def test_a_call_that_never_started_runs_once_and_those_that_ended_never_again() -> None:
    """H01: killed before the second of three was dispatched."""
    batch = calls(*[("look", {"place": name}) for name in "ABC"])
    whole = await embedded(agent_of(look), script(batch, END))
    ran.clear()
    await embedded(agent_of(look), script(batch, END), recorded=cut(whole, before(whole, "tool_call_requested", 1)))
    assert ran == ["B", "C"]


# H02


async def test_a_write_in_doubt_parks_and_is_not_run_again(tmp_path: Path) -> None:
    """H02, S-064, O10, C1, C2: with the call shown as outcome unknown, and asking nothing of anybody."""
    replies = [calls(("act", {"what": "x"})), END]
    whole = await embedded(agent_of(act), script(*replies))
    url = await store_with(whole, tmp_path, before(whole, "tool_call_completed"))
    ran.clear()
    async with Engine.open(url) as engine:
        model = script(*replies)
        for _ in range(2):
            outcome = await (await engine.resume(RUN, agent_of(act), model=model)).wait()
            assert outcome.park is not None
            assert (outcome.park.kind, outcome.park.call) == ("needs_reconciliation", "1.0")
            assert "perdure resolve run-1 1.0" in outcome.park.next
        shown = await engine.show(RUN)
        assert shown["doubts"] == [{"call": "1.0", "tool": "act", "arguments": {"what": "x"}, "key": None}]
        assert len(await engine.journal(RUN)) == before(whole, "tool_call_completed")
    assert ran == []
    assert model.requests == []


@pytest.mark.parametrize(
    ("verdict", "given", "seen", "runs"),
    [
        ("happened", {"result": "did x, as it turned out"}, "1.0 act completed: did x, as it turned out", []),
        ("did_not_happen", {}, "1.0 act completed: did x", ["x"]),
        ("failed", {"text": "the printer burned"}, "the printer burned", []),
    ],
)
async def test_a_person_settles_it_and_the_run_goes_on(
    verdict: Any, given: dict[str, Any], seen: str, runs: list[str], tmp_path: Path
) -> None:
    """H02, S-065, O10, C2."""
    replies = [calls(("act", {"what": "x"})), END]
    whole = await embedded(agent_of(act), script(*replies))
    url = await store_with(whole, tmp_path, before(whole, "tool_call_completed"))
    ran.clear()
    async with Engine.open(url) as engine:
        await engine.resolve(RUN, "1.0", verdict, by="ada", **given)
        assert ran == []
        model = script(*replies)
        outcome = await (await engine.resume(RUN, agent_of(act), model=model)).wait()
        resolved = only(await engine.journal(RUN), ev.EffectResolved)
    assert outcome.output == "Done."
    assert ran == runs
    assert seen in asked(model)[0][-1]
    assert [(event.call, event.verdict, event.by) for event in resolved] == [("1.0", verdict, "ada")]


async def test_a_verdict_on_anything_else_is_refused_and_records_nothing(tmp_path: Path) -> None:
    """S-065: one event, drives nothing; on any other state it is refused."""
    whole = await embedded(agent_of(act), script(calls(("act", {"what": "x"})), END))
    url = await store_with(whole, tmp_path, before(whole, "tool_call_completed"))
    async with Engine.open(url) as engine:
        with pytest.raises(InvalidAnswerError, match="1.0 \\(act\\)"):
            await engine.resolve(RUN, "1.1", "happened")
        await engine.resolve(RUN, "1.0", "happened", result=1)
        with pytest.raises(InvalidAnswerError):
            await engine.resolve(RUN, "1.0", "did_not_happen")
        assert count(await engine.journal(RUN), "effect_resolved") == 1


async def test_a_write_killed_again_after_it_was_settled_is_in_doubt_again(tmp_path: Path) -> None:
    """H02, O10: did_not_happen was said of the attempt before."""
    replies = [calls(("act", {"what": "x"})), END]
    whole = await embedded(agent_of(act), script(*replies))
    url = await store_with(whole, tmp_path, before(whole, "tool_call_completed"))
    async with Engine.open(url) as engine:
        await engine.resolve(RUN, "1.0", "did_not_happen")
        await (await engine.resume(RUN, agent_of(act), model=script(*replies))).wait()
        journal = await engine.journal(RUN)
    attempt = next(envelope.seq for envelope in journal if envelope.kind == "attempt_started")
    again = EmbeddedRun(whole.outcome, journal[: attempt + 1], whole.key)
    parked = await embedded(agent_of(act), script(*replies), recorded=again)
    assert parked.outcome.park is not None
    assert parked.outcome.park.kind == "needs_reconciliation"


async def test_an_idempotent_call_runs_again_with_the_very_same_key_and_a_later_one_gets_another() -> None:
    """H02, S-051, S-052, S-064, C5."""
    replies = [calls(("order", {"what": "x"})), calls(("order", {"what": "x"})), END]
    whole = await embedded(agent_of(order), script(*replies))
    live = list(ran)
    ran.clear()
    model = script(*replies)
    await embedded(agent_of(order), model, recorded=cut(whole, before(whole, "tool_call_completed")))
    assert [(key, attempt) for _, key, attempt in ran] == [(live[0][1], 2), (live[1][1], 1)]
    assert live[0][1] != live[1][1]
    assert all(len(key) == 32 for _, key, _ in live)
    for request in model.requests:
        assert live[0][1].encode() not in bytes_of(request)


async def test_keys_differ_between_runs_and_between_calls_of_one_turn() -> None:
    """S-051, S-052: derived from run and call."""
    from perdure.runtime.dispatch import idempotency_key

    keys = {idempotency_key(run, call) for run in ("a", "b") for call in ("1.0", "1.1", "11.0")}
    assert len(keys) == 6


async def test_reads_and_writes_get_no_key() -> None:
    """S-050, S-051."""
    run = await embedded(agent_of(look, act), script(calls(("look", {"place": "a"}), ("act", {"what": "b"})), END))
    assert [event.key for event in only(run.envelopes, ev.ToolCallRequested)] == [None, None]


async def test_an_undeclared_effect_is_a_write() -> None:
    """S-050, C1."""
    run = await embedded(agent_of(act), script(calls(("act", {"what": "b"})), END))
    assert only(run.envelopes, ev.ToolCallRequested)[0].effect == "write"


async def test_a_dangling_read_and_a_dangling_model_call_are_made_again_and_charged() -> None:
    """S-064, C1, C5."""
    replies = [calls(("look", {"place": "a"})), END]
    whole = await embedded(agent_of(look), script(*replies))
    for kind, number in (("tool_call_completed", 0), ("model_call_completed", 0), ("model_call_completed", 1)):
        again = await embedded(agent_of(look), script(*replies), recorded=cut(whole, before(whole, kind, number)))
        assert again.outcome.output == "Done."
        attempts = only(again.envelopes, ev.AttemptStarted)
        assert [(event.n, event.cause) for event in attempts] == [(2, "recovery")]
        use, whole_use = again.outcome.usage, whole.outcome.usage
        assert use.model_turns + use.tool_calls == whole_use.model_turns + whole_use.tool_calls + 1


# H03, H04


class PairingModel(ScriptedModel):
    """Refuses any request in which a call lacks exactly one result directly after its turn, as providers do."""

    async def stream(self, request: ModelRequest) -> Any:
        entries = list(request.transcript)
        for place, entry in enumerate(entries):
            if hasattr(entry, "turn"):
                wanted = [f"{entry.id}.{n}" for n in range(len(entry.turn.calls))]
                following = entries[place + 1 : place + 2]
                got = [one.call for results in following for one in getattr(results, "observations", ())]
                assert got == wanted, f"a call lacks its result: {wanted} {got}"
        async for event in super().stream(request):
            yield event


async def test_a_session_whose_last_turn_has_one_result_and_one_open_call_goes_on() -> None:
    """H03 (a): nothing recorded earlier is rewritten, and doing it twice changes nothing."""
    batch = calls(("look", {"place": "a"}), ("look", {"place": "b"}))
    whole = await embedded(agent_of(look), PairingModel([batch, END]))
    ran.clear()
    kept = cut(whole, before(whole, "tool_call_completed", 1))
    once = await embedded(agent_of(look), PairingModel([batch, END]), recorded=kept)
    assert once.envelopes[: len(kept.envelopes)] == kept.envelopes
    assert once.outcome.output == "Done."
    assert ran == ["b"]
    twice = await embedded(agent_of(look), PairingModel([]), recorded=once)
    assert twice.envelopes == once.envelopes


async def test_a_constant_id_on_every_turn_confuses_nothing() -> None:
    """H04 (a), R-149: killed during the third; the third call is seen as unanswered."""
    replies = [calls(ScriptedCall("look", {"place": name}, "call-1")) for name in "abc"]
    whole = await embedded(agent_of(look), PairingModel([*replies, END]))
    ran.clear()
    model = PairingModel([*replies, END])
    await embedded(agent_of(look), model, recorded=cut(whole, before(whole, "tool_call_completed", 2)))
    assert ran == ["c"]
    assert [line for line in asked(model)[0] if line.startswith("results")] == [
        "results: 1.0 look completed: seen a",
        "results: 2.0 look completed: seen b",
        "results: 3.0 look completed: seen c",
    ]


async def test_equal_and_empty_ids_in_one_reply_are_separate_calls() -> None:
    """H04 (b), R-149, R-155, C11."""
    batch = calls(
        ScriptedCall("look", {"place": "a"}, "x"),
        ScriptedCall("look", {"place": "b"}, "x"),
        ScriptedCall("look", {"place": "c"}, ""),
    )
    model = PairingModel([batch, END])
    whole = await embedded(agent_of(look), model)
    assert ran == ["a", "b", "c"]
    assert "1.0 look completed: seen a | 1.1 look completed: seen b | 1.2 look completed: seen c" in asked(model)[1][-1]
    again = PairingModel([batch, END])
    await embedded(agent_of(look), again, recorded=cut(whole, before(whole, "tool_call_completed", 1)))
    assert bytes_of(again.requests[-1]) == bytes_of(model.requests[-1])


# H07


class Colour(Enum):
    RED = "red"


@dataclass
class Paint:
    colour: Colour
    amount: Decimal


class Broken:
    def __str__(self) -> str:
        raise RuntimeError("cannot be shown")


class BrokenTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("cannot be shown")


VALUES: dict[str, tuple[Any, str]] = {
    "an enum inside a dataclass": (Paint(Colour.RED, Decimal("1.50")), '{"amount":"1.50","colour":"red"}'),
    "a Decimal": (Decimal("0.10"), "0.10"),
    "an aware datetime": (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "2026-01-02T03:04:05"),
    "a naive datetime": (datetime(2026, 1, 2), "cannot be stored"),  # noqa: DTZ001 - what is refused
    "a set": ({1}, "cannot be stored"),
    "bytes": (b"x", "cannot be stored"),
    "not a number": (math.nan, "cannot be stored"),
    "infinity": ({"deep": [math.inf]}, "cannot be stored"),
    "an integer above 2**53": (2**53 + 1, "9007199254740993"),
    "an integer above 64 bits": (2**64, "cannot be stored"),
    "integer keys": ({1: "a"}, "cannot be stored"),
    "a value whose conversion raises": (Broken(), "cannot be stored"),
}


@pytest.mark.parametrize("name", VALUES)
async def test_a_value_looks_the_same_after_a_kill_as_it_did_live(name: str) -> None:
    """H07, S-055, S-069: and one without an agreed form is an error result that names the tool."""
    value, shown = VALUES[name]

    @tool(effect="read")
    async def gives() -> Any:
        """Gives the value."""
        return value

    live = script(calls(("gives", {})), END)
    whole = await embedded(agent_of(gives), live)
    kind = "tool_call_failed" if "stored" in shown else "tool_call_completed"
    assert shown in asked(live)[1][-1]
    assert "null" not in asked(live)[1][-1]
    if kind == "tool_call_failed":
        assert "gives ran, but its result" in asked(live)[1][-1]
        assert only(whole.envelopes, ev.ToolCallFailed)[0].reason == "output_form"
    for kept in (before(whole, kind), before(whole, kind) + 1):
        replayed = script(calls(("gives", {})), END)
        again = await embedded(agent_of(gives), replayed, recorded=cut(whole, kept))
        assert again.outcome.output == "Done."
        assert bytes_of(replayed.requests[-1]) == bytes_of(live.requests[-1])
    for envelope in whole.envelopes:
        json.loads(envelope.payload or b"", parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


async def test_an_error_whose_own_text_cannot_be_made_is_a_failure_all_the_same() -> None:
    """H07, S-069."""

    @tool
    async def breaks() -> str:
        """Raises."""
        raise BrokenTextError

    run = await embedded(agent_of(breaks), script(calls(("breaks", {})), END))
    assert run.outcome.output == "Done."
    assert "could not be read" in observed(run.envelopes)["1.0"]


# Conservative mode


@pytest.mark.parametrize(
    ("kind", "ends", "reason"),
    [
        ("model", ("interrupted", "interrupted"), "model_call_failed"),
        ("look", ("interrupted", "interrupted"), "tool_call_failed"),
        ("act", ("indeterminate", "effect_indeterminate"), "tool_call_failed"),
        ("order", ("indeterminate", "effect_indeterminate"), "tool_call_failed"),
    ],
)
async def test_in_conservative_mode_nothing_in_flight_is_started_again(
    kind: str, ends: tuple[str, str], reason: str
) -> None:
    """R-012, C1, C2, S-064, O10."""
    names = {"look": "place", "act": "what", "order": "what", "model": "place"}
    name = "look" if kind == "model" else kind
    replies = [calls((name, {names[kind]: "x"})), END]
    agent = agent_of(look, act, order, resume_mode="conservative")
    whole = await embedded(agent, script(*replies))
    ran.clear()
    kept = before(whole, "model_call_completed" if kind == "model" else "tool_call_completed")
    model = script(*replies)
    run = await embedded(agent, model, recorded=cut(whole, kept))
    assert (run.outcome.outcome, run.outcome.terminal_reason) == ends
    assert (ran, model.requests) == ([], [])
    assert kinds(run.envelopes)[-2:] == [reason, "run_failed"]
    assert state_of(run.envelopes).open == {}


async def test_in_conservative_mode_every_dangling_read_of_a_group_is_closed() -> None:
    """C1: every in-flight attempt, not the first alone."""

    @tool(effect="read", parallel=True)
    async def glance(n: int) -> int:
        """Looks."""
        return n

    batch = calls(*[("glance", {"n": n}) for n in range(3)])
    agent = agent_of(glance, resume_mode="conservative")
    whole = await embedded(agent, script(batch, END))
    run = await embedded(agent, script(), recorded=cut(whole, before(whole, "tool_call_completed", 1)))
    assert count(run.envelopes, "tool_call_failed") == 2
    assert state_of(run.envelopes).open == {}
    assert run.outcome.terminal_reason == "interrupted"


async def test_in_conservative_mode_a_run_cut_between_calls_goes_on() -> None:
    """C1: all intents are settled, so there is nothing to close."""
    replies = [calls(("look", {"place": "a"})), END]
    agent = agent_of(look, resume_mode="conservative")
    whole = await embedded(agent, script(*replies))
    run = await embedded(agent, script(*replies), recorded=cut(whole, before(whole, "tool_call_completed") + 1))
    assert run.outcome.output == "Done."


# Crash loops


async def test_five_drives_that_finish_nothing_are_not_picked_up_again_until_somebody_asks(tmp_path: Path) -> None:
    """C5, O3: `recover` leaves the run alone, `resume` lifts it."""
    replies = [calls(("look", {"place": "a"})), END]
    whole = await embedded(agent_of(look), script(*replies))
    run = cut(whole, before(whole, "tool_call_completed"))
    looping = run
    for n in range(2, 7):
        drive = ev.DriveStarted(n, "0", "recover"), ev.AttemptStarted("1.0", n, "recovery")
        looping = extended(looping, *drive)
    url = await store_with(looping, tmp_path, len(looping.envelopes))
    async with Engine.open(url) as engine:
        assert (await engine.outcome(RUN)).park is not None
        runs, problems = await engine.recover(agent_of(look))
        assert (runs, problems) == ([], {})
        outcome = await (await engine.resume(RUN, agent_of(look), model=script(*replies))).wait()
    assert outcome.output == "Done."


# Replay


class Untouchable:
    """A model that must not be asked."""

    target, strict = "scripted:script", True

    def stream(self, request: ModelRequest) -> Any:
        raise AssertionError("a replayed run asked the model")

    async def close(self) -> None:
        """Nothing to give back."""


class Frozen(ManualClock):
    def now_ns(self) -> int:
        raise AssertionError("a replayed run read the clock")


async def replayed(run: EmbeddedRun, agent: Any, model: ModelClient) -> list[str]:
    """Runs the loop over the whole journal of an ended run; what it records, which must be nothing."""
    state, events = fold(RUN, run.envelopes)
    sink = ListJournal()
    journal = RunJournal(state, run.envelopes[-1].digest, sink, Frozen(), SeededEntropy(5))
    bindings = Bindings(model, agent.tools_by_name, Frozen(), SeededEntropy(5), agent.answer_check)
    drive = Drive(RUN, run.key, 1, state.started.agent, Cursor(events), journal, bindings)
    await run_loop(drive, agent.loop_function, state.started.input)
    return kinds(sink.envelopes)


async def test_a_whole_journal_replays_without_model_tool_clock_or_chance() -> None:
    """S-016, S-015, O2, R-012: and records nothing."""

    async def loop(ctx: RunContext, task: str) -> Any:
        from datetime import timedelta

        first = await ctx.now()
        number = await ctx.entropy()
        turn = await ctx.ask(assemble(ctx.agent, ctx.transcript.view()))
        seen = await ctx.use(turn.calls)
        await ctx.use([ToolCall("look", {"place": "own"})])
        await ctx.sleep(timedelta(0))
        await ctx.check_limits()
        value = await ctx.do("count", lambda: len(ran))
        return [first, number, [one.text for one in seen], value]

    agent = agent_of(look, act, order, loop=loop)
    batch = calls(("look", {"place": "a"}), ("act", {"what": "b"}), ("order", {"what": "c"}))
    run = await embedded(agent, script(batch))
    assert run.outcome.status == "completed"
    ran.clear()
    assert await replayed(run, agent, Untouchable()) == []
    assert ran == []


async def test_a_replay_with_other_code_is_a_divergence_that_records_nothing() -> None:
    """S-070, S-013."""
    agent = agent_of(look, act)
    run = await embedded(agent, script(calls(("look", {"place": "a"})), END))

    async def other(ctx: RunContext, task: str) -> Any:
        await ctx.now()

    with pytest.raises(RefusedError, match="model_call_requested"):
        await replayed(run, agent_of(look, act, loop=other), Untouchable())


async def test_what_recovery_adds_is_all_that_a_killed_run_has_more() -> None:
    """S-014, S-015, S-074, O2, O17."""
    replies = [calls(("look", {"place": "a"}), ("order", {"what": "x"})), END]
    agent = agent_of(look, order)
    whole = await embedded(agent, script(*replies))
    lasting = [event for event in decoded(whole.envelopes) if not isinstance(event, ev.DriveStarted)]
    for kept in range(1, len(whole.envelopes)):
        again = await embedded(agent, script(*replies), recorded=cut(whole, kept))
        added = (ev.DriveStarted, ev.AttemptStarted)
        assert [event for event in decoded(again.envelopes) if not isinstance(event, added)] == lasting
