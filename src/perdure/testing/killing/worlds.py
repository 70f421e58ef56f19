"""What a user's tools change, as a crash test sees it."""

import hashlib
import inspect
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from perdure.contracts.contract import JsonValue
from perdure.contracts.values import to_json

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
            try:
                shutil.copytree(self._template, self._folder, symlinks=True, copy_function=_copy)
            except shutil.Error as error:
                raise OSError(error.args[0][0][2]) from error  # of many, the first one in words

    def effects(self) -> Sequence[JsonValue]:
        """As `CrashWorld.effects`."""
        found: list[JsonValue] = []
        for path in sorted(self._folder.rglob("*")):
            # A name is bytes, and effects are text.
            name = os.fsencode(path.relative_to(self._folder)).decode("utf-8", "backslashreplace")
            if not path.is_file() or path.is_symlink():
                continue
            found += [f"{name}: {line}" for line in _lines(path)] or [f"{name}: (empty)"]
        return found


def _copy(source: str, target: str) -> None:
    if not Path(source).is_file():  # read from a device or a pipe, it would not end
        raise OSError(f"{source} is a device, a pipe or a socket, which cannot be copied")
    shutil.copy2(source, target)


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


class Said(msgspec.Struct, frozen=True):
    """What a world's method gave, as told by the process that called it."""

    value: JsonValue = None
    problem: str | None = None


def ask(world: CrashWorld, method: Literal["reset", "effects"]) -> Said:
    """Calls it. A world is a user's: whatever it does is told, and nothing of it is taken on trust."""
    try:
        given = getattr(world, method)()
        if inspect.iscoroutine(given):
            given.close()  # else Python complains that it was never awaited
        if (
            inspect.isawaitable(given)
            or inspect.isasyncgen(given)
            or (method == "reset" and inspect.isgenerator(given))
        ):
            return Said(problem="is asynchronous or a generator: called as a plain function, it does nothing")
        if method == "reset":
            return Said()
        if isinstance(given, str | bytes | bytearray | Mapping) or not isinstance(given, Iterable):
            return Said(problem=f"gave {type(given).__name__}, and not a list of effects")
        return Said([to_json(effect) for effect in given])
    except BaseException as error:  # noqa: BLE001 - its process ends with it, whatever it is
        return Said(problem=f"failed: {problem_of(error)}")


def problem_of(error: BaseException) -> str:
    """An error on one line."""
    words = " ".join(str(error).split()).encode("utf-8", "backslashreplace").decode()
    return f"{type(error).__name__}: {words:.300}" if words else type(error).__name__
