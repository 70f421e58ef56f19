"""The power goes: of everything the store's files could then hold, nothing that was built upon is missing."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import apsw
import pytest

from perdure import Agent, CallContext, Engine, Limits, tool
from perdure.errors import PerdureError, UnknownError
from perdure.journal.envelope import Envelope
from perdure.prompting.request import ModelRequest
from perdure.runs import indexed
from perdure.stores.verify import verify
from perdure.testing.disks import TappedFile, tapped
from perdure.testing.power_cut import Image, Mark, Recorder, Write, images
from perdure.testing.scripted import Reply, ScriptedModel, calls, text


@dataclass(frozen=True)
class Happened:
    """An effect outside, or something that was built upon: the request with so many turns, or the end."""

    run_id: str
    what: str
    number: int = 0
    call: str = ""
    key: str | None = None


Note = Callable[[Happened], None]


def agent(note: Note, padding: int) -> Agent:
    """Reads, keyed and unkeyed writes; results long enough that the log is carried over into the file now and then."""

    @tool(effect="read")
    async def look(number: int) -> str:
        """Looks."""
        return f"seen {number} " * padding

    @tool(effect="idempotent")
    async def order(number: int, call: CallContext) -> str:
        """Orders."""
        note(Happened(call.run_id, "order", number, call.call_id, call.idempotency_key))
        return f"ordered {number}"

    @tool(effect="write")
    async def paint(number: int, call: CallContext) -> str:
        """Paints."""
        note(Happened(call.run_id, "paint", number, call.call_id))
        return f"painted {number}"

    return Agent(name="power", tools=[look, order, paint], limits=Limits(max_tool_calls=10_000))


def model(note: Note, run_id: str, turns: int) -> ScriptedModel:
    """Three calls a turn; each request is noted."""

    def reply(request: ModelRequest) -> Reply:
        number = request.transcript.turns
        note(Happened(run_id, "asked", number))
        if number == turns:
            return text("done")
        return calls(*((name, {"number": number}) for name in ("look", "order", "paint")))

    return ScriptedModel(reply, chunk=0)


async def record(folder: Path, synchronous: str | None, runs: int, turns: int, padding: int) -> Recorder:
    """Runs to their ends on a disk that is recorded."""
    recorder, path = Recorder(), folder / "perdure.db"
    connections: list[apsw.Connection] = []
    with tapped(recorder):
        async with Engine.open(f"sqlite:{path}"):
            pass  # so that the file is there, whole
        recorder.begin(path, folder / "perdure.db-wal")
        apsw.connection_hooks.append(connections.append)
        try:
            async with Engine.open(f"sqlite:{path}") as engine:
                if synchronous is not None:
                    for connection in connections:
                        with suppress(apsw.ConnectionClosedError):
                            connection.pragma("synchronous", synchronous)
                await asyncio.gather(*(drive(engine, recorder, f"run-{n}", turns, padding) for n in range(runs)))
        finally:
            apsw.connection_hooks.remove(connections.append)
    return recorder


async def drive(engine: Engine, recorder: Recorder, run_id: str, turns: int, padding: int) -> None:
    one = agent(recorder.mark, padding)
    run = await engine.start(one, "go", run_id=run_id, model=model(recorder.mark, run_id, turns))
    outcome = await run.wait()
    assert outcome.answer == "done"
    recorder.mark(Happened(run_id, "ended"))


async def problems_of(image: Image, folder: Path, *, resume: bool, turns: int, padding: int) -> list[str]:
    """What is wrong with an image: what it lacks; that it does not verify; how it goes on."""
    path = folder / "perdure.db"
    for leftover in folder.glob("perdure.db*"):
        if leftover.is_file():
            leftover.unlink()
    image.write(folder)
    happened = [mark for mark in image.marks if isinstance(mark, Happened)]
    try:
        report = await verify(path, fold_problem=indexed)
        if not report.ok:
            return [f"{image}: it does not verify: {report.first_bad}"]
        async with Engine.open(f"sqlite:{path}", create=False) as engine:
            found = [problem for run_id in started(happened) for problem in await lacks(engine, run_id, happened)]
            if not found and resume:
                for run_id in started(happened):
                    found += await resumed(engine, run_id, happened, turns, padding)
    except PerdureError as error:
        return [f"{image}: {type(error).__name__}: {error}"]
    return [f"{image}: {problem}" for problem in found]


def started(happened: Sequence[Happened]) -> list[str]:
    return sorted({one.run_id for one in happened})


async def lacks(engine: Engine, run_id: str, happened: Sequence[Happened]) -> list[str]:
    """What the image's journal lacks of what had been built upon."""
    events: Sequence[Envelope] = ()
    with suppress(UnknownError):
        events = await engine.journal(run_id)
    intents, answers, kinds = set(), set(), Counter(event.kind for event in events)
    for event in events:
        call = json.loads(event.payload or b"{}").get("call")
        if event.kind == "tool_call_requested":
            intents.add(call)
        elif event.kind == "tool_call_completed":
            answers.add(call)
    problems = []
    for one in (one for one in happened if one.run_id == run_id):
        if one.call and one.call not in intents:
            problems.append(f"{run_id}: {one.what} {one.number} happened, and its intent {one.call} is not there")
        if one.what == "asked":
            if kinds["model_call_requested"] <= one.number or kinds["model_call_completed"] < one.number:
                problems.append(f"{run_id}: request {one.number} was sent, and it or a turn before it is not there")
            if len(answers) < 3 * one.number:
                problems.append(f"{run_id}: request {one.number} was built on results that are not there")
        if one.what == "ended" and not kinds["run_completed"]:
            problems.append(f"{run_id} had ended, and its end is not there")
    return problems


async def resumed(engine: Engine, run_id: str, happened: Sequence[Happened], turns: int, padding: int) -> list[str]:
    """Goes on from the image, settling doubts by what had really happened; then counts."""
    world = [one for one in happened if one.run_id == run_id and one.call]

    def note(one: Happened) -> None:
        if one.call:
            world.append(one)

    while True:
        again = agent(note, padding)
        outcome = await (await engine.resume(run_id, again, model=model(note, run_id, turns))).wait()
        if outcome.status != "parked":
            break
        assert outcome.park is not None
        call = str(outcome.park.call)
        if any(one.call == call for one in world):
            await engine.resolve(run_id, call, "happened", result="painted")
        else:
            await engine.resolve(run_id, call, "did_not_happen")
    painted = Counter(one.number for one in world if one.what == "paint")
    keys = {number: {one.key for one in world if one.what == "order" and one.number == number} for number in painted}
    problems = [f"{run_id}: painted {n} {times} times" for n, times in painted.items() if times > 1]
    problems += [f"{run_id}: ordered {n} under {len(found)} keys" for n, found in keys.items() if len(found) != 1]
    if set(painted) != set(range(turns)) or outcome.answer != "done":
        problems.append(f"{run_id}: it ended {outcome.status} with {sorted(painted)}")
    return problems


async def problems_after_cuts(
    folder: Path, synchronous: str | None, *, runs: int, turns: int, padding: int, every: int, some: int = 2
) -> tuple[int, list[str]]:
    """How many images were looked at, and what is wrong with them."""
    (folder / "live").mkdir()
    (folder / "image").mkdir()
    recorder = await record(folder / "live", synchronous, runs, turns, padding)
    looked_at, problems = 0, []
    for number, image in enumerate(images(recorder, seed=7, some=some)):
        if number % every == 0:
            looked_at += 1
            resume = looked_at % 3 == 0
            problems += await problems_of(image, folder / "image", resume=resume, turns=turns, padding=padding)
    return looked_at, problems


@pytest.mark.parametrize("runs", [1, 3])
async def test_everything_built_upon_is_there_after_a_power_cut(tmp_path: Path, runs: int) -> None:
    """S-074, O17, H06: intents whose effect ran, completions that were built upon; and every image goes on."""
    looked_at, problems = await problems_after_cuts(
        tmp_path, None, runs=runs, turns=4, padding=1, every=3 if runs == 1 else 5
    )
    assert looked_at > 40
    assert problems == []


@pytest.mark.parametrize("synchronous", ["off", "normal"])
async def test_a_store_that_does_not_wait_for_the_disk_is_found_out(tmp_path: Path, synchronous: str) -> None:
    """The control: the same images without the syncs lack what had been built upon."""
    _, problems = await problems_after_cuts(tmp_path, synchronous, runs=1, turns=4, padding=1, every=2)
    assert any("its intent" in problem for problem in problems)
    assert any("was built on results" in problem or "before it is not there" in problem for problem in problems)


@pytest.mark.slow
async def test_a_log_that_is_carried_over_into_the_file_while_the_power_goes_loses_nothing(tmp_path: Path) -> None:
    """S-074, O17: long results, so that the log grows past a checkpoint and begins anew."""
    (tmp_path / "live").mkdir()
    (tmp_path / "image").mkdir()
    turns, padding = 16, 200_000
    recorder = await record(tmp_path / "live", None, 1, turns, padding)
    main = str(tmp_path / "live" / "perdure.db")
    ended = recorder.records.index(Mark(Happened("run-0", "ended")))
    during = list(enumerate(recorder.records[:ended]))
    carried = [at for at, one in during if getattr(one, "path", None) == main]
    anew = [at for at, one in during if isinstance(one, Write) and one.path == f"{main}-wal" and one.offset == 0]
    assert carried, "no checkpoint came while the run went on"
    assert anew[-1] > carried[0], "the log did not begin anew"
    near = {at + off for at in (carried[0], carried[-1], *anew) for off in range(-3, 12)}
    problems, looked_at = [], 0
    for image in images(recorder, seed=3, some=1):
        if image.at in near:
            looked_at += 1
            problems += await problems_of(
                image, tmp_path / "image", resume=looked_at % 5 == 0, turns=turns, padding=padding
            )
    assert looked_at > 5
    assert problems == []


@pytest.mark.soak
@pytest.mark.parametrize("runs", [1, 4])
async def test_every_image_of_every_sync_of_longer_runs_holds(tmp_path: Path, runs: int) -> None:
    """S-074, O17: each sync and each effect, eight times."""
    looked_at, problems = await problems_after_cuts(tmp_path, None, runs=runs, turns=12, padding=200, every=1, some=6)
    assert looked_at > 700
    assert problems == []


def test_an_image_tears_drops_and_keeps_only_what_was_not_synced() -> None:
    recorder = Recorder()
    recorder.start = {"/x/a": b"s" * 1024}
    file = TappedFile("/x/a", "main")
    recorder.wrote(file, 0, b"1" * 512)
    recorder.synced(file)
    recorder.mark("before")
    recorder.wrote(file, 512, b"2" * 2048)
    recorder.mark("after")
    found = {image.files["/x/a"] for image in images(recorder, seed=1, some=60) if image.marks == ("before", "after")}
    assert all(data.startswith(b"1" * 512) for data in found)
    assert b"1" * 512 + b"s" * 512 in found
    assert b"1" * 512 + b"2" * 2048 in found
    torn = [data for data in found if {data[at : at + 512][:1] for at in range(512, len(data), 512)} > {b"2"}]
    assert torn, "nothing was torn"
    assert all(len(set(data[at : at + 512])) == 1 for data in found for at in range(0, len(data), 512))
