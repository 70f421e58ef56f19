"""What a process is doing, on a page that it shares with whoever kills it: readable after its death, whatever it was
doing."""

import mmap
import os
import struct
from pathlib import Path
from typing import Self

PHASES = ("model", "effect", "committing", "between")
"""What a driver can be killed in: a model call in flight, a tool's function running, a commit under way, none of
these."""

_LIVE, _MODEL, _EFFECT, _COMMITTING = range(4)
_FLAGS = 4
_DURABLE = struct.Struct("=Q")
_DURABLE_AT = 8


class Marks:
    """The page. One process writes, in one thread; any may read."""

    def __init__(self, path: Path) -> None:
        """Maps the page in the file, which is made when it is missing."""
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE)
            self._page = mmap.mmap(descriptor, mmap.PAGESIZE)
        finally:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._page.close()

    def clear(self) -> None:
        """Nothing is being done any more; what is durable stays so."""
        self._page[:_FLAGS] = bytes(_FLAGS)

    @property
    def live(self) -> bool:
        """Whether a run is being driven that has not ended."""
        return self._page[_LIVE] != 0

    @live.setter
    def live(self, value: bool) -> None:
        self._page[_LIVE] = int(value)

    @property
    def durable(self) -> int:
        """How many of the run's events the driver was told are durable."""
        found: int = _DURABLE.unpack_from(self._page, _DURABLE_AT)[0]
        return found

    @durable.setter
    def durable(self, events: int) -> None:
        _DURABLE.pack_into(self._page, _DURABLE_AT, events)

    @property
    def phase(self) -> str:
        """One of PHASES. While a commit is under way that counts, whatever else is."""
        if self._page[_COMMITTING]:
            return "committing"
        if self._page[_EFFECT]:
            return "effect"
        return "model" if self._page[_MODEL] else "between"

    def committing(self, change: int) -> None:
        """One commit more, or less, is under way."""
        self._page[_COMMITTING] += change

    def in_model(self, change: int) -> None:
        """One model call more, or less, is in flight."""
        self._page[_MODEL] += change

    def in_effect(self, change: int) -> None:
        """One function more, or less, is running."""
        self._page[_EFFECT] += change
