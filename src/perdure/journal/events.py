"""Every kind of event, as a typed payload. A feature adds a kind here and a case in the fold, never a second truth.

The kind stands in the envelope and not in the payload. Reading ignores fields it does not know (a later release of
the same schema version may add some with a default); a kind it does not know is refused.
"""

from typing import ClassVar, Literal

import msgspec

from perdure.contracts.agents import AgentSpec
from perdure.contracts.contract import Fact, JsonObject, JsonValue, canonical
from perdure.contracts.messages import AssistantTurn, Effect, Usage
from perdure.contracts.notices import Notice
from perdure.errors import ConfigurationError, MalformedJournalError
from perdure.journal.envelope import Envelope, payload_of


class Event(Fact, frozen=True):
    """One payload. `identity` names the fields a replayed request must equal, beside the call."""

    event_kind: ClassVar[str]
    identity: ClassVar[tuple[str, ...]] = ()


# Head and end


class RunStarted(Event, frozen=True):
    """The head: everything the run pins."""

    event_kind: ClassVar[str] = "run_started"
    agent: AgentSpec
    input: JsonValue
    model: str
    """The model bound at the start: `provider:name` or `module:attribute`."""
    version: str
    """The release that started the run."""
    agent_ref: str | None = None
    """Where the command line finds the agent again: a file or `module:attribute`."""
    labels: dict[str, str] = {}


class DriveStarted(Event, frozen=True):
    """A process began to drive the run; recorded with the first thing the drive records."""

    event_kind: ClassVar[str] = "drive_started"
    epoch: int
    version: str
    cause: Literal["start", "resume", "recover"]


class RunCompleted(Event, frozen=True):
    """The run ended in success; its output is the last proposal's."""

    event_kind: ClassVar[str] = "run_completed"
    terminal_reason: str
    assurance: Literal["verified", "unverified"]
    answer: str


class RunFailed(Event, frozen=True):
    """The run ended in anything but success, a cancel or an abandonment."""

    event_kind: ClassVar[str] = "run_failed"
    outcome: str
    terminal_reason: str
    answer: str
    """What happened, for a person."""


class RunCancelled(Event, frozen=True):
    """A person ended the run."""

    event_kind: ClassVar[str] = "run_cancelled"
    answer: str
    unresolved: tuple[str, ...] = ()
    """Calls whose effect may have happened at that moment, those with a key included."""


class RunAbandoned(Event, frozen=True):
    """An operator gave the run up; it claims no answer."""

    event_kind: ClassVar[str] = "run_abandoned"
    answer: str
    unresolved: tuple[str, ...] = ()
    by: str | None = None


# Observed


class NowObserved(Event, frozen=True):
    """The wall clock, read once for the loop."""

    event_kind: ClassVar[str] = "now_observed"
    call: str
    now_ns: int


class EntropyObserved(Event, frozen=True):
    """64 random bits, drawn once for the loop."""

    event_kind: ClassVar[str] = "entropy_observed"
    call: str
    value: int
    """As a signed 64-bit integer, the widest JSON readers agree on."""


class PatchObserved(Event, frozen=True):
    """The run took the changed path of the loop's code named so."""

    event_kind: ClassVar[str] = "patch_observed"
    identity: ClassVar[tuple[str, ...]] = ("name",)
    call: str
    name: str


# Model


class ModelCallRequested(Event, frozen=True):
    """A model call is about to be made. `parts` holds digests of those parts that changed since the request before."""

    event_kind: ClassVar[str] = "model_call_requested"
    call: str
    target: str
    transcript: str
    parts: dict[str, str] = {}
    notice: Notice | None = None


class ModelCallCompleted(Event, frozen=True):
    """The whole turn."""

    event_kind: ClassVar[str] = "model_call_completed"
    call: str
    turn: AssistantTurn
    cost: int | None = None
    """Micro-units; None when price or usage is unknown."""


class ModelCallFailed(Event, frozen=True):
    """The call failed for good, after every attempt."""

    event_kind: ClassVar[str] = "model_call_failed"
    call: str
    reason: str
    message: str
    retryable: bool = False
    usage: Usage | None = None


class ModelUsageReported(Event, frozen=True):
    """Tokens of an attempt that failed and is tried again; what a whole call used stands in its completion."""

    event_kind: ClassVar[str] = "model_usage_reported"
    call: str
    usage: Usage


class ModelBound(Event, frozen=True):
    """From here on another model is asked."""

    event_kind: ClassVar[str] = "model_bound"
    model: str


# Tools


class BatchAccepted(Event, frozen=True):
    """A batch was checked whole; limits and order are reserved for the calls that will run."""

    event_kind: ClassVar[str] = "batch_accepted"
    calls: tuple[str, ...]
    """Those that will run."""
    repair: bool = False
    """The batch held a bad call; one repair is spent."""

    @property
    def call(self) -> str:
        """The turn the batch belongs to, for messages."""
        return self.calls[0] if self.calls else "batch"


class ToolCallRequested(Event, frozen=True):
    """The intent: durable before the call is dispatched."""

    event_kind: ClassVar[str] = "tool_call_requested"
    identity: ClassVar[tuple[str, ...]] = ("tool", "arguments", "effect", "key")
    call: str
    tool: str
    arguments: JsonObject
    effect: Effect
    key: str | None = None


class AttemptStarted(Event, frozen=True):
    """A further attempt at a call, charged like the first."""

    event_kind: ClassVar[str] = "attempt_started"
    call: str
    n: int
    """2 for the second attempt."""
    cause: Literal["recovery", "retry"]
    error: str | None = None
    """What ended the attempt before, for a retry; bounded."""


class WaitRequest(Fact, frozen=True):
    """What a tool's result asked to wait for."""

    reason: str
    kind: str
    schema: JsonObject


class ToolCallCompleted(Event, frozen=True):
    """The call's value. `observation` is what the model reads when that is not the plain rendering of the value."""

    event_kind: ClassVar[str] = "tool_call_completed"
    call: str
    output: JsonValue = None
    observation: str | None = None
    artifact: str | None = None
    """Content digest of the value when it is stored apart."""
    suspend: WaitRequest | None = None
    sleep_until: int | None = None
    """UTC nanoseconds: the tool asked to go on then."""


class ToolCallFailed(Event, frozen=True):
    """The call ended without a value. `reason` is one of `handler`, `timeout`, `output_form`, `unknown`,
    and, for one closed in flight, `interrupted` or `indeterminate` (its effect may have happened)."""

    event_kind: ClassVar[str] = "tool_call_failed"
    call: str
    reason: str
    message: str
    observation: str
    artifact: str | None = None
    """Content digest of the full message when it is stored apart."""


class ToolCallRefused(Event, frozen=True):
    """The call was never dispatched; `observation` is what the model reads."""

    event_kind: ClassVar[str] = "tool_call_refused"
    identity: ClassVar[tuple[str, ...]] = ("tool",)
    call: str
    tool: str
    reason: str
    observation: str
    message: str | None = None
    """The diagnostic, when the observation is a counted line in its place."""
    about: str | None = None
    """The earlier call whose late result this observation tells."""


class LateResultObserved(Event, frozen=True):
    """An attempt that was left behind at its time limit ended all the same. What the model read of its call stays as it
    is."""

    event_kind: ClassVar[str] = "late_result_observed"
    call: str
    attempt: int
    output: JsonValue = None
    """What it returned, cut to its head and tail when it was large."""
    reason: str | None = None
    """Why there is no value: one of the reasons of `ToolCallFailed`; None when it returned one."""
    message: str | None = None


class EffectResolved(Event, frozen=True):
    """A person settled a call in doubt."""

    event_kind: ClassVar[str] = "effect_resolved"
    call: str
    verdict: Literal["happened", "did_not_happen", "failed"]
    result: JsonValue = None
    text: str | None = None
    by: str | None = None


# Waiting


class Suspended(Event, frozen=True):
    """The run waits for an answer from outside."""

    event_kind: ClassVar[str] = "suspended"
    identity: ClassVar[tuple[str, ...]] = ("kind", "schema")
    call: str
    reason: str
    kind: str
    schema: JsonObject


class Resumed(Event, frozen=True):
    """The answer, checked against the recorded schema before it was recorded."""

    event_kind: ClassVar[str] = "resumed"
    call: str
    value: JsonValue = None
    by: str | None = None
    key: str | None = None
    """The giver's idempotency key."""
    observation: str | None = None
    """What the model reads of a tool's answer when that is not the plain rendering of the value."""


class SleepStarted(Event, frozen=True):
    """The run waits for an instant (UTC nanoseconds)."""

    event_kind: ClassVar[str] = "sleep_started"
    identity: ClassVar[tuple[str, ...]] = ("wake_at",)
    call: str
    wake_at: int
    asked_at: int


class Woken(Event, frozen=True):
    """The instant came, once."""

    event_kind: ClassVar[str] = "woken"
    call: str


class BudgetExceeded(Event, frozen=True):
    """A limit would have been crossed; what it held back has not happened."""

    event_kind: ClassVar[str] = "budget_exceeded"
    call: str
    limit: str
    max: int
    used: int
    need: int


class BudgetChanged(Event, frozen=True):
    """New totals for limits."""

    event_kind: ClassVar[str] = "budget_changed"
    limits: dict[str, int]
    by: str | None = None


class CancelRequested(Event, frozen=True):
    """A person asked for the run to end."""

    event_kind: ClassVar[str] = "cancel_requested"
    reason: str | None = None
    by: str | None = None


class ExecutionDegraded(Event, frozen=True):
    """Something the run was asked to do is done in a weaker way; never silently."""

    event_kind: ClassVar[str] = "execution_degraded"
    code: str
    summary: str


class ProposalReceived(Event, frozen=True):
    """The loop's last word, before anything is said of it."""

    event_kind: ClassVar[str] = "proposal_received"
    identity: ClassVar[tuple[str, ...]] = ("output",)
    output: JsonValue = None

    @property
    def call(self) -> str:
        """For messages: a proposal belongs to the run, not to a call."""
        return "end"


KINDS: dict[str, type[Event]] = {
    kind.event_kind: kind
    for kind in (
        RunStarted, DriveStarted, RunCompleted, RunFailed, RunCancelled, RunAbandoned,
        NowObserved, EntropyObserved, PatchObserved,
        ModelCallRequested, ModelCallCompleted, ModelCallFailed, ModelUsageReported, ModelBound,
        BatchAccepted, ToolCallRequested, AttemptStarted, ToolCallCompleted, ToolCallFailed, ToolCallRefused,
        LateResultObserved, EffectResolved,
        Suspended, Resumed, SleepStarted, Woken, BudgetExceeded, BudgetChanged, CancelRequested,
        ExecutionDegraded, ProposalReceived,
    )
}  # fmt: skip

_decoders = {kind: msgspec.json.Decoder(event_type) for kind, event_type in KINDS.items()}

TERMINAL = (RunCompleted, RunFailed, RunCancelled, RunAbandoned)


def payload_bytes(event: Event) -> bytes:
    """The payload as stored and hashed.

    Raises:
        ConfigurationError: a field is not of its declared type. Types are hints to Python, so a loop, a tool or a
            provider can hand on anything; what no reader would take must not be written.
    """
    try:
        payload = canonical(event)
        _decoders[event.event_kind].decode(payload)
    except (ValueError, TypeError, msgspec.MsgspecError) as error:
        raise ConfigurationError(
            f"it cannot be recorded: {error}",
            where=f"event {event.event_kind}",
            next="give values of the declared types",
        ) from error
    return payload


def decode(envelope: Envelope) -> Event:
    """The typed payload of a stored event.

    Raises:
        PayloadErasedError: it was erased.
        MalformedJournalError: the kind is unknown or the payload does not fit it.
    """
    decoder = _decoders.get(envelope.kind)
    if decoder is None:
        problem = f"unknown kind {envelope.kind!r}; a later release may know it"
        raise MalformedJournalError(envelope.run_id, envelope.seq, envelope.kind, problem)
    payload = envelope.payload
    try:
        return decoder.decode(payload_of(envelope) if payload is None else payload)
    except msgspec.MsgspecError as error:
        problem = f"the payload does not fit its kind: {error}"
        raise MalformedJournalError(envelope.run_id, envelope.seq, envelope.kind, problem) from error
