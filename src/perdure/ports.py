"""What the runtime needs from outside, as small protocols. Each docstring is the contract that conformance tests
execute."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from perdure.calls import CallContext
from perdure.contracts.contract import JsonObject, JsonValue
from perdure.contracts.messages import StopReason, ToolDescriptor, Usage
from perdure.errors import PerdureError
from perdure.journal.envelope import Envelope
from perdure.prompting.request import ModelRequest


class Clock(Protocol):
    """Time, passed in."""

    def now_ns(self) -> int:
        """UTC wall time in nanoseconds since the epoch. May jump either way."""

    def steady_ns(self) -> int:
        """Time that never goes back, in nanoseconds from an arbitrary start."""

    async def sleep(self, seconds: float) -> None:
        """Waits on the steady clock."""


class Entropy(Protocol):
    """Random bytes, passed in."""

    def draw(self, count: int) -> bytes:
        """`count` unpredictable bytes."""


# What a model client reports while a reply streams. One assembler turns these into a turn.


class TextDelta(msgspec.Struct, frozen=True):
    """More text of the reply."""

    text: str


class CallDelta(msgspec.Struct, frozen=True):
    """A fragment of a call. Identity hints (`index`, `wire_id`) are as the provider sent them; either may be
    missing."""

    index: int | None = None
    wire_id: str | None = None
    name: str | None = None
    arguments: str = ""
    """Appended to the arguments text gathered so far."""


class CallDone(msgspec.Struct, frozen=True):
    """The provider's own closing object for a call; `arguments`, when given, is the whole text and wins over
    fragments."""

    index: int | None = None
    wire_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class OpaqueDelta(msgspec.Struct, frozen=True):
    """A provider's own part, whole."""

    provider: str
    data: JsonValue


class UsageReport(msgspec.Struct, frozen=True):
    """Token counts; the last report of a stream wins."""

    usage: Usage


class TurnDone(msgspec.Struct, frozen=True):
    """The provider's closing event. A strict client's stream without one is a fault, never an answer."""

    stop: StopReason
    model: str | None = None


class Degraded(msgspec.Struct, frozen=True):
    """The request was carried out in a weaker way than asked. Part of no turn: recorded beside it, also when the
    attempt fails."""

    code: str
    """A stable word: `model_fallback`, `tool_choice_auto`."""
    summary: str
    """What was done instead of what, for a person; no text of a provider's."""
    standing: bool = False
    """It holds for every request of the run alike, and is recorded once."""


ModelEvent = TextDelta | CallDelta | CallDone | OpaqueDelta | UsageReport | Degraded | TurnDone


class ModelClient(Protocol):
    """One model behind one provider's protocol."""

    @property
    def target(self) -> str:
        """`provider:name`, as recorded with each request."""

    @property
    def strict(self) -> bool:
        """Whether a stream must close with `TurnDone`."""

    def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """Asks once. Retries nothing.

        Raises:
            ModelError: the provider refused or could not be reached; `kind` and `retryable` say which.
            StreamFaultError: the stream broke.
        """

    async def close(self) -> None:
        """Gives back connections; safe to call twice."""


class InvalidArgumentsError(Exception):
    """Arguments that do not fit a tool's schema. `diagnostic` is what the model reads."""

    def __init__(self, diagnostic: str) -> None:
        self.diagnostic = diagnostic
        super().__init__(diagnostic)


BoundCall = Callable[[CallContext], Awaitable[object]]


class Tool(Protocol):
    """A function offered to a model."""

    @property
    def descriptor(self) -> ToolDescriptor:
        """What the model is told, and the effect."""

    @property
    def timeout_s(self) -> float | None:
        """Longest time for one attempt, in seconds."""

    @property
    def retries(self) -> int:
        """Live retries after a raised error (0 to 2), for reads and idempotent tools."""

    @property
    def checks_with_user_code(self) -> bool:
        """Whether `bind` may run code of the user's (a validator)."""

    def form(self, arguments: JsonObject) -> JsonObject:
        """The one form of all arguments with which the function would be called the same: a default that was spelled
        out, say, makes no difference. Never raises; arguments that do not fit come back as they are. Runs no validator
        of the user's, since calls are compared on replay, too."""

    def bind(self, arguments: JsonObject) -> BoundCall:
        """Checks the arguments; the returned function runs the tool once with them.

        Raises:
            InvalidArgumentsError: they do not fit.
        """


class IndexRow(msgspec.Struct, frozen=True):
    """What a list of runs shows without reading journals: a projection, rebuilt from the fold."""

    agent: str
    phase: str
    """`open`, `parked`, or how it ended: `completed`, `failed`, `cancelled`, `abandoned`."""
    terminal_reason: str | None
    park: str | None
    """The park's kind while parked."""
    wake_at: int | None
    """UTC nanoseconds, while it sleeps."""


class StoredRun(msgspec.Struct, frozen=True):
    """A run as stored."""

    run_id: str
    key: bytes
    """The run's random key for keyed digests: 32 bytes."""
    envelopes: tuple[Envelope, ...]
    torn: int = 0
    """Unterminated last records that were skipped (0 or 1)."""


class RunSummary(msgspec.Struct, frozen=True):
    """One line of a list of runs."""

    run_id: str
    index: IndexRow
    events: int
    started_at: int
    updated_at: int
    held: bool
    """Whether a living driver holds it."""
    epoch: int


class Lease(msgspec.Struct, frozen=True):
    """The right to append to a run, until another takes it."""

    run_id: str
    epoch: int
    previous_alive: bool = False
    """Whether the driver before may still be alive (it stood still for the lease time, but its lock is held)."""


class Store(Protocol):
    """Journals, leases and artifacts. Every append is durable once its future is done, or not there at all."""

    @property
    def identity(self) -> str:
        """The same for every store of this process over the same data, and for no other."""

    async def create(self, run_id: str, key: bytes, envelopes: Sequence[Envelope], index: IndexRow) -> Lease:
        """Stores a new run with its first events and holds it, in one commit.

        Raises:
            UsageError: the run id is taken.
            StoreError: the store failed.
        """

    async def acquire(self, run_id: str) -> Lease:
        """Takes the run for this driver, under a new epoch. At once when nobody holds it or the holder is dead.

        Raises:
            UnknownError: no such run.
            LeaseHeldError: a living driver holds it.
        """

    async def release(self, lease: Lease) -> None:
        """Gives the run back; safe when it was lost already."""

    def append(self, lease: Lease, envelopes: Sequence[Envelope], index: IndexRow | None) -> "asyncio.Future[None]":
        """Queues the events (and the changed index row) as one atomic piece; the future is done when they are durable.

        Fails with:
            LeaseLostError: the epoch is stale; nothing of the piece was written.
            StoreError: the store failed; every drive of this process ends.
        """

    async def confirm(self, lease: Lease) -> None:
        """Called directly before a dispatch: returns at once while the lease is fresh (under three quarters of the
        lease time since its last renewal), else renews it first.

        Raises:
            LeaseLostError: it is gone.
        """

    async def read(self, run_id: str, from_seq: int = 0, most: int | None = None) -> StoredRun | None:
        """The run's events from a seq on, at most so many, by ascending seq, as stored and unproven; None for an
        unknown run."""

    async def runs(
        self, run_id: str | None = None, *, problems: dict[str, PerdureError] | None = None
    ) -> list[RunSummary]:
        """Every run, by the time it started; with a run id that one alone, or none.

        Raises:
            MalformedJournalError: the line of a run is damaged. With `problems` it is put there instead, by run id,
                and the sound runs are listed all the same.
        """

    async def put_artifact(self, run_id: str, data: bytes) -> str:
        """Stores bytes once per run under their content digest, durable on return; returns the digest."""

    async def get_artifact(self, run_id: str, digest: str) -> bytes | None:
        """The bytes, checked against the digest; None when there are none.

        Raises:
            MalformedJournalError: the stored bytes do not match.
        """

    async def close(self) -> None:
        """Gives up every lease and ends the writer; safe to call twice."""
