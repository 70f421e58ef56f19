"""The system's clock and source of chance, for the `Clock` and `Entropy` ports."""

import asyncio
import os
import time


class SystemClock:
    """Wall time of the system, and its monotonic clock."""

    def now_ns(self) -> int:
        """UTC, nanoseconds since the epoch."""
        return time.time_ns()

    def steady_ns(self) -> int:
        """The monotonic clock, in nanoseconds."""
        return time.monotonic_ns()

    async def sleep(self, seconds: float) -> None:
        """Waits on the event loop."""
        await asyncio.sleep(seconds)


class SystemEntropy:
    """The system's cryptographic source."""

    def draw(self, count: int) -> bytes:
        """`count` unpredictable bytes."""
        return os.urandom(count)
