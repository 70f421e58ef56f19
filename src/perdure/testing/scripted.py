"""A model client that says what a script tells it to, in this process and without a socket."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

from perdure.errors import RETRYABLE_KINDS, ModelError
from perdure.ports import CallDelta, ModelEvent, TextDelta, TurnDone, UsageReport
from perdure.prompting.request import ModelRequest
from perdure.testing.replies import (
    DEFAULT_USAGE,
    REFUSALS,
    Reply,
    ScriptedCall,
    ScriptExhaustedError,
    calls,
    fault,
    reply_number,
    text,
)

__all__ = [
    "DEFAULT_USAGE",
    "Reply",
    "ScriptExhaustedError",
    "ScriptedCall",
    "ScriptedModel",
    "calls",
    "fault",
    "text",
]


class ScriptedModel:
    """Answers from a script. The reply's number is the count of assistant turns in the request, never an internal
    counter, so a resumed process goes on where the script was.

    Args:
        replies: the replies by number, or a function of the request.
        chunk: characters per text or argument fragment; 0 sends each in one piece.
        delay_ms: wait before each reply, in milliseconds.
    """

    target = "scripted:script"
    strict = True

    def __init__(
        self, replies: Sequence[Reply] | Callable[[ModelRequest], Reply], *, chunk: int = 16, delay_ms: int = 0
    ) -> None:
        self._replies, self._chunk, self._delay_s = replies, chunk, delay_ms / 1000
        self._asked: Counter[int] = Counter()
        self.requests: list[ModelRequest] = []
        """Every request, in order, the ones that failed included."""

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """As `ModelClient.stream`.

        Raises:
            ScriptExhaustedError: the script has no reply of this number.
        """
        number = request.transcript.turns
        attempt = self._asked[number]
        self._asked[number] += 1
        self.requests.append(request)
        reply = reply_number(self._replies, number, request).at(attempt)
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        if reply.fault in REFUSALS:
            raise _refusal(reply.fault, reply.retry_after_s)
        for event in _events(reply, number, self._chunk):
            yield event
        if reply.fault == "idle":
            await asyncio.Event().wait()
        if reply.fault == "connection":
            raise _refusal("connection", None)

    async def close(self) -> None:
        """Nothing to give back."""


def _refusal(kind: str, retry_after_s: float | None) -> ModelError:
    found = f"scripted fault {kind}"
    return ModelError(
        kind, found, where="scripted:script", retryable=kind in RETRYABLE_KINDS, retry_after_s=retry_after_s
    )


def _events(reply: Reply, number: int, chunk: int) -> list[ModelEvent]:
    events: list[ModelEvent] = [TextDelta(piece) for piece in _pieces(reply.text, chunk)]
    for place, call in enumerate(reply.calls):
        wire_id = f"call_{number}_{place}" if call.wire_id is None else call.wire_id
        whole = call.text
        half = reply.fault == "half_call" and place == len(reply.calls) - 1
        events.append(CallDelta(index=place, wire_id=wire_id, name=call.name))
        pieces = _pieces(whole[: len(whole) // 2] if half else whole, chunk)
        events.extend(CallDelta(index=place, arguments=piece) for piece in pieces)
    if reply.fault is None:
        if reply.usage is not None:
            events.append(UsageReport(reply.usage))
        events.append(TurnDone(reply.ending, model="scripted"))
    return events


def _pieces(words: str, chunk: int) -> list[str]:
    if chunk <= 0 or len(words) <= chunk:
        return [words] if words else []
    return [words[start : start + chunk] for start in range(0, len(words), chunk)]
