"""W3: the replay of a cut run, from `resume` to its first new model request.

Usage: python -m bench.measured.w3 FILE TURNS; prints JSON. The file is one that w3_cut made; the run in it is ended.
"""

import asyncio
import sys
from pathlib import Path

from bench.measured.runs import agent_for, drive, script
from bench.measured.w3_cut import RUN
from bench.measured.work import WARM_UP_TURNS, Spent, peak_bytes, tell

from perdure import Engine


async def measure(path: Path, turns: int) -> dict[str, float]:
    """What it costs to come back to where the run was."""
    spent, figures = Spent(), {}

    def arrived() -> None:
        spent.__exit__()
        figures.update(peak_bytes=peak_bytes(), **spent.figures())

    model = script(turns, arrived)
    async with Engine.open(f"sqlite:{path}") as engine:
        await drive(engine, WARM_UP_TURNS)
        spent.__enter__()
        outcome = await (await engine.resume(RUN, agent_for(turns), model=model)).wait()
    if outcome.status != "completed" or outcome.usage.tool_calls != turns or len(model.requests) != 1:
        sys.exit(f"the resumed run asked {len(model.requests)} times and ended so: {outcome}")
    return {"turns": turns, **figures}


if __name__ == "__main__":
    tell(**asyncio.run(measure(Path(sys.argv[1]), int(sys.argv[2]))))
