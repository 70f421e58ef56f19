"""What can go wrong on the way, whatever the reply was to be. Each fault strikes once."""

from collections.abc import Mapping
from dataclasses import dataclass, field


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


Fault = CutAfter | Status | Stall


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
