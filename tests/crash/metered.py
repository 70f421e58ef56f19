"""A program that asks its model a number of times and dies: python -m tests.crash.metered DIRECTORY CALLS WHERE."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from perdure import Agent, Engine, Limits, tool
from perdure.ports import ModelEvent
from perdure.prompting.request import ModelRequest
from perdure.testing.replies import calls, text
from perdure.testing.scripted import ScriptedModel

RUN = "metered"
LIMIT = 10
TURNS = 13
"""The turn that ends the task."""


class Metered:
    """A model that writes a line for each request, and dies in one of them when told to."""

    target, strict = "scripted:metered", True

    def __init__(self, directory: Path, dies_in: int | None = None) -> None:
        replies = [*[calls(("look", {"place": number})) for number in range(TURNS - 1)], text("Done.")]
        self._script = ScriptedModel(replies)
        self._log, self._dies_in = directory / "asked", dies_in
        self.asked = 0

    async def stream(self, request: ModelRequest) -> Any:
        self.asked += 1
        with self._log.open("a") as log:
            log.write(f"{request.transcript.turns}\n")
            log.flush()
            os.fsync(log.fileno())
        if self.asked == self._dies_in:
            os.kill(os.getpid(), signal.SIGKILL)
        event: ModelEvent
        async for event in self._script.stream(request):
            yield event

    async def close(self) -> None:
        """Nothing to give back."""


def agent_over(model: Metered, dies_after: int | None = None) -> Agent:
    """Looks at one place after the other; dies at a look once the model has answered so often."""

    @tool(effect="read")
    async def look(place: int) -> str:
        """Looks."""
        if model.asked == dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return f"seen {place}"

    return Agent(name="meter", tools=[look], limits=Limits(max_model_turns=LIMIT))


async def main(directory: Path, asked: int, where: str) -> None:
    """Starts or resumes the run and dies in or after that many of its own model calls; exits 3 when it parks."""
    model = Metered(directory, asked if where == "in the call" else None)
    agent = agent_over(model, asked if where == "after the call" else None)
    async with Engine.open(f"sqlite:{directory / 'perdure.db'}") as engine:
        known = any(run["run_id"] == RUN for run in await engine.runs())
        run = await (
            engine.resume(RUN, agent, model=model) if known else engine.start(agent, "look", run_id=RUN, model=model)
        )
        outcome = await run.wait()
    sys.exit(3 if outcome.status == "parked" else 1)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
