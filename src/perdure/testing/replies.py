"""What a stand-in model says: replies as data, shared by the scripted client and the wire servers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from perdure.contracts.contract import JsonObject, canonical
from perdure.contracts.messages import StopReason, Usage
from perdure.errors import PerdureError

T = TypeVar("T")

DEFAULT_USAGE = Usage(input_tokens=10, output_tokens=20)
"""What a reply reports unless it says otherwise."""


class ScriptExhaustedError(PerdureError):
    """A script was asked for a reply it does not have."""

    code = "script_exhausted"


@dataclass(frozen=True)
class ScriptedCall:
    """A call in a scripted reply."""

    name: str
    arguments: JsonObject | str
    """A string is sent as it is, so that broken JSON can be scripted."""
    wire_id: str | None = None
    """None: the stand-in makes one up from the reply's number and the call's place."""

    @property
    def text(self) -> str:
        """The arguments as they go on the wire."""
        return self.arguments if isinstance(self.arguments, str) else canonical(self.arguments).decode("utf-8")


@dataclass(frozen=True)
class Reply:
    """One scripted reply: reasoning, text, then calls, then how it ends."""

    text: str = ""
    calls: tuple[ScriptedCall, ...] = ()
    stop: StopReason | None = None
    """None: `calls` when there are calls, else `end`."""
    usage: Usage | None = DEFAULT_USAGE
    """None: the stand-in reports no usage."""
    fault: str | None = None
    """What goes wrong, by its kind; see `fault`."""
    retry_after_s: float | None = None
    """For a fault that is a refusal: the wait it asks for, in seconds."""
    reasoning: str = ""
    """What the model thought before it spoke, where a protocol carries that; the stand-in signs it as the service
    does."""
    then: "Reply | None" = None
    """What the next request for the same number gets, and every later one. None: this reply again."""

    @property
    def ending(self) -> StopReason:
        """The stop reason that is reported."""
        return self.stop or (StopReason.CALLS if self.calls else StopReason.END)

    def at(self, attempt: int) -> "Reply":
        """What the given request for this number gets, counted from 0: `then` is followed once per request."""
        reply = self
        while attempt > 0 and reply.then is not None:
            reply, attempt = reply.then, attempt - 1
        return reply


def text(words: str) -> Reply:
    """A reply of text that ends properly."""
    return Reply(text=words)


def calls(*wanted: tuple[str, JsonObject | str] | ScriptedCall, text: str = "") -> Reply:
    """A reply that asks for tools: `calls(("tool", {"a": 1}), ("other", '{"broken'), text="first some words")`."""
    made = tuple(call if isinstance(call, ScriptedCall) else ScriptedCall(*call) for call in wanted)
    return Reply(text=text, calls=made)


STREAM_FAULTS = ("no_terminal", "half_call", "idle", "connection")
"""Faults of a stream that had begun: it ends without its closing event, ends inside a call, falls silent, or breaks."""

REFUSALS = (
    "rate_limited",
    "overloaded",
    "timeout",
    "context_too_long",
    "quota",
    "auth",
    "refused",
    "bad_request",
    "not_found",
    "protocol",
)
"""Faults instead of a stream, named as `ModelError.kind` names them."""


def fault(
    kind: str, reply: Reply | None = None, *, then: Reply | None = None, retry_after_s: float | None = None
) -> Reply:
    """A reply that goes wrong.

    Args:
        kind: one of `STREAM_FAULTS` or `REFUSALS`.
        reply: what a broken stream was about to say; a short text, or for `half_call` a call, when not given.
        then: what the same question gets when it is asked again; None: the fault, for ever.
        retry_after_s: for a refusal.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in STREAM_FAULTS + REFUSALS:
        raise ValueError(f"unknown fault {kind!r}; known are {', '.join(STREAM_FAULTS + REFUSALS)}")
    if reply is None:
        unsaid = calls(("tool", {"text": "half of this call never comes"}))
        reply = unsaid if kind == "half_call" else text("half a reply")
    return replace(reply, fault=kind, then=then, retry_after_s=retry_after_s)


def reply_number(replies: "Sequence[Reply] | Callable[[T], Reply]", number: int, request: T) -> Reply:
    """The reply of that number, or the one the function gives for the request.

    Raises:
        ScriptExhaustedError: the script is shorter.
    """
    if callable(replies):
        return replies(request)
    if number >= len(replies):
        raise ScriptExhaustedError(
            f"reply {number} was asked for and the script has {len(replies)}",
            where="scripted model",
            next="script one more reply, or find out why the run asks again",
        )
    return replies[number]
