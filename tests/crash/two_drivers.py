"""Two processes and one run, many times over: python -m tests.crash.two_drivers DIRECTORY WHAT ROUNDS.

WHAT is one of
- `resume`, `recover`: two released at one moment, over a run whose driver was killed;
- `killed`: a holder that is killed, and one who goes on;
- `before-intent`, `before-effect`, `in-idempotent`, `in-write`: a holder that stops itself there, is taken over from,
  and wakes;
- `parked`: a holder that stops itself inside a plain write, and wakes while the run is parked for that;
- `cancel`, `limit`, `resolve`: a holder that stops itself, while somebody says that to its run from outside.

Prints a line of JSON for each round; a round that hangs or goes astray ends the program with a sentence.
"""

import asyncio
import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import apsw
from tests.crash.drivers import LEASE_S, PATIENCE_S, Driver, stop_self, wait_for, wait_until_stopped

from perdure.engine import Engine
from perdure.errors import LeaseHeldError, PerdureError
from perdure.runs import indexed
from perdure.stores.verify import verify
from perdure.testing.killing.errand import Ledger, Line, doubled, missing, result
from perdure.testing.killing.processes import Process

LONG_LEASE_S = 60.0
RACES = ("resume", "recover")
PLACES = ("before-intent", "before-effect", "in-idempotent", "in-write")
SAYINGS = ("cancel", "limit", "resolve")
Verdict = Literal["happened", "did_not_happen"]
VERDICTS: dict[str, Verdict] = {"before-effect": "did_not_happen", "in-write": "happened"}
"""How the tester knows a write in doubt to be: one whose process never came to it cannot happen any more, one whose
process stands inside it has happened or will."""
_MOST_VOID = 10
"""A holder may meet its own heartbeat's commit so often before its round is given up."""


# Two at one moment


def left_by_the_dead(folder: Path, run_id: str, number: int) -> None:
    """A process that dies by SIGKILL inside its second model call, or inside a keyed write: before or behind what that
    does."""
    driver = Driver(folder, "dead", run_id)

    def die(now: bool) -> None:
        if now:
            os.kill(os.getpid(), signal.SIGKILL)

    if number % 2:
        driver.on_reply = lambda turn: die(turn == 1)
    elif number % 4:
        driver.watch.on_began = lambda tool: die(tool == "order")
    else:
        driver.watch.on_ended = lambda tool: die(tool == "order")
    ended = driver.fork(lambda: hold(driver)).wait(PATIENCE_S)
    assert ended is not None, f"waited {PATIENCE_S:g} s in vain for the first driver of run {run_id} to die"
    assert ended.killed


async def hold(driver: Driver, lease_seconds: float = LEASE_S) -> None:
    """Starts the run and drives it to its end."""
    async with await driver.open(lease_seconds) as engine:
        driver.told.status = (await (await driver.start(engine)).wait()).status


def race(folder: Path, verb: str, number: int) -> dict[str, Any]:
    """One round of two who are released at one moment."""
    run_id = f"{verb}-{number}"
    left_by_the_dead(folder, run_id, number)
    page = mmap.mmap(-1, mmap.PAGESIZE)
    drivers = [Driver(folder, who, run_id) for who in ("one", "two")]

    def arrive(place: int) -> None:
        page[place] = 1
        # No pause: a sleep would let one of them oversleep the other's acquire.
        wait_for(f"the release of both drivers of run {run_id}", lambda: page[2], pause_s=0)

    for place, driver in enumerate(drivers):
        driver.on_acquire = lambda place=place: arrive(place)
    contenders = [driver.fork(lambda driver=driver: driver.drive_on(verb)) for driver in drivers]
    wait_for(f"both drivers of run {run_id} to come to their acquire", lambda: page[0] and page[1], pause_s=0.001)
    page[2] = 1
    told = [driver.heard(contender) for driver, contender in zip(drivers, contenders, strict=True)]
    return {"run": run_id, "told": told, "problems": problems(lines_of(folder, run_id))}


def lines_of(folder: Path, run_id: str) -> list[Line]:
    """All that happened in a run, whoever did it."""
    who = ("dead", "holder", "one", "two", "successor")
    return [line for one in who for line in Ledger(folder / f"ledger-{one}").of(run_id)]


def problems(lines: list[Line]) -> list[str]:
    """What happened twice, and what never did, in a run that is done."""
    return doubled(lines) + missing(lines)


# One after a dead one


def killed(folder: Path, number: int) -> dict[str, Any]:
    """One round of a holder with a long lease that is killed while it lives, or while it is stopped."""
    run_id, verb = f"killed-{number}", RACES[number % 2]
    stops = both(number)
    holder, successor = Driver(folder, "holder", run_id), Driver(folder, "successor", run_id)
    page = mmap.mmap(-1, mmap.PAGESIZE)

    def stay(turn: int) -> None:
        if turn == 1:
            page[0] = 1
            time.sleep(2 * PATIENCE_S)

    holder.on_reply = stay
    victim = holder.fork(lambda: hold(holder, LONG_LEASE_S))
    wait_for(f"the holder of run {run_id} to come to its second model call", lambda: page[0])
    if stops:
        os.kill(victim.pid, signal.SIGSTOP)
        wait_until_stopped(victim, f"the holder of run {run_id}")
    killed_ns = time.monotonic_ns()
    victim.kill()
    assert victim.wait(PATIENCE_S) is not None, f"waited {PATIENCE_S:g} s in vain for the killed holder to be gone"
    process = successor.fork(lambda: successor.drive_on(verb, LONG_LEASE_S))
    await_drives(successor, 2, process)
    recorded_ns = time.monotonic_ns()
    told = successor.heard(process)
    return {
        "run": run_id,
        "told": told,
        "taken_s": (told["left_ns"] - killed_ns) / 1e9,
        "recorded_s": (recorded_ns - killed_ns) / 1e9,
        "problems": problems(lines_of(folder, run_id)),
    }


def both(number: int) -> bool:
    """A second choice by a round's number: with `number % 2`, four rounds in a row make all four pairs."""
    return (number + number // 2) % 2 == 1


# Stopped, outlasted, woken


def stopped(folder: Path, place: str, number: int) -> dict[str, Any]:
    """One round of a holder that stops itself at a place, is taken over from, and wakes."""
    holder, sleeper = asleep(folder, place, f"{place}-{number}", number % 2)
    run_id = holder.run_id
    successor = Driver(folder, "successor", run_id)
    acts_before = holder.ledger.of(run_id)
    process = successor.fork(lambda: take_over(successor, VERDICTS.get(place)))
    await_drives(successor, 2, process)
    wakes_late = not both(number)
    if wakes_late:  # else while its successor drives
        successor.heard(process)
    recorded = events(folder, run_id)
    os.kill(sleeper.pid, signal.SIGCONT)
    told, woken = successor.heard(process), holder.heard(sleeper)
    after = events(folder, run_id)
    return {
        "run": run_id,
        "told": [woken, told],
        "kept": (after if wakes_late else after[: len(recorded)]) == recorded,
        "drives": drives(folder, run_id),
        "woken_acts": [f"{one.what} {one.number}" for one in holder.ledger.of(run_id)[len(acts_before) :]],
        "problems": problems(lines_of(folder, run_id)),
    }


def asleep(folder: Path, place: str, name: str, variant: int) -> tuple[Driver, Process]:
    """A holder that has stopped itself there, and its process.

    One that stopped while its writer was inside a commit, say of its heartbeat, keeps the file's own lock, so that
    nobody could take over: that is another case, and it is made anew.
    """
    for attempt in range(_MOST_VOID):
        holder = Driver(folder, "holder", f"{name}-{attempt}")
        stop_at(holder, place, variant)
        sleeper = holder.fork(lambda holder=holder: hold(holder))
        wait_until_stopped(sleeper, f"the holder of run {holder.run_id}")
        if is_writable(folder):
            return holder, sleeper
        sleeper.kill()
        sleeper.ended()
    raise AssertionError(f"the holder of {name} stopped inside a commit {_MOST_VOID} times in a row")


def stop_at(driver: Driver, place: str, variant: int) -> None:
    """Makes the process stop itself there, once."""
    left = [1]

    def stop(now: bool) -> bool:
        if not (now and left):
            return False
        left.clear()
        stop_self()
        return True

    match place:
        case "before-intent":
            # The reply is there. The append that holds the first intent of it, or that of its plain write, is on its
            # way to the store; on waking the process goes on with exactly that append.
            tool = ("look", "carve")[variant]
            driver.on_intent = lambda intent: stop(intent == (tool, 1))
        case "before-effect":
            # The intent is durable; what is confirmed next is its dispatch.
            tool = ("carve", "order")[variant]
            driver.on_confirm = lambda intent: stop(intent == (tool, 1))
        case "in-idempotent" | "in-write":
            tool = {"in-idempotent": "order", "in-write": "paint"}[place]
            if variant:  # the effect has happened, and is not told yet
                driver.watch.on_ended = lambda name: stop(name == tool)
            else:
                driver.watch.on_began = lambda name: stop(name == tool)


def is_writable(folder: Path) -> bool:
    """Whether nobody is inside a commit."""
    probe = apsw.Connection(str(folder / "perdure.db"))
    probe.set_busy_timeout(200)
    try:
        probe.execute("begin immediate; rollback")
    except apsw.BusyError:
        return False
    finally:
        probe.close()
    return True


def parked(folder: Path, number: int) -> dict[str, Any]:
    """One round of a holder that wakes inside its plain write after another has met that, parked, and given the run
    back: nothing was recorded meanwhile, so that what the holder would add does follow what is there."""
    holder, sleeper = asleep(folder, "in-write", f"parked-{number}", number % 2)
    run_id = holder.run_id
    recorded = events(folder, run_id)
    first, successor = Driver(folder, "one", run_id), Driver(folder, "successor", run_id)
    met = first.heard(first.fork(lambda: take_over(first, None)))
    os.kill(sleeper.pid, signal.SIGCONT)
    woken = holder.heard(sleeper)
    kept = events(folder, run_id) == recorded
    told = successor.heard(successor.fork(lambda: take_over(successor, "happened")))
    return {"run": run_id, "told": [woken, met, told], "kept": kept, "problems": problems(lines_of(folder, run_id))}


async def take_over(driver: Driver, verdict: Verdict | None) -> None:
    """Resumes as soon as the holder is outlasted, and settles a write in doubt; without a verdict leaves it parked."""
    async with await driver.open() as engine:
        while True:
            run = await outlasting(driver, lambda: driver.go_on(engine))
            assert run is not None
            outcome = await run.wait()
            driver.told.status = outcome.status
            park = outcome.park
            if park is None:
                return
            tool, number = park.detail["tool"], park.detail["arguments"]["number"]
            driver.told.parks.append((park.kind, tool, number))
            if verdict is None:
                return
            done = result(tool, number) if verdict == "happened" else None
            await engine.resolve(driver.run_id, str(park.call), verdict, result=done)


async def outlasting(driver: Driver, act: Callable[[], Any]) -> Any:
    """Does it as soon as the run's holder is outlasted.

    Raises:
        AssertionError: it was not in time.
    """
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        try:
            return await act()
        except LeaseHeldError:
            await asyncio.sleep(0.05)
    raise AssertionError(f"waited {PATIENCE_S:g} s in vain for the holder of run {driver.run_id} to be outlasted")


def await_drives(driver: Driver, count: int, process: Process) -> None:
    """Returns once so many drives have recorded their beginning; the driver's process is the one to record the last.

    Raises:
        AssertionError: they have not in time, or the process has ended before.
    """
    what = f"drive {count} of run {driver.run_id} to record its beginning"

    def look() -> bool:
        ended = process.wait(0)  # first, so that what it recorded before it ended is seen
        there = len(drives(driver.folder, driver.run_id)) >= count
        if ended is not None and not there:
            told = driver.heard(process)
            found = f"ended {told['status'] or told['error']} ({told['said']})"
            raise AssertionError(f"waited for {what}, but the {told['who']} {found}")
        return there

    wait_for(what, look)


def drives(folder: Path, run_id: str) -> list[int]:
    """The seqs at which a run's drives began."""
    return [seq for seq, kind, _ in events(folder, run_id) if kind == "drive_started"]


def events(folder: Path, run_id: str) -> list[tuple[int, str, dict[str, Any]]]:
    """What is recorded of a run: seq, kind, payload."""
    reader = apsw.Connection(str(folder / "perdure.db"), flags=apsw.SQLITE_OPEN_READONLY)
    reader.set_busy_timeout(int(PATIENCE_S * 1000))
    query = "select seq, kind, payload from event where run_id = ? order by seq"
    found = [(seq, kind, json.loads(payload)) for seq, kind, payload in reader.execute(query, (run_id,))]
    reader.close()
    return found


# Spoken to from outside


def spoken_to(folder: Path, what: str, number: int) -> dict[str, Any]:
    """One round of a holder that stops itself, while somebody cancels its run, changes its limits, or settles its
    write: refused while the holder may be alive, recorded once it is outlasted. Then another goes on, and it wakes."""
    in_write = what == "resolve" or (what == "cancel" and number % 2 == 0)
    place, variant = ("in-write", 1) if in_write else ("before-intent", 0)
    holder, sleeper = asleep(folder, place, f"{what}-{number}", variant)
    run_id = holder.run_id
    operator, successor = Driver(folder, "operator", run_id), Driver(folder, "successor", run_id)
    acts_before, recorded = holder.ledger.of(run_id), events(folder, run_id)
    said = operator.heard(operator.fork(lambda: speak(operator, what, number)))
    settled = events(folder, run_id)
    wakes_first, verb = both(number), RACES[number // 2 % 2]
    if wakes_first:  # the run is nobody's at that moment
        os.kill(sleeper.pid, signal.SIGCONT)
        holder.heard(sleeper)
    told = successor.heard(successor.fork(lambda: successor.drive_on(verb)))
    if not wakes_first:
        os.kill(sleeper.pid, signal.SIGCONT)
    woken = holder.heard(sleeper)
    lines = lines_of(folder, run_id)
    return {
        "run": run_id,
        "told": [woken, told],
        "said": said,
        "settled": [(kind, payload) for _, kind, payload in settled[len(recorded) :]],
        "kept": settled[: len(recorded)] == recorded,
        "further": [kind for _, kind, _ in events(folder, run_id)[len(settled) :]],
        "woken_acts": [f"{one.what} {one.number}" for one in holder.ledger.of(run_id)[len(acts_before) :]],
        "acts": sorted(f"{one.what} {one.number}" for one in lines if one.what != "asked"),
        "problems": problems(lines) if told["status"] == "completed" else doubled(lines),
    }


async def speak(driver: Driver, what: str, number: int) -> None:
    """Says it twice: to a holder that may be alive, by the lease of the one who speaks; and to one that is outlasted,
    which takes as long as the lease does."""
    async with await driver.open(10 * LONG_LEASE_S) as engine:
        before = await engine.journal(driver.run_id)
        await refused(driver, say(engine, driver.run_id, what, number))
        assert await engine.journal(driver.run_id) == before, "what was refused has left a trace"
    # Half a lease is enough: who only records starts nothing that a lease must be fresh for.
    async with await driver.open(LEASE_S / 2) as engine:
        await outlasting(driver, lambda: say(engine, driver.run_id, what, number))


async def refused(driver: Driver, saying: Any) -> None:
    try:
        await saying
    except PerdureError as error:
        driver.told.refusals.append(f"{type(error).__name__}: {error}")


async def say(engine: Engine, run_id: str, what: str, number: int) -> None:
    match what:
        case "cancel":
            await engine.cancel(run_id, "enough", by="the tester")
        case "limit":
            await engine.limit(run_id, by="the tester", max_model_turns="+5" if number % 2 == 0 else 1)
        case "resolve":
            park = (await engine.state(run_id)).park()
            assert park is not None, "the write in which the holder stands is no doubt"
            done = result(park.detail["tool"], park.detail["arguments"]["number"])
            await engine.resolve(run_id, str(park.call), "happened", result=done, by="the tester")


def main(folder: Path, what: str, rounds: int) -> None:
    """Prints each round; in the end the store must verify."""
    for number in range(rounds):
        if what in RACES:
            shown = race(folder, what, number)
        elif what in PLACES:
            shown = stopped(folder, what, number)
        elif what in SAYINGS:
            shown = spoken_to(folder, what, number)
        else:
            shown = {"killed": killed, "parked": parked}[what](folder, number)
        print(json.dumps(shown), flush=True)
    report = asyncio.run(verify(folder / "perdure.db", fold_problem=indexed))
    assert report.ok, f"the store does not verify: {report.first_bad}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
