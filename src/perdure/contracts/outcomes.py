"""How a run stands when nobody drives it: its outcome or what it waits for, as data for users."""

from typing import Any

from perdure.contracts.contract import Contract, JsonValue


class Consumption(Contract, frozen=True):
    """What a run used over all its drives. None is unknown; it never means zero."""

    model_turns: int
    tool_calls: int
    input_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    reasoning_tokens: int | None
    cost_microunits: int | None
    currency: str | None
    active_ms: int
    estimated: bool


class ParkReport(Contract, frozen=True):
    """What a parked run waits for, and the command that settles it."""

    kind: str
    call: str | None
    since: str
    """RFC 3339."""
    detail: dict[str, Any]
    next: str


class EvidenceRef(Contract, frozen=True):
    """A recorded fact an answer cites."""

    call: str
    artifact: str | None = None


class Outcome(Contract, frozen=True):
    """How a run ended, or, for one that did not end, where it stands."""

    run_id: str
    status: str
    """`completed`, `failed`, `cancelled`, `abandoned`; or `parked`, `idle`."""
    outcome: str | None
    """`success`, `partial`, `blocked`, `rejected`, `cancelled`, `interrupted`, `exhausted`, `indeterminate`,
    `failed`."""
    terminal_reason: str | None
    assurance: str
    output: JsonValue
    answer: str | None
    """The end in words a person can read."""
    evidence: tuple[EvidenceRef, ...]
    usage: Consumption
    park: ParkReport | None
