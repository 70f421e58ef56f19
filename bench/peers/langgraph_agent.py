"""The turn of W1 on LangGraph with its SQLite checkpointer.

Usage: python -m bench.peers.langgraph_agent FILE TURNS SETTING [RUNS]; prints JSON.

SETTING is LangGraph's `durability`, `sync` or `async` (its default), for a graph of two nodes over the message list;
with `-tasks` after it, for the functional API with a task a call. One run uses the blocking saver; runs at once use the
asynchronous one over one file.
"""

import asyncio
import sqlite3
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")  # its own deprecations say nothing here

from bench.measured.work import WARM_UP_TURNS, Spent, peak_bytes, said, seen, tell  # noqa: E402
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage  # noqa: E402
from langgraph.checkpoint.sqlite import SqliteSaver  # noqa: E402
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver  # noqa: E402
from langgraph.func import entrypoint, task  # noqa: E402
from langgraph.graph import END, START, MessagesState, StateGraph  # noqa: E402

NO_LIMIT = 1_000_000
Build = Callable[[Any, int], Any]


def reply(number: int, turns: int) -> AIMessage:
    called = [{"id": f"call_{number}", "name": "lookup", "args": {"k": number}}] if number < turns else []
    return AIMessage(said(number), tool_calls=called)


def observed(call: dict[str, Any]) -> ToolMessage:
    return ToolMessage(seen(call["args"]["k"]), tool_call_id=call["id"])


def graph(saver: Any, turns: int) -> Any:
    """Two nodes that take turns; the state is the message list."""

    def model(state: MessagesState) -> dict[str, Any]:
        return {"messages": [reply((len(state["messages"]) - 1) // 2, turns)]}

    def tools(state: MessagesState) -> dict[str, Any]:
        return {"messages": [observed(call) for call in state["messages"][-1].tool_calls]}

    built = StateGraph(MessagesState)
    built.add_node("model", model)
    built.add_node("tools", tools)
    built.add_edge(START, "model")
    built.add_conditional_edges("model", lambda state: "tools" if state["messages"][-1].tool_calls else END)
    built.add_edge("tools", "model")
    return built.compile(checkpointer=saver)


def blocking_tasks(saver: Any, turns: int) -> Any:
    """A loop in a function, a task a call."""
    ask, use = task(reply), task(observed)

    @entrypoint(checkpointer=saver)
    def loop(state: dict[str, Any]) -> dict[str, Any]:
        messages = list(state["messages"])
        while True:
            turn = ask((len(messages) - 1) // 2, turns).result()
            messages.append(turn)
            if not turn.tool_calls:
                return {"messages": messages[-1:]}
            messages += [use(call).result() for call in turn.tool_calls]

    return loop


def asynchronous_tasks(saver: Any, turns: int) -> Any:
    """The same, awaited."""

    @task
    async def ask(number: int) -> AIMessage:
        return reply(number, turns)

    @task
    async def use(call: dict[str, Any]) -> ToolMessage:
        return observed(call)

    @entrypoint(checkpointer=saver)
    async def loop(state: dict[str, Any]) -> dict[str, Any]:
        messages = list(state["messages"])
        while True:
            turn = await ask((len(messages) - 1) // 2)
            messages.append(turn)
            if not turn.tool_calls:
                return {"messages": messages[-1:]}
            messages += [await use(call) for call in turn.tool_calls]

    return loop


def settings(name: str, durability: str) -> dict[str, Any]:
    config = {"configurable": {"thread_id": name}, "recursion_limit": NO_LIMIT}
    return {"input": {"messages": [HumanMessage("go")]}, "config": config, "durability": durability}


def must_have_ended(result: dict[str, Any], turns: int) -> None:
    if result["messages"][-1].content != said(turns):
        sys.exit(f"the run of {turns} turns ended otherwise than it should: {result['messages'][-1]}")


def one(path: Path, turns: int, build: Build, durability: str) -> Spent:
    """One run, after the short one."""
    saver = SqliteSaver(sqlite3.connect(path, check_same_thread=False))
    build(saver, WARM_UP_TURNS).invoke(**settings("warm", durability))
    with Spent() as spent:
        must_have_ended(build(saver, turns).invoke(**settings("run", durability)), turns)
    saver.conn.close()
    return spent


async def many(path: Path, turns: int, build: Build, durability: str, runs: int) -> Spent:
    """The runs at once, after the short one."""
    async with AsyncSqliteSaver.from_conn_string(str(path)) as saver:
        await build(saver, WARM_UP_TURNS).ainvoke(**settings("warm", durability))
        agent = build(saver, turns)
        with Spent() as spent:
            results = await asyncio.gather(*(agent.ainvoke(**settings(f"run {i}", durability)) for i in range(runs)))
        for result in results:
            must_have_ended(result, turns)
    return spent


def main(path: Path, turns: int, setting: str, runs: int | None) -> None:
    durability, _, tasks = setting.partition("-")
    if runs is None:
        spent = one(path, turns, blocking_tasks if tasks else graph, durability)
    else:
        spent = asyncio.run(many(path, turns, asynchronous_tasks if tasks else graph, durability, runs))
    stored = sum(file.stat().st_size for file in path.parent.iterdir())
    done = runs or 1
    tell(runs=done, turns=done * turns, peak_bytes=peak_bytes(), store_bytes=stored, **spent.figures())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]) if len(sys.argv) > 4 else None)
