"""The types of this folder's fixtures, and what a started program said."""

import subprocess
from typing import Protocol

from perdure.ports import Clock
from perdure.stores.sqlite import SqliteStore


class OpenStore(Protocol):
    """Opens one more store over the test's file."""

    async def __call__(
        self, clock: Clock | None = None, lease_seconds: float = 10.0, **options: bool
    ) -> SqliteStore: ...


class Start(Protocol):
    """Starts a program of `programs.py`."""

    def __call__(self, *arguments: object) -> "subprocess.Popen[str]": ...


def spoken(process: "subprocess.Popen[str]") -> list[str]:
    """The lines a program said, once it has ended."""
    output, _ = process.communicate(timeout=60)
    return output.splitlines()
