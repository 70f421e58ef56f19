"""What passes between a loop, a model and its tools: turns, calls, usage, observations.

Provider-neutral. A provider's own payloads appear here only as opaque parts that are carried and never read.
"""

from enum import StrEnum

from perdure.contracts.contract import Fact, JsonObject, JsonValue


class Effect(StrEnum):
    """What a call may do outside the run."""

    READ = "read"
    """Changes nothing; may be run again at will."""
    IDEMPOTENT = "idempotent"
    """Changes something once per key: the tool hands its key on, so a repeat with the same key is safe."""
    WRITE = "write"
    """Changes something each time it runs; never repeated by the runtime. The default for an undeclared effect."""


class StopReason(StrEnum):
    """Why a model stopped, normalized over providers."""

    END = "end"
    CALLS = "calls"
    LENGTH = "length"
    """The output limit cut the reply."""
    REFUSED = "refused"
    """The provider's content filter cut the reply. A model that declines in words has ended its reply itself."""
    OTHER = "other"


class CallFault(StrEnum):
    """A fault in the content of one call: the turn stands, the call is answered with a diagnostic."""

    NOT_JSON = "not_json"
    NOT_AN_OBJECT = "not_an_object"
    CUT = "cut"
    """The reply was cut by the output limit inside this call."""


class ToolCall(Fact, frozen=True):
    """One tool call a model asked for, at its place in the turn."""

    name: str
    arguments: JsonObject = {}
    """Always an object; empty when `fault` is set."""
    fault: CallFault | None = None
    raw: str | None = None
    """With a fault: what was received in place of an object, bounded to 400 characters."""
    wire_id: str | None = None
    """The provider's id, a hint only: ids repeat and may be missing, so nothing is keyed by it."""


class TextPart(Fact, tag="text", tag_field="type", frozen=True):
    """Text of a reply."""

    text: str


class CallPart(Fact, tag="call", tag_field="type", frozen=True):
    """A tool call among the content of a reply."""

    call: ToolCall


class OpaquePart(Fact, tag="opaque", tag_field="type", frozen=True):
    """A provider's own part (a reasoning signature, say): sent back verbatim to that provider, left out for any
    other."""

    provider: str
    data: JsonValue


Part = TextPart | CallPart | OpaquePart


class Usage(Fact, frozen=True):
    """Tokens of one model call. None means the provider did not say; it never means zero."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    """Of the input, how many were read from the provider's cache."""
    reasoning_tokens: int | None = None
    """Of the output, how many were spent on reasoning."""
    estimated: bool = False
    """True when a figure was estimated from sizes because the provider gave none."""


class AssistantTurn(Fact, frozen=True):
    """One complete reply of a model."""

    content: tuple[Part, ...] = ()
    stop: StopReason = StopReason.END
    usage: Usage = Usage()
    model: str | None = None
    """The model name as the provider reported it."""

    @property
    def text(self) -> str:
        """The text parts joined; an empty string when there are none."""
        return "".join(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls of the turn, in order."""
        return tuple([part.call for part in self.content if isinstance(part, CallPart)])


class ObservationStatus(StrEnum):
    """How a call ended, as the loop sees it."""

    COMPLETED = "completed"
    FAILED = "failed"
    REFUSED = "refused"
    """Never dispatched: unknown tool, bad arguments, a bad batch, a rejection."""
    UNKNOWN = "unknown"
    """The effect may or may not have happened."""
    INTERRUPTED = "interrupted"
    """Closed by a cancel or a conservative resume before it had a result."""
    ANSWER = "answer"
    """The answer tool, called alone with a valid input: the proposal itself."""


class Observation(Fact, frozen=True):
    """A call's answer as the model sees it."""

    call: str
    """The call's id: scope, turn and place."""
    tool: str
    status: ObservationStatus
    text: str
    """What the model reads; never empty."""
    output: JsonValue = None
    """The tool's value, for a completed call whose value was not stored as an artifact."""
    artifact: str | None = None
    """Content digest of the stored value, when it was too large to inline."""


class ToolDescriptor(Fact, frozen=True):
    """A tool as offered to a model, pinned when the run starts."""

    name: str
    description: str
    input_schema: JsonObject
    effect: Effect = Effect.WRITE
    parallel: bool = False
    """Whether adjacent reads of this kind may overlap."""
    repeatable: bool | None = None
    """False: the third identical call is refused; True: never. None: False for write and idempotent tools, True for
    reads."""
