"""The run that a campaign kills: six turns of reads, keyed and unkeyed writes, over a world that is one file.

Every effect and every model call is a line of that file before it is told to anybody, so what happened can be counted
whatever died afterwards.
"""

import asyncio
import json
import os
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

from perdure.agent import Agent
from perdure.calls import CallContext
from perdure.contracts.limits import Limits
from perdure.prompting.request import ModelRequest
from perdure.testing.replies import Reply, calls, text
from perdure.tools.define import tool

TURNS = 6
DONE = "The errand is done."
ASKED, LOST, SETTLED = "asked", "lost", "settled"
"""Lines that tell of no action: a model call; something the journal no longer holds, with the words for a call; a run
that was parked for a write in doubt, which was settled."""
_LONGEST_S = 0.002
"""A tool's function takes up to that before its effect, and after it: long enough to be met by many kills."""


class Line(NamedTuple):
    """Something that happened."""

    run_id: str
    what: str
    """The tool, or one of ASKED, LOST and SETTLED."""
    number: int
    """Which one: each action of a run is asked for once, by turn; of `asked`, the turns in the request."""
    call: str
    key: str | None


class Ledger:
    """The world: an append-only file, one line a happening."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, line: Line) -> None:
        """Appends a line in one write, so that lines of several processes never mix."""
        descriptor = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, json.dumps(line).encode() + b"\n")
        finally:
            os.close(descriptor)

    def of(self, run_id: str) -> list[Line]:
        """What happened in a run, in order."""
        if not self._path.exists():
            return []
        lines = [Line(*json.loads(line)) for line in self._path.read_text("utf-8").splitlines()]
        return [line for line in lines if line.run_id == run_id]


def result(what: str, number: int) -> str:
    """What an action returns."""
    return f"{what} {number} done"


def errand_agent(ledger: Ledger, chance: random.Random) -> Agent:
    """The agent over that world."""

    def happen(what: str, number: int, call: CallContext) -> str:
        ledger.note(Line(call.run_id, what, number, call.call_id, call.idempotency_key))
        return result(what, number)

    async def slowly(what: str, number: int, call: CallContext) -> str:
        await asyncio.sleep(chance.uniform(0, _LONGEST_S))
        done = happen(what, number, call)
        await asyncio.sleep(chance.uniform(0, _LONGEST_S))
        return done

    @tool(effect="read", parallel=True)
    async def look(number: int) -> str:
        """Looks."""
        await asyncio.sleep(chance.uniform(0, _LONGEST_S))
        return result("look", number)

    @tool(effect="idempotent")
    async def order(number: int, call: CallContext) -> str:
        """Orders: a keyed write."""
        return await slowly("order", number, call)

    @tool(effect="write")
    async def paint(number: int, call: CallContext) -> str:
        """Paints: an unkeyed write."""
        return await slowly("paint", number, call)

    @tool(effect="write")
    def carve(number: int, call: CallContext) -> str:
        """Carves: an unkeyed write that blocks a thread."""
        time.sleep(chance.uniform(0, _LONGEST_S))
        return happen("carve", number, call)

    limits = Limits(max_model_turns=10_000, max_tool_calls=10_000)
    return Agent(name="errand", instructions="Do the errand.", tools=[look, order, paint, carve], limits=limits)


def script(request: ModelRequest) -> Reply:
    """What the model says, by turn."""
    number = request.transcript.turns
    if number >= TURNS:
        return text(DONE)
    wanted: list[tuple[str, Any]] = [("look", {"number": number}), ("look", {"number": number + 100})]
    wanted += [(name, {"number": number}) for name in actions(number)]
    return calls(*wanted)


def actions(number: int) -> tuple[str, ...]:
    """The effects of a turn."""
    return ("order", "paint") if number % 2 == 0 else ("carve", "order")


def expected() -> set[tuple[str, int]]:
    """What has happened when a run is done."""
    return {(name, number) for number in range(TURNS) for name in actions(number)}


def missing(lines: list[Line]) -> list[str]:
    """What never happened of what has happened when a run is done."""
    there = {(line.what, line.number) for line in lines}
    return [f"{what} {number} never happened" for what, number in sorted(expected() - there)]


def doubled(lines: list[Line]) -> list[str]:
    """What happened more than once, though it is asked for once. A keyed write may come again under its own key."""
    problems = []
    for what, number in sorted(expected()):
        found = [line for line in lines if (line.what, line.number) == (what, number)]
        times = len({line.key for line in found}) if what == "order" else len(found)
        if times > 1:
            problems.append(f"{what} {number} happened {times} times")
    return problems + _asked_again([line.number for line in lines if line.what == ASKED])


def _asked_again(numbers: list[int]) -> list[str]:
    """Finished model calls that were asked once more: those behind which a later one had been asked already."""
    problems, furthest = [], -1
    for number in numbers:
        if number < furthest:
            problems.append(f"model call {number} was asked again after {furthest}")
        furthest = max(furthest, number)
    return problems
