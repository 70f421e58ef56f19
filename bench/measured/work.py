"""What every measured process shares: the words of a turn, and how a process reads its own clocks. No library: the
peers import it in environments that have none of ours.
"""

import json
import resource
import time
from typing import Self

WARM_UP_TURNS = 20
"""A short run goes before, in the same store and process, so that what a process does once (imports, first growth of
the file) is not shared out over the turns."""

PADDING = "The observation was read and the next lookup is needed to make progress. "


def said(number: int) -> str:
    """300 bytes of a reply's text."""
    return (f"Thought {number}: " + PADDING * 5)[:300]


def seen(number: int) -> str:
    """200 bytes of a tool's result."""
    return (f"observation {number} " + "data " * 50)[:200]


class Spent:
    """Wall and CPU time between entering and leaving."""

    def __enter__(self) -> Self:
        self._cpu, self._began = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds, self.cpu_seconds = time.perf_counter() - self._began, time.process_time() - self._cpu

    def figures(self) -> dict[str, float]:
        """Both, by name."""
        return {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds}


def peak_bytes() -> int:
    """The most memory this process held."""
    # A kibibyte is the unit on Linux. A parent's size counts too on the way through fork, so the parent must be small.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def tell(**figures: float) -> None:
    """Hands the figures to the one who measures."""
    print(json.dumps(figures))
