"""A program that dies inside a call, right after its effect: python -m tests.crash.killed DIRECTORY EFFECT."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from perdure import Agent, CallContext, Engine, tool
from perdure.testing.replies import calls, text
from perdure.testing.scripted import ScriptedModel

RUN = "killed"


def agent_over(directory: Path, effect: Any, *, kills: bool) -> Agent:
    """Notes each effect, and the key it was handed, on a line of a file; dies after the first when it kills."""

    @tool(effect=effect)
    async def note(what: str, call: CallContext) -> str:
        """Notes something down."""
        with (directory / "notes").open("a") as notes:
            notes.write(f"{what} {call.idempotency_key} {call.attempt}\n")
            notes.flush()
            os.fsync(notes.fileno())
        if kills:
            os.kill(os.getpid(), signal.SIGKILL)
        return f"noted {what}"

    return Agent(name="noter", tools=[note])


def model(delay_ms: int = 0) -> ScriptedModel:
    """Notes the same thing twice, in two turns."""
    replies = [calls(("note", {"what": "x"})), calls(("note", {"what": "x"})), text("Done.")]
    return ScriptedModel(replies, delay_ms=delay_ms)


async def main(directory: Path, effect: str) -> None:
    """Starts the run, and does not live to see it end."""
    async with Engine.open(f"sqlite:{directory / 'perdure.db'}") as engine:
        agent = agent_over(directory, effect, kills=True)
        await (await engine.start(agent, "note it", run_id=RUN, model=model())).wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
