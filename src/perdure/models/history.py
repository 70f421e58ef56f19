"""A conversation put into the order every provider wants, once: each adapter only spells it.

Owns what may go on a wire at all. Results stand behind the turn that asked for them, nothing blank is sent, ids and
names are made anew, and another provider's parts are left out. The transcript is only read.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from perdure.contracts.contract import JsonObject
from perdure.contracts.messages import AssistantTurn, CallPart, Observation, ObservationStatus, OpaquePart, TextPart
from perdure.errors import ModelError
from perdure.journal.transcript import Entry, ResultsEntry, TurnEntry, UserEntry
from perdure.prompting.wire_names import wire_name


class Said(NamedTuple):
    """Words from outside the model; never blank. Several may follow one another."""

    text: str


class Answered(NamedTuple):
    """A call with its result."""

    wire_id: str
    """Made from the call's place; the same on every replay and for every provider."""
    name: str
    """As it goes on the wire."""
    arguments: JsonObject
    result: Observation

    @property
    def failed(self) -> bool:
        """Whether the result is to be marked as an error, where a protocol can say so."""
        return self.result.status not in (ObservationStatus.COMPLETED, ObservationStatus.ANSWER)


class Replied(NamedTuple):
    """A reply of the model, with something in it that is no opaque part."""

    parts: tuple[str | OpaquePart | Answered, ...]
    """In the order they came: texts (none blank), this provider's own parts, calls that have a result."""

    @property
    def answers(self) -> tuple[Answered, ...]:
        """The calls, in order."""
        return tuple(part for part in self.parts if isinstance(part, Answered))

    @property
    def text(self) -> str:
        """The texts joined; empty when there are none."""
        return "".join(part for part in self.parts if isinstance(part, str))


def history(entries: Iterable[Entry], provider: str) -> list[Said | Replied]:
    """The conversation for one provider. Pure: equal transcripts give equal histories.

    A provider's own part (a reasoning signature, say) belongs to the item behind it, and at the end of a reply to the
    one before; it goes when that item goes. Calls of the last turn that have no result yet are left out.

    Args:
        entries: the transcript.
        provider: whose opaque parts are kept.

    Raises:
        ModelError: `history`: a result without its call, two for one call, or a call that was passed over.
    """
    found: list[Said | Replied] = []
    turn: TurnEntry | None = None
    number = -1
    said: list[Said] = []
    results: list[Observation] = []
    for entry in entries:
        if isinstance(entry, UserEntry):
            if entry.text.strip():
                said.append(Said(entry.text))
        elif isinstance(entry, ResultsEntry):
            results.extend(entry.observations)
        else:
            found += _segment(turn, number, results, said, provider, last=False)
            turn, number, said, results = entry, number + 1, [], []
    found += _segment(turn, number, results, said, provider, last=True)
    return found


def _segment(
    entry: TurnEntry | None, number: int, results: list[Observation], said: list[Said], provider: str, *, last: bool
) -> Iterator[Said | Replied]:
    """One turn with its results, then what was said before the next turn."""
    given = _by_call(entry, results)
    if entry is not None:
        calls = entry.turn.calls
        missing = [f"{entry.id}.{place}" for place in range(len(calls)) if f"{entry.id}.{place}" not in given]
        if missing and not last:
            raise _wrong(f"the turn {entry.id} was passed over: no result for {', '.join(missing)}")
        parts = tuple(_parts(entry.id, entry.turn, number, given, provider))
        if any(not isinstance(part, OpaquePart) for part in parts):
            yield Replied(parts)
    yield from said


def _by_call(entry: TurnEntry | None, results: list[Observation]) -> dict[str, Observation]:
    asked = set() if entry is None else {f"{entry.id}.{place}" for place in range(len(entry.turn.calls))}
    given: dict[str, Observation] = {}
    for result in results:
        if result.call not in asked:
            raise _wrong(f"a result for {result.call} stands where no call asked for it")
        if result.call in given:
            raise _wrong(f"there are two results for {result.call}")
        given[result.call] = result
    return given


def _parts(
    turn_id: str, turn: AssistantTurn, number: int, given: dict[str, Observation], provider: str
) -> Iterator[str | OpaquePart | Answered]:
    waiting: list[OpaquePart] = []
    place, kept = 0, True
    for part in turn.content:
        if isinstance(part, OpaquePart):
            if part.provider == provider:
                waiting.append(part)
            continue
        if isinstance(part, TextPart):
            if not part.text.strip():
                continue
            item: str | Answered | None = part.text
        else:
            item = _answered(part, turn_id, number, place, given)
            place += 1
        kept = item is not None
        if item is not None:
            yield from waiting
            yield item
        waiting = []
    if kept:
        yield from waiting


def _answered(part: CallPart, turn_id: str, number: int, place: int, given: dict[str, Observation]) -> Answered | None:
    result = given.get(f"{turn_id}.{place}")
    if result is None:
        return None
    # A name the model made up may hold characters a service refuses in a history (mcp-use#90), for ever after.
    return Answered(f"call_{number}_{place}", wire_name(part.call.name), part.call.arguments, result)


def _wrong(found: str) -> ModelError:
    return ModelError("history", found, where="the conversation", next="give each call one result, with ctx.use")
