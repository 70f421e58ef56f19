"""W1, the workload of one run: a scripted model, one write call a turn. Usage: w1.py FILE TURNS; prints JSON.

A turn is one reply (300 bytes of text and one call) and its call (200 bytes of result); a last reply of text ends the
run. The limits are raised so that nothing parks.

A short run goes before, in the same store and process, so that what a process does once (imports, first growth of the
file) is not shared out over the turns.
"""

import asyncio
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import apsw

from perdure import Agent, Engine, Limits, tool
from perdure.prompting.request import ModelRequest
from perdure.testing.scripted import Reply, ScriptedModel, calls, text

WARM_UP_TURNS = 20
PADDING = "The observation was read and the next lookup is needed to make progress. "


def said(number: int) -> str:
    """300 bytes of a reply's text."""
    return (f"Thought {number}: " + PADDING * 5)[:300]


@tool(effect="write")
async def lookup(k: int) -> str:
    """Looks one thing up."""
    return (f"observation {k} " + "data " * 50)[:200]


def script(turns: int) -> Callable[[ModelRequest], Reply]:
    """One call in each reply, then a last text."""

    def reply(request: ModelRequest) -> Reply:
        number = request.transcript.turns
        return calls(("lookup", {"k": number}), text=said(number)) if number < turns else text(said(number))

    return reply


class Commits:
    """Counts the transactions of this process that changed something."""

    def __init__(self) -> None:
        self.count = 0
        apsw.connection_hooks.append(lambda connection: connection.set_commit_hook(self._committed, id="bench"))

    def _committed(self) -> bool:
        self.count += 1
        return False  # go on with the commit


async def drive(engine: Engine, turns: int) -> None:
    """One run from its start to its end."""
    limits = Limits(max_model_turns=turns + 1, max_tool_calls=turns)
    agent = Agent(name="bench", instructions="Look things up.", tools=[lookup], limits=limits)
    outcome = await (await engine.start(agent, "go", model=ScriptedModel(script(turns)))).wait()
    if outcome.status != "completed" or outcome.usage.tool_calls != turns:
        sys.exit(f"w1: the run of {turns} turns ended otherwise than it should: {outcome}")


async def measure(path: Path, turns: int) -> dict[str, float]:
    """What one run of that many turns cost."""
    commits = Commits()
    async with Engine.open(f"sqlite:{path}") as engine:
        await drive(engine, WARM_UP_TURNS)
        before, cpu, began = commits.count, time.process_time(), time.perf_counter()
        await drive(engine, turns)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
        committed = commits.count - before
    # A kibibyte is the unit on Linux. A parent's size counts too on the way through fork, so the parent must be small.
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "turns": turns,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "commits": committed,
        "peak_bytes": peak_bytes,
    }


def stored_bytes(path: Path) -> int:
    """The size of the store's file with everything in it."""
    connection = apsw.Connection(str(path))
    connection.execute("pragma wal_checkpoint(truncate)")
    connection.close()
    return path.stat().st_size


def main(path: Path, turns: int) -> None:
    """Measures and prints."""
    measured = asyncio.run(measure(path, turns))
    print(json.dumps({**measured, "store_bytes": stored_bytes(path)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
