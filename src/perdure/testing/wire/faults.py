"""What can go wrong on the way, whatever the reply was to be. Each fault strikes once."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CutAfter:
    """The connection is torn inside the answer's body."""

    bytes: int
    """How much of the body goes out first."""
    request: int | None = None
    """Which request it strikes, counted from 1; None: the first that no other fault has claimed."""
    clean: bool = False
    """End the body properly instead, as a proxy does that lost its own upstream."""


@dataclass(frozen=True)
class Status:
    """An answer of this status instead of a reply."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    request: int | None = None
    """As `CutAfter.request`."""
    body: str | None = None
    """None: an error object as the service writes it. Anything else goes out as it is (a proxy's HTML page)."""


@dataclass(frozen=True)
class Stall:
    """The answer falls silent after so many bytes and the connection stays open."""

    bytes: int = 0
    request: int | None = None
    """As `CutAfter.request`."""


@dataclass(frozen=True)
class Repeat:
    """One piece of the answer goes out twice, as a proxy does that replays its buffer."""

    piece: int = 0
    """Which, counted from 0; one that is not there changes nothing."""
    request: int | None = None
    """As `CutAfter.request`."""


@dataclass(frozen=True)
class Reindex:
    """Every fragment says the same index, or none, as compatible servers do (smolagents#1958, litellm#39796)."""

    index: int | None = 0
    """None: the field is left out."""
    request: int | None = None
    """As `CutAfter.request`."""


Fault = CutAfter | Status | Stall | Repeat | Reindex


def reindexed(piece: bytes, fields: tuple[str, ...], index: int | None) -> bytes:
    """A piece of a stream with the named fields of its JSON changed wherever they hold a number."""

    def changed(value: Any) -> Any:
        if isinstance(value, list):
            return [changed(one) for one in value]
        if not isinstance(value, dict):
            return value
        kept = {}
        for name, one in value.items():
            if name in fields and isinstance(one, int):
                if index is not None:
                    kept[name] = index
            else:
                kept[name] = changed(one)
        return kept

    lines = piece.decode().split("\n")
    for place, line in enumerate(lines):
        start = line.find("{")
        if start >= 0:
            with suppress(ValueError):
                lines[place] = line[:start] + json.dumps(changed(json.loads(line[start:])), ensure_ascii=False)
    return "\n".join(lines).encode()


class FaultPlan:
    """Which fault strikes which request."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self._numbered = {fault.request: fault for fault in faults if fault.request is not None}
        self._next = [fault for fault in faults if fault.request is None]

    def take(self, request: int) -> Fault | None:
        """The fault for the request of that number; it is used up."""
        fault = self._numbered.pop(request, None)
        if fault is None and self._next:
            fault = self._next.pop(0)
        return fault
