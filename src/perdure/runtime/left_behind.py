"""Attempts past their time limit that still go on, by run, for all drives and engines of this process."""

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary


@dataclass(eq=False, slots=True)
class Attempt:
    """One attempt that was left behind."""

    fingerprint: str
    """The call's, as the guards name it."""
    rest: "asyncio.Future[Any]"
    """Done when what it comes to is known."""
    thread: threading.Thread | None
    """Where it goes on, if a cancel could not stop it for that."""

    @property
    def goes_on(self) -> bool:
        """Whether it may still act, or has ended without being heard of. May be asked from any thread."""
        if self.thread is not None and self.thread.is_alive():
            return True
        # An event loop that was closed runs nothing, and hears of nothing.
        return not (self.rest.done() or self.rest.get_loop().is_closed())


@dataclass(slots=True, weakref_slot=True)
class LeftBehind:
    """What one run left behind in this process."""

    _attempts: list[Attempt] = field(default_factory=list)

    def add(self, attempt: Attempt) -> None:
        """Keeps it until it is removed."""
        self._attempts.append(attempt)

    def remove(self, attempt: Attempt) -> None:
        """It has ended, and that is known."""
        self._attempts.remove(attempt)

    def holds(self, fingerprint: str) -> bool:
        """Whether an attempt at such a call still goes on."""
        # A copy: another thread may drive what ends meanwhile.
        return any(one.fingerprint == fingerprint and one.goes_on for one in tuple(self._attempts))


_by_run: WeakValueDictionary[tuple[str, str], LeftBehind] = WeakValueDictionary()
"""Only a drive, and what an attempt does when it ends, keep an entry: the last of them takes it along."""
_one_at_a_time = threading.Lock()


def left_behind_by(store: str, run_id: str) -> LeftBehind:
    """What the run left behind, whichever engine drove it then. `store` is the store's identity."""
    with _one_at_a_time:
        return _by_run.setdefault((store, run_id), LeftBehind())
