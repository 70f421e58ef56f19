"""A recorded run's words, said again: the model's turns by their number, and what people answered."""

from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec

from perdure.contracts.contract import JsonValue
from perdure.contracts.messages import AssistantTurn, CallPart, TextPart
from perdure.errors import ModelError
from perdure.journal import events as ev
from perdure.journal.envelope import Envelope
from perdure.ports import CallDelta, ModelEvent, OpaqueDelta, TextDelta, TurnDone, UsageReport
from perdure.prompting.request import ModelRequest


class FixedModel:
    """Says the recorded turns again: which one, the request's assistant turns tell, so a resumed process goes on where
    the recording was."""

    target = "recorded:turns"
    strict = True

    def __init__(self, turns: Sequence[AssistantTurn]) -> None:
        self._turns = turns

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """As `ModelClient.stream`.

        Raises:
            ModelError: the recording has no turn of this number.
        """
        number = request.transcript.turns
        if number >= len(self._turns):
            found = f"the recorded run has no turn {number + 1}, and it is asked for"
            raise ModelError("request", found, where=self.target, retryable=False)
        turn = self._turns[number]
        for place, part in enumerate(turn.content):
            for event in _events(place, part):
                yield event
        yield UsageReport(turn.usage)
        yield TurnDone(turn.stop, turn.model)

    async def close(self) -> None:
        """Nothing to give back."""


def _events(place: int, part: object) -> list[ModelEvent]:
    if isinstance(part, TextPart):
        return [TextDelta(part.text)]
    if isinstance(part, CallPart):
        call = part.call
        arguments = msgspec.json.encode(call.arguments).decode() if call.fault is None else call.raw or ""
        return [CallDelta(place, call.wire_id, call.name), CallDelta(place, arguments=arguments)]
    return [OpaqueDelta(part.provider, part.data)]  # type: ignore[attr-defined]


def turns_of(envelopes: Sequence[Envelope]) -> tuple[AssistantTurn, ...]:
    """The model's turns, in order."""
    found = [ev.decode(one) for one in envelopes if one.kind == "model_call_completed"]
    return tuple(event.turn for event in found if isinstance(event, ev.ModelCallCompleted))


def answers_of(envelopes: Sequence[Envelope]) -> Mapping[str, JsonValue]:
    """What was answered, by the call that waited."""
    found = [ev.decode(one) for one in envelopes if one.kind == "resumed"]
    return {event.call: event.value for event in found if isinstance(event, ev.Resumed)}
