"""W1: one run. Usage: python -m bench.measured.w1 FILE TURNS; prints JSON."""

import asyncio
import sys
from pathlib import Path

from bench.measured.runs import Commits, drive, stored_bytes
from bench.measured.work import WARM_UP_TURNS, Spent, peak_bytes, tell

from perdure import Engine


async def measure(path: Path, turns: int) -> dict[str, float]:
    """What one run of that many turns cost."""
    commits = Commits()
    async with Engine.open(f"sqlite:{path}") as engine:
        await drive(engine, WARM_UP_TURNS)
        before = commits.count
        with Spent() as spent:
            await drive(engine, turns)
        committed = commits.count - before
    return {"turns": turns, "commits": committed, "peak_bytes": peak_bytes(), **spent.figures()}


if __name__ == "__main__":
    file, turns = Path(sys.argv[1]), int(sys.argv[2])
    tell(**asyncio.run(measure(file, turns)), store_bytes=stored_bytes(file))
