"""Limits, prices and the arithmetic of crossing them; pure, over recorded numbers.

Money is integer micro-units (a millionth of the currency), prices are integer micro-units per million tokens. Unknown
is None and stays unknown through arithmetic.
"""

from typing import Literal

import msgspec

from perdure.contracts.contract import Contract
from perdure.contracts.messages import Usage

LIMIT_NAMES = (
    "max_plan_steps",
    "max_step_attempts",
    "max_model_turns",
    "max_model_turns_per_step",
    "max_tool_calls",
    "max_tool_calls_per_step",
    "max_plan_revisions",
    "max_model_repairs",
    "max_finalization_turns",
    "max_wall_time_ms",
    "max_total_tokens",
    "max_cost_microunits",
)


LARGEST = 2**63 - 1
"""The largest number that is recorded: what JSON readers agree on. Sums stop there."""


class Limits(Contract, frozen=True):
    """What a run may use in all, over every drive and restart. None means no limit. Zero is refused at start."""

    max_plan_steps: int | None = None
    max_step_attempts: int | None = None
    max_model_turns: int | None = 50
    """Model calls, every attempt counted."""
    max_model_turns_per_step: int | None = 4
    max_tool_calls: int | None = 200
    """Tool calls, every attempt counted."""
    max_tool_calls_per_step: int | None = None
    max_plan_revisions: int | None = None
    max_model_repairs: int | None = 3
    """Replies that were empty, cut or unusable, and batches with a bad call."""
    max_finalization_turns: int | None = None
    max_wall_time_ms: int | None = None
    """Active time in milliseconds: what the drives used, waiting not counted."""
    max_total_tokens: int | None = None
    """Input and output tokens together; an indivisible reply may cross once."""
    max_cost_microunits: int | None = None
    deadline_seconds: int | None = None
    """Seconds after the recorded start, pauses included, past which nothing new is scheduled."""
    max_repeated_actions: int = 3
    """Identical calls with identical results before the run ends `no_progress` (1 to 4)."""
    hard_ceiling: bool = False
    require_cost_enforcement: bool = False
    """Refuse to start when a cost limit is set and no price is known."""


class Price(Contract, frozen=True):
    """What tokens cost, in integer micro-units per million tokens."""

    input: int
    output: int
    cached_input: int | None = None
    """None: cached input is charged as input."""
    currency: str = "USD"


class Policy(Contract, frozen=True):
    """What limits a run, resolved once at start, recorded in its head, and changed only by `budget_changed`."""

    limits: Limits
    strategy: Literal["react", "plan_react"] = "react"
    batch: Literal["lenient", "strict"] = "lenient"
    resume_mode: Literal["continue", "conservative"] = "continue"
    on_exhausted: Literal["park", "finish"] = "park"
    on_reject: Literal["continue", "end"] = "continue"
    price: Price | None = None


class Crossing(Contract, frozen=True):
    """A limit that would be crossed: its name, its total, what is used, and what the next act needs."""

    limit: str
    max: int
    used: int
    need: int = 1


def limit_problems(limits: Limits) -> list[str]:
    """Every rule the limits break, as sentences; empty when they are sound."""
    problems = []
    values = msgspec.structs.asdict(limits)
    for name in (*LIMIT_NAMES, "deadline_seconds"):
        value = values[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            problems.append(f"{name} is {value!r}; it must be a whole number of at least 1")
    if limits.max_repeated_actions not in range(1, 5):
        problems.append(f"max_repeated_actions is {limits.max_repeated_actions!r}; it must be 1 to 4")
    for step, whole in (
        ("max_model_turns_per_step", "max_model_turns"),
        ("max_tool_calls_per_step", "max_tool_calls"),
    ):
        inner, outer = values[step], values[whole]
        # The named default of four turns a step yields to a smaller global limit; a value the user wrote does not.
        if isinstance(inner, int) and isinstance(outer, int) and inner > outer and inner != _default(step):
            problems.append(f"{step} ({inner}) is above {whole} ({outer})")
    return problems


def _default(name: str) -> object:
    return msgspec.structs.asdict(Limits())[name]


def add_known(a: int | None, b: int | None) -> int | None:
    """The sum, unknown when either is unknown, at most what 64 bits hold."""
    return None if a is None or b is None else min(a + b, LARGEST)


def cost_of(usage: Usage, price: Price | None) -> int | None:
    """Micro-units for one model call, rounded up to a whole one and at most what 64 bits hold; None when price or usage
    is unknown. Never below zero.

    Cached input is part of the input, as OpenAI and Gemini count. A server that passes on Anthropic's counts has it
    beside the input; that is certain where more is cached than there is input, and then both are charged in full.
    """
    if price is None or usage.input_tokens is None or usage.output_tokens is None:
        return None
    cached = usage.cached_tokens or 0
    cached_price = price.input if price.cached_input is None else price.cached_input
    fresh = usage.input_tokens - cached if cached <= usage.input_tokens else usage.input_tokens
    exact = fresh * price.input + cached * cached_price + usage.output_tokens * price.output
    return min(-(-exact // 1_000_000), LARGEST)
