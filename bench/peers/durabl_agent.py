"""The turn of W1 on durabl. Usage: python -m bench.peers.durabl_agent FILE TURNS SETTING [RUNS]; prints JSON.

SETTING is SQLite's `synchronous`: NORMAL, durabl's default, or FULL. The model's reply and the tool's result are steps;
the message history stays in the workflow, since a step's parameters are stored.

Runs at once: durabl is synchronous, so threads of a number, each with a runtime of its own over the one file.
"""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.measured.work import WARM_UP_TURNS, Spent, peak_bytes, said, seen, tell
from durabl import ModelCall, Runtime, ToolCall, workflow
from durabl.tools import Tool, ToolMode

THREADS = 8


def reply(_prompt: str, **params: Any) -> dict[str, Any]:
    number = params["number"]
    called = [{"name": "lookup", "args": {"k": number}}] if number < params["turns"] else []
    return {"text": said(number), "calls": called}


@workflow
def agent(ctx: Any) -> Iterator[Any]:
    turns, number = ctx.input["turns"], 0
    while True:
        turn = yield ModelCall("next", params={"number": number, "turns": turns})
        if not turn["calls"]:
            return turn["text"]
        for call in turn["calls"]:
            yield ToolCall(call["name"], call["args"])
        number += 1


def look_up(k: int) -> str:
    return seen(k)


def runtime(path: Path, setting: str) -> Runtime:
    # The kindest mode: the default one stops a run that was killed inside a tool.
    tools = {"lookup": Tool("lookup", look_up, mode=ToolMode.IDEMPOTENT)}
    return Runtime(db=str(path), llm=reply, tools=tools, workflows=[agent], synchronous=setting)


def drive(runtime: Runtime, turns: int) -> None:
    """One run from its start to its end."""
    ended = runtime.run(agent, {"turns": turns})
    if ended.result != said(turns):
        sys.exit(f"the run of {turns} turns ended otherwise than it should: {ended}")


def many(path: Path, turns: int, setting: str, runs: int) -> None:
    """The runs, shared out over threads."""

    def some(share: int) -> None:
        with runtime(path, setting) as own:
            for _ in range(share):
                drive(own, turns)

    shares = [runs // THREADS + (thread < runs % THREADS) for thread in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(some, shares))


def main(path: Path, turns: int, setting: str, runs: int | None) -> None:
    with runtime(path, setting) as warm:
        drive(warm, WARM_UP_TURNS)
        with Spent() as spent:
            if runs is None:
                drive(warm, turns)
            else:
                many(path, turns, setting, runs)
    stored = sum(file.stat().st_size for file in path.parent.iterdir())
    done = runs or 1
    tell(runs=done, turns=done * turns, peak_bytes=peak_bytes(), store_bytes=stored, **spent.figures())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]) if len(sys.argv) > 4 else None)
