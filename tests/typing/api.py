"""The public API as a user's type checker sees it; checked by `mypy --strict`, never run."""

from datetime import timedelta
from typing import assert_type

from perdure import (
    Agent,
    AssistantTurn,
    CallContext,
    Engine,
    Limits,
    Observation,
    Outcome,
    Run,
    RunContext,
    Unknown,
    assemble,
    tool,
)


@tool(effect="read")
async def stock(item: str) -> int:
    """How many there are."""
    return len(item)


@tool
def order(item: str, call: CallContext) -> str | Unknown:
    """Orders one."""
    return f"{item} {call.idempotency_key}"


async def loop(ctx: RunContext, task: str) -> str:
    turn = await ctx.ask(assemble(ctx.agent, ctx.transcript.view()))
    assert_type(turn, AssistantTurn)
    assert_type(await ctx.use(turn.calls), tuple[Observation, ...])
    await ctx.sleep(timedelta(hours=1))
    assert_type(await ctx.patched("x"), bool)
    return task + turn.text


async def use() -> None:
    assert_type(await stock("apples"), int)
    agent = Agent(name="a", model="openai:x", tools=[stock, order], limits=Limits(max_model_turns=3), loop=loop)
    async with Engine.open("sqlite:x.db") as engine:
        assert_type(engine, Engine)
        run = await engine.start(agent, {"any": "json"}, labels={"a": "b"})
        assert_type(run, Run)
        assert_type(await run.wait(), Outcome)
        async for envelope in run.events():
            assert_type(envelope.seq, int)
