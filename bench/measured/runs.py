"""The agent of all our workloads: a scripted model, one write call a turn.

A turn is one reply (300 bytes of text and one call) and its call (200 bytes of result); a last reply of text ends the
run. The limits are raised so that nothing parks.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import apsw
from bench.measured.work import said, seen

from perdure import Agent, Engine, Limits, tool
from perdure.prompting.request import ModelRequest
from perdure.testing.scripted import Reply, ScriptedModel, calls, text


@tool(effect="write")
async def lookup(k: int) -> str:
    """Looks one thing up."""
    return seen(k)


def agent_for(turns: int) -> Agent:
    """An agent whose limits let that many turns through, the last text, and one reply asked for again after a kill."""
    limits = Limits(max_model_turns=turns + 2, max_tool_calls=turns)
    return Agent(name="bench", instructions="Look things up.", tools=[lookup], limits=limits)


def script(turns: int, at_the_last: Callable[[], None] = lambda: None) -> ScriptedModel:
    """One call in each reply, then a last text; `at_the_last` is called when that one is asked for."""

    def reply(request: ModelRequest) -> Reply:
        number = request.transcript.turns
        if number < turns:
            return calls(("lookup", {"k": number}), text=said(number))
        at_the_last()
        return text(said(number))

    return ScriptedModel(reply)


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
    outcome = await (await engine.start(agent_for(turns), "go", model=script(turns))).wait()
    if outcome.status != "completed" or outcome.usage.tool_calls != turns:
        sys.exit(f"the run of {turns} turns ended otherwise than it should: {outcome}")


def stored_bytes(path: Path) -> int:
    """The size of the store's file with everything in it."""
    connection = apsw.Connection(str(path))
    connection.execute("pragma wal_checkpoint(truncate)")
    connection.close()
    return path.stat().st_size
