"""Time and chance that a test decides, for the `Clock` and `Entropy` ports."""

import asyncio
import hashlib
from collections import Counter

NS = 10**9
DAWN_NS = 1_700_000_000 * NS
"""Where a `ManualClock` begins unless told otherwise: 2023-11-14 22:13:20 UTC."""


class ManualClock:
    """A clock that stands still until it is moved.

    Args:
        now_ns: wall time to begin with, in UTC nanoseconds since the epoch. The steady clock begins at 0.
        passing: whether `sleep` moves the time, so that whoever sleeps wakes at once and finds it later. False: `sleep`
            returns at the next tick of the event loop and the time stands still.
    """

    def __init__(self, now_ns: int = DAWN_NS, *, passing: bool = True) -> None:
        self._now, self._steady, self._passing = now_ns, 0, passing

    def now_ns(self) -> int:
        """The wall time, UTC nanoseconds."""
        return self._now

    def steady_ns(self) -> int:
        """The steady time, nanoseconds."""
        return self._steady

    def advance(self, seconds: float) -> None:
        """Moves both clocks on.

        Raises:
            ValueError: `seconds` is negative; only the wall clock can go back (`jump`).
        """
        if seconds < 0:
            raise ValueError(f"a steady clock cannot go back (by {seconds} s); jump() moves the wall clock alone")
        step = round(seconds * NS)
        self._now += step
        self._steady += step

    def jump(self, seconds: float) -> None:
        """Moves the wall clock alone, either way, as a correction of the system's time does."""
        self._now += round(seconds * NS)

    def jump_to(self, now_ns: int) -> None:
        """Sets the wall clock alone, in UTC nanoseconds."""
        self._now = now_ns

    async def sleep(self, seconds: float) -> None:
        """Lets others run once, then makes it `seconds` later than it was; of sleeps at one time the longest counts."""
        due = self._steady + round(seconds * NS)
        await asyncio.sleep(0)
        if self._passing and due > self._steady:
            self.advance((due - self._steady) / NS)


class SeededEntropy:
    """Bytes that follow from a seed.

    Draws of different sizes come from streams of their own, so that how often one part of the runtime draws does not
    change what another part gets.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._drawn: Counter[int] = Counter()

    def draw(self, count: int) -> bytes:
        """The next `count` bytes of the stream for draws of this size."""
        number = self._drawn[count]
        self._drawn[count] += 1
        return hashlib.shake_128(f"{self._seed}/{count}/{number}".encode()).digest(count)

    def skip(self, count: int, draws: int) -> None:
        """Passes over `draws` draws of `count` bytes, as if they had been made."""
        self._drawn[count] += draws
