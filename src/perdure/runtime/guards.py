"""Guards against a loop that goes nowhere, rebuilt on replay from the calls as they settle, in call order.

Three rules in this order: the third identical write or idempotent call is not dispatched (`repeated_action`); an
identical call with an identical result n times ends the run (`no_progress`); from the second identical failure in a
row on, one counted line stands for the text. Counts restart when something changed: another effect settled, a wait or
timer of 30 s or more ended, a person spoke. So an agent that merely waits is spared. Calls with an effect are identical
when their functions would be called with the same, in whatever words they were asked for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from perdure.contracts.contract import JsonObject, JsonValue, value_digest
from perdure.contracts.messages import Effect, ToolDescriptor

REPEATED_ACTIONS = 3
"""The occurrence of an identical write or idempotent call that is not dispatched any more."""
LONG_WAIT_NS = 30 * 10**9
"""A wait or timer this long counts as a change."""


class Settled(msgspec.Struct, frozen=True):
    """One call as it ended, for counting."""

    tool: str
    fingerprint: str
    effect: Effect
    result: str
    """Digest of how it ended: status with value or failure."""
    failure: str | None
    """The failure text before any collapse; None when it did not fail."""
    unknown: bool = False


class Valued(msgspec.Struct, frozen=True, gc=False):
    """A call that ended with a value."""

    tool: str
    arguments: JsonObject
    effect: Effect
    output: JsonValue
    artifact: str | None
    print_of: Callable[[str, JsonObject], str]
    """Makes the fingerprint."""

    @property
    def fingerprint(self) -> str:
        """Names the call by its tool and arguments; made when it is asked for."""
        return self.print_of(self.tool, self.arguments)

    def settled(self) -> Settled:
        """As it is counted."""
        result = value_result(self.output, self.artifact)
        return Settled(self.tool, self.fingerprint, self.effect, result, None)


@dataclass(slots=True)
class Guards:
    """Counts since the last change."""

    _actions: dict[str, int] = field(default_factory=dict)
    _results: dict[tuple[str, str], int] = field(default_factory=dict)
    _failing: tuple[str, str] | None = None
    _failures: int = 0
    _unknown: set[str] = field(default_factory=set)
    _replayed: list[Valued] = field(default_factory=list)
    """Ended after all that is counted, and not counted yet: of a long replay most never need be."""

    def replay(self, call: Valued) -> None:
        """Takes a recorded call that ended with a value; it is counted when that is next asked for."""
        self._replayed.append(call)

    def _catch_up(self) -> None:
        replayed, self._replayed = self._replayed, []
        first = _last_change(replayed)
        if first:
            self.changed()  # the rest begins with a value, which ends a row of failures as well
            if any(call.effect is Effect.READ for call in replayed[:first]):
                self._unknown.clear()
        for call in replayed[first:]:
            self.settle(call.settled())

    def repeats(self, fingerprint: str, descriptor: ToolDescriptor) -> bool:
        """Whether dispatching this call now would be the third identical action."""
        if self._replayed:
            self._catch_up()
        guarded = descriptor.repeatable is False or (
            descriptor.repeatable is None and descriptor.effect is not Effect.READ
        )
        return guarded and self._actions.get(fingerprint, 0) + 1 >= REPEATED_ACTIONS

    def outcome_unknown(self, fingerprint: str) -> bool:
        """Whether an identical call ended with an unknown outcome that no read has looked into since."""
        if self._replayed:
            self._catch_up()
        return fingerprint in self._unknown

    def told(self, fingerprint: str) -> None:
        """The model has read what became of such a call."""
        if self._replayed:
            self._catch_up()
        self._unknown.discard(fingerprint)

    def failures_with(self, tool: str, failure: str) -> int:
        """How many identical failures in a row there would be with this one."""
        if self._replayed:
            self._catch_up()
        return self._failures + 1 if self._failing == (tool, failure) else 1

    def settle(self, call: Settled) -> int:
        """Counts a call that ended; returns how often this call has ended this way since the last change."""
        if self._replayed:
            self._catch_up()
        if call.effect is not Effect.READ:
            self._keep_only(call.fingerprint)
        if call.unknown:
            self._unknown.add(call.fingerprint)
        elif call.effect is Effect.READ and call.failure is None:
            self._unknown.clear()
        self._actions[call.fingerprint] = self._actions.get(call.fingerprint, 0) + 1
        key = (call.fingerprint, call.result)
        self._results[key] = self._results.get(key, 0) + 1
        self._count_failure(call)
        return self._results[key]

    def changed(self) -> None:
        """Something changed from outside: a long wait ended, a person spoke."""
        if self._replayed:
            self._catch_up()
        self._actions.clear()
        self._results.clear()

    def _keep_only(self, fingerprint: str) -> None:
        # Another effect settled: what was counted before no longer says that nothing moves.
        if fingerprint not in self._actions:
            self.changed()
        elif len(self._actions) > 1:
            self._actions = {fingerprint: self._actions[fingerprint]}
            self._results = {key: n for key, n in self._results.items() if key[0] == fingerprint}

    def _count_failure(self, call: Settled) -> None:
        if call.failure is None:
            self._failing, self._failures = None, 0
        elif self._failing == (call.tool, call.failure):
            self._failures += 1
        else:
            self._failing, self._failures = (call.tool, call.failure), 1


def _last_change(calls: Sequence[Valued]) -> int:
    """The place of the last effect that followed upon another one: what was counted before it counts no more. Zero when
    there is none."""
    later = None
    for place in range(len(calls) - 1, -1, -1):
        call = calls[place]
        if call.effect is Effect.READ:
            continue
        if later is not None and call.fingerprint != calls[later].fingerprint:
            return later
        later = place
    return 0


def value_result(output: JsonValue, artifact: str | None) -> str:
    """Digest of how a call ended that ended with a value."""
    return fingerprint("completed", {"output": output, "artifact": artifact})


def fingerprint(tool: str, arguments: JsonObject) -> str:
    """Names a call by its tool and its arguments in canonical form, so that the order of keys does not matter."""
    return value_digest([tool, arguments])
