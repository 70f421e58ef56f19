"""Start-up: whole processes, timed from outside, in turn, so that a machine that is busy for a while is so for all."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.disk import MeasurementError
from bench.targets import Target

INTERPRETER, PYDANTIC = "the bare interpreter", "from pydantic import BaseModel"
IMPORT, HELP = "from perdure import Agent, Engine, tool", "perdure --help"
MOST_OF_IMPORT, MOST_OF_HELP = 2.5, 3.0


def commands() -> dict[str, list[str]]:
    """What is started, by what it is called."""
    script = Path(sys.executable).parent / "perdure"
    perdure = [str(script)] if script.exists() else [sys.executable, "-m", "perdure"]
    return {
        INTERPRETER: [sys.executable, "-c", "pass"],
        PYDANTIC: [sys.executable, "-c", PYDANTIC],
        IMPORT: [sys.executable, "-c", IMPORT],
        HELP: [*perdure, "--help"],
    }


def measure(rounds: int) -> dict[str, Any]:
    """Each command once in each round, after a round that does not count: it may still compile."""
    with tempfile.TemporaryDirectory() as folder:
        timed = [{name: seconds_of(command, folder) for name, command in commands().items()} for _ in range(rounds + 1)]
    return summary(timed[1:])


def seconds_of(command: Sequence[str], folder: str) -> float:
    """How long a process takes from its start to its end.

    Raises:
        MeasurementError: it failed.
    """
    began = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=folder, check=False)
    seconds = time.perf_counter() - began
    if done.returncode != 0:
        raise MeasurementError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.decode()[-2000:]}")
    return seconds


def summary(rounds: Sequence[dict[str, float]]) -> dict[str, Any]:
    """A row a command: medians of the times, and of the ratios within a round."""
    rows = [
        {
            "command": name,
            "ms": median(timed[name] for timed in rounds) * 1e3,
            "times_pydantic": median(timed[name] / timed[PYDANTIC] for timed in rounds),
        }
        for name in rounds[0]
    ]
    return {"rounds": len(rounds), "commands": rows}


def targets(found: dict[str, Any]) -> list[Target]:
    """What start-up must reach."""
    times = {row["command"]: row["times_pydantic"] for row in found["commands"]}
    note = f"whole processes, median of {found['rounds']}"
    return [
        Target("start-up, import", times[IMPORT], MOST_OF_IMPORT, "x pydantic", f"{IMPORT}; {note}"),
        Target("start-up, --help", times[HELP], MOST_OF_HELP, "x pydantic", note),
    ]


def table(found: dict[str, Any]) -> list[str]:
    """The section for people."""
    return ["Start-up  whole processes", f"{'ms':>8} {'x pydantic':>11}"] + [
        f"{row['ms']:>8.0f} {row['times_pydantic']:>11.2f}  {row['command']}" for row in found["commands"]
    ]
