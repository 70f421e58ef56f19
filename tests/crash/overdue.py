"""A program that dies while a write of it is past its time limit: python -m tests.crash.overdue DIRECTORY WHEN."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

from perdure import Agent, Engine, tool
from perdure.testing.replies import calls, text
from perdure.testing.scripted import ScriptedModel

RUN = "overdue"
LIMIT_S = 0.3
LONG_S = 60.0


def agent_over(directory: Path, when: str, engine: Engine | None) -> Agent:
    """Pays at once and says so much too late, or pays too late; dies in its second turn when given an engine."""

    def paid() -> None:
        with (directory / "paid").open("a") as book:
            book.write("paid\n")
            book.flush()
            os.fsync(book.fileno())

    @tool(timeout=LIMIT_S)
    def pay() -> str:
        """Pays."""
        with (directory / "began").open("a") as log:
            log.write("began\n")
        if when != "before the effect":
            paid()
        if when == "after the late result":
            time.sleep(3 * LIMIT_S)
            return "receipt 7"
        time.sleep(LONG_S)
        paid()
        return "receipt 7"

    @tool(effect="idempotent")
    async def die() -> str:
        """Ends the process, once what it waits for is stored."""
        if engine is None:
            return "alive"
        wanted = "late_result_observed" if when == "after the late result" else "tool_call_failed"
        for _ in range(6000):
            if any(event.kind == wanted for event in await engine.journal(RUN)):
                break
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    return Agent(name="payer", tools=[pay, die])


def model() -> ScriptedModel:
    """Pays, and asks for the same again two turns later."""
    return ScriptedModel([calls(("pay", {})), calls(("die", {})), calls(("pay", {})), text("Done.")])


async def main(directory: Path, when: str) -> None:
    """Starts the run, and does not live to see it end."""
    async with Engine.open(f"sqlite:{directory / 'perdure.db'}") as engine:
        await (await engine.start(agent_over(directory, when, engine), "pay", run_id=RUN, model=model())).wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
