"""W2: many runs at once, one engine, one store. Usage: python -m bench.measured.w2 FILE RUNS TURNS; prints JSON.

With RUNS 0 it does everything but the runs: what is left when its syncs are taken off is theirs.
"""

import asyncio
import sys
from pathlib import Path

from bench.measured.runs import Commits, drive, stored_bytes
from bench.measured.work import WARM_UP_TURNS, Spent, peak_bytes, tell

from perdure import Engine


async def measure(path: Path, runs: int, turns: int) -> dict[str, float]:
    """What that many runs of that many turns cost together."""
    commits = Commits()
    async with Engine.open(f"sqlite:{path}") as engine:
        await drive(engine, WARM_UP_TURNS)
        before = commits.count
        with Spent() as spent:
            await asyncio.gather(*(drive(engine, turns) for _ in range(runs)))
        committed = commits.count - before
    figures = {"runs": runs, "turns": runs * turns, "commits": committed, "peak_bytes": peak_bytes()}
    return {**figures, **spent.figures()}


if __name__ == "__main__":
    file = Path(sys.argv[1])
    tell(**asyncio.run(measure(file, int(sys.argv[2]), int(sys.argv[3]))), store_bytes=stored_bytes(file))
