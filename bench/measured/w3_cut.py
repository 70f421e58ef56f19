"""Makes what W3 reads: a run killed while its last reply is asked for.

Usage: python -m bench.measured.w3_cut FILE TURNS

The process dies by SIGKILL; that is its success.
"""

import asyncio
import os
import signal
import sys

from bench.measured.runs import agent_for, script

from perdure import Engine

RUN = "cut"


async def run_into_the_kill(path: str, turns: int) -> None:
    """Never returns."""
    async with Engine.open(f"sqlite:{path}") as engine:
        dying = script(turns, lambda: os.kill(os.getpid(), signal.SIGKILL))
        await (await engine.start(agent_for(turns), "go", run_id=RUN, model=dying)).wait()


if __name__ == "__main__":
    asyncio.run(run_into_the_kill(sys.argv[1], int(sys.argv[2])))
    sys.exit("the run ended before it was killed")
