"""The runs that are cut everywhere: a world outside, tools over it, and two loops: ReAct, and one written here with the
public API only."""

import asyncio
import copy
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import BaseModel

from perdure import (
    Agent,
    CallContext,
    CallFailedError,
    Limits,
    ModelRequest,
    ObservationStatus,
    RunContext,
    Sleep,
    Suspend,
    ToolCall,
    ToolFailed,
    Unknown,
    assemble,
    tool,
)
from perdure.testing.clocks import DAWN_NS
from perdure.testing.scripted import Reply, calls, text

DAWN = datetime.fromtimestamp(DAWN_NS / 10**9, UTC)
ANSWERS = {"10.0": {"allowed": True}, "8.4": "north", "4.1": {"allowed": True}}
"""What a person says, by call."""


class Report(BaseModel):
    """How the errand ended."""

    done: bool
    note: str


class Town:
    """A world: what the tools read and change. Its ledger is what really happened."""

    def __init__(self) -> None:
        self.ledger: list[tuple[str, Any]] = []
        self.keys: dict[str, Any] = {}
        self.tries: Counter[str] = Counter()

    def snapshot(self) -> Any:
        return copy.deepcopy((self.ledger, self.keys, self.tries))

    def restore(self, snapshot: Any) -> None:
        self.ledger, self.keys, self.tries = copy.deepcopy(snapshot)

    def effects(self) -> Sequence[Any]:
        return tuple(self.ledger)

    def once(self, key: str, effect: tuple[str, Any]) -> Any:
        """Does something once per key, as a service that honours keys does; a repeat gets the first receipt."""
        if key not in self.keys:
            self.ledger.append(effect)
            self.keys[key] = f"receipt {len(self.ledger)}"
        return self.keys[key]


def tools_over(town: Town) -> list[Any]:
    """Every kind of tool."""

    @tool(effect="read")
    async def look(place: str) -> dict[str, Any]:
        """Looks at a place."""
        return {"place": place, "open": len(place) % 2 == 0}

    @tool(effect="read", parallel=True)
    async def weigh(thing: str) -> int:
        """Weighs a thing; the longer its name the sooner."""
        for _ in range(max(0, 6 - len(thing))):
            await asyncio.sleep(0)
        return len(thing)

    @tool(effect="read")
    def signpost(name: str) -> str:
        """Reads a signpost, in a thread; it has nothing on it."""
        return ""

    @tool(effect="read")
    async def knock(door: str) -> str:
        """Knocks where nobody opens."""
        raise ToolFailed("nobody opens")

    @tool(effect="read", retries=1)
    async def ring(door: str) -> str:
        """Rings a bell that has to be rung twice."""
        town.tries[door] += 1
        if town.tries[door] == 1:
            raise RuntimeError("the bell is stuck")
        return "somebody comes"

    @tool(effect="idempotent")
    async def order(thing: str, call: CallContext) -> str:
        """Orders a thing."""
        assert call.idempotency_key is not None
        receipt: str = town.once(call.idempotency_key, ("order", thing))
        return receipt

    @tool(effect="idempotent")
    async def send(letter: str, call: CallContext) -> Unknown:
        """Sends a letter; whether it arrives is not known."""
        assert call.idempotency_key is not None
        town.once(call.idempotency_key, ("send", letter))
        return Unknown("the messenger has not come back")

    @tool(effect="idempotent")
    async def permission(to: str, call: CallContext) -> Suspend:
        """Asks a person."""
        assert call.idempotency_key is not None
        town.once(call.idempotency_key, ("asked", to))
        schema = {"type": "object", "properties": {"allowed": {"type": "boolean"}}, "required": ["allowed"]}
        return Suspend(f"may we {to}?", schema, kind="webhook")

    @tool(effect="read")
    async def rest(hours: int) -> Sleep:
        """Rests until some hours after dawn."""
        return Sleep(DAWN + timedelta(hours=hours))

    @tool
    async def paint(wall: str) -> str:
        """Paints a wall: a plain write, since nothing is declared."""
        town.ledger.append(("paint", wall))
        return f"{wall} is painted"

    @tool(effect="write")
    def carve(word: str) -> dict[str, int]:
        """Carves a word, in a thread."""
        town.ledger.append(("carve", word))
        return {"letters": len(word)}

    @tool(effect="write")
    async def trip(over: str) -> str:
        """Fails, and leaves a trace."""
        town.ledger.append(("trip", over))
        raise ToolFailed(f"fell over {over}")

    return [look, weigh, signpost, knock, ring, order, send, permission, rest, paint, carve, trip]


# ReAct

SCRIPT: tuple[Reply, ...] = (
    calls(("weigh", {"thing": "ox"}), ("weigh", {"thing": "wagon"}), ("weigh", {"thing": "hen"}), text="First."),
    calls(("paint", {"wall": "north"})),
    calls(
        ("look", {"place": "yard"}),
        ("order", {"thing": "rope"}),
        ("weigh", {"thing": "rope"}),
        ("weigh", {"thing": "cart"}),
        ("paint", {"wall": "south"}),
        ("carve", {"word": "oak"}),
    ),
    calls(("knock", {"door": "mill"})),
    calls(("knock", {"door": "barn"})),
    calls(("knock", {"door": "inn"}), ("signpost", {"name": "east"})),
    calls(("fly", {"to": "moon"}), ("look", {"place": "well"}), ("paint", {"wall": "west"})),
    calls(("order", '{"thing": "nai'), ("order", {"thing": 7}), ("order", {"thing": "nails"})),
    text(""),
    calls(("permission", {"to": "dig"})),
    calls(("trip", {"over": "root"})),
    calls(("send", {"letter": "news"})),
    calls(("send", {"letter": "news"})),
    calls(("look", {"place": "road"}), ("send", {"letter": "news"})),
    calls(("rest", {"hours": 9})),
    calls(("ring", {"door": "hall"})),
    calls(("answer", {"done": True, "note": "early"}), ("look", {"place": "door"})),
    text("I am done."),
    calls(("answer", {"done": "yes"})),
    calls(("answer", {"done": "yes"})),
    calls(("answer", {"done": True, "note": "all painted"})),
)


def react_agent(town: Town) -> Agent:
    return Agent(
        name="errand",
        instructions="Do the errand.",
        tools=tools_over(town),
        output=Report,
        limits=Limits(max_model_repairs=9),
    )


# A loop of our own: the public API only


async def errand(ctx: RunContext, task: str) -> dict[str, Any]:
    """Does an errand in its own way, with every method a context has."""
    began = await ctx.now()
    notice = None
    seen: list[str] = [task, began.isoformat()]
    while True:
        await ctx.check_limits()
        instructions = f"{ctx.agent.instructions} {await _luck(ctx)}"
        request = assemble(ctx.agent, ctx.transcript.view(), notice)
        turn = await ctx.ask(ModelRequest(instructions, request.tools, request.transcript, request.settings))
        seen.append(turn.text)
        if not turn.calls:
            return {"done": True, "note": " / ".join(seen)}
        # The first call alone, then the rest as one batch, then one that no model asked for.
        observed = await ctx.use(turn.calls[:1])
        observed += await ctx.use(turn.calls[1:])
        observed += await ctx.use([ToolCall("look", {"place": f"turn {ctx.transcript.turns}"})])
        seen.extend(one.text for one in observed if one.status is not ObservationStatus.COMPLETED)
        await _between(ctx, seen)


async def _luck(ctx: RunContext) -> str:
    return f"Lucky number: {await ctx.entropy() % 100}."


async def _between(ctx: RunContext, seen: list[str]) -> None:
    turn = ctx.transcript.turns
    if turn == 1:
        seen.append(str(await ctx.do("count", _count, "abc")))
        await ctx.sleep(timedelta(minutes=20))
        seen.append((await ctx.now()).isoformat())
    if turn == 2:
        seen.append(str(await ctx.patched("new-way")))
        seen.append(str(await ctx.patched("new-way")))
        await ctx.sleep_until(DAWN + timedelta(hours=2))
    if turn == 3:
        try:
            await ctx.do("break", _break)
        except CallFailedError as error:
            seen.append(str(error))
    if turn == 8:
        seen.append(str(await ctx.wait("Which way?", schema={"enum": ["north", "south"]})))


def _count(word: str) -> int:
    return len(word)


async def _break() -> None:
    raise ValueError("it broke")


OWN_SCRIPT: tuple[Reply, ...] = (
    calls(("look", {"place": "gate"})),
    calls(("weigh", {"thing": "ox"}), ("weigh", {"thing": "wagon"}), ("weigh", {"thing": "hen"})),
    calls(("paint", {"wall": "north"}), ("order", {"thing": "rope"})),
    calls(("look", {"place": "yard"}), ("permission", {"to": "dig"}), ("carve", {"word": "oak"})),
    calls(("knock", {"door": "mill"})),
    calls(("knock", {"door": "barn"}), ("fly", {"to": "moon"})),
    calls(("trip", {"over": "root"}), ("rest", {"hours": 9}), ("ring", {"door": "hall"})),
    calls(("order", {"thing": 7}), ("carve", {"word": "elm"}), ("send", {"letter": "news"})),
    text("Done."),
)


def own_agent(town: Town) -> Agent:
    return Agent(name="errand", instructions="Do the errand.", tools=tools_over(town), loop=errand)


LOOPS: dict[str, tuple[Callable[[Town], Agent], tuple[Reply, ...]]] = {
    "react": (react_agent, SCRIPT),
    "own loop": (own_agent, OWN_SCRIPT),
}
