"""What a user's tools change, as a crash test sees it."""

import hashlib
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from perdure.contracts.contract import JsonValue

_LARGEST_TEXT = 10_000_000
"""Bytes; a larger file is compared as a whole."""


class CrashWorld(Protocol):
    """Everything outside the run that its tools change. Named on the command line as `module:attribute`."""

    def reset(self) -> None:
        """Makes it as it is before the run."""

    def effects(self) -> Sequence[JsonValue]:
        """What was done to it, each effect as often as it happened. Nothing that differs from one run of the same task
        to the next (times, random ids) may stand in it."""


class FilesWorld:
    """A folder: the tools' working directory. Its effects are the lines of its files; of a file that is no text, or is
    large, the digest of its bytes."""

    def __init__(self, folder: Path, template: Path | None) -> None:
        """`template` is copied into the folder at each reset; None: it is empty then."""
        self._folder, self._template = folder, template

    def reset(self) -> None:
        """As `CrashWorld.reset`."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self._folder)
        if self._template is None:
            self._folder.mkdir(parents=True)
        else:
            shutil.copytree(self._template, self._folder, symlinks=True)

    def effects(self) -> Sequence[JsonValue]:
        """As `CrashWorld.effects`."""
        found: list[JsonValue] = []
        for path in sorted(self._folder.rglob("*")):
            name = str(path.relative_to(self._folder))
            if not path.is_file() or path.is_symlink():
                continue
            found += [f"{name}: {line}" for line in _lines(path)] or [f"{name}: (empty)"]
        return found


def _lines(path: Path) -> list[str]:
    if path.stat().st_size > _LARGEST_TEXT:
        with path.open("rb") as file:
            return [f"SHA-256 {hashlib.file_digest(file, 'sha256').hexdigest()}"]
    data = path.read_bytes()
    try:
        return data.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        return [f"SHA-256 {hashlib.sha256(data).hexdigest()}"]


def is_world(thing: Any) -> bool:
    """Whether it has what a world has."""
    return callable(getattr(thing, "reset", None)) and callable(getattr(thing, "effects", None))
