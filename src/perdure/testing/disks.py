"""A disk between SQLite and the system: taps are told of every write and sync of a store's files, and may fail, delay
or lose it, or end the process there.

    with tapped(FailingDisk("sync", apsw.IOError, after=3)):
        ...  # whatever this process opens with SQLite in here goes through it

The memory that processes share over a log (`-shm`) is no file to SQLite's file layer and is not durable either.
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import apsw

_VFS_NAME = "perdure-tapped"
_SYSTEM = apsw.vfs_names()[0]
"""The system's own file layer: the default before any of ours."""
FileKind = Literal["main", "wal", "journal", "other"]
Operation = Literal["write", "sync"]


class TappedFile:
    """A file as taps are shown it. SQLite names files by their full path; a temporary one has none."""

    __slots__ = ("kind", "path")

    def __init__(self, path: str, kind: FileKind) -> None:
        self.path, self.kind = path, kind


class Tap:
    """Told of what is done to files, in the thread that does it. A subclass overrides what it wants to see.

    What is told before it is done may be prevented by raising an apsw error (the disk's answer then), or by returning
    False from `writing` (said to be done, and is not).
    """

    def writing(self, file: TappedFile, offset: int, data: bytes) -> bool:
        """A write is about to be done."""
        return True

    def wrote(self, file: TappedFile, offset: int, data: bytes) -> None:
        """A write was done."""

    def syncing(self, file: TappedFile) -> None:
        """A sync is about to be done."""

    def synced(self, file: TappedFile) -> None:
        """A sync was done."""

    def truncated(self, file: TappedFile, size: int) -> None:
        """A file was cut, or grown, to a size in bytes."""

    def deleted(self, path: str) -> None:
        """A file was deleted."""


@contextmanager
def tapped(*taps: Tap) -> Iterator[None]:
    """Makes what this process opens with SQLite inside go past the taps."""
    disk = _Disk(taps)
    try:
        yield
    finally:
        disk.unregister()


class _Disk(apsw.VFS):
    def __init__(self, taps: Sequence[Tap]) -> None:
        super().__init__(_VFS_NAME, _SYSTEM, makedefault=True)
        self._taps = taps

    def xOpen(self, name: apsw.URIFilename | str | None, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        return _File(name, flags, self._taps)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802
        super().xDelete(filename, syncdir)
        for tap in self._taps:
            tap.deleted(filename)


class _File(apsw.VFSFile):
    def __init__(self, name: apsw.URIFilename | str | None, flags: list[int], taps: Sequence[Tap]) -> None:
        path = name.filename() if isinstance(name, apsw.URIFilename) else name or ""
        super().__init__(_SYSTEM, name, flags)
        self._file, self._taps = TappedFile(path, _kind(flags[0])), taps

    def xLock(self, level: int) -> None:  # noqa: N802
        try:
            super().xLock(level)
        except apsw.IOError:
            # A file open for reading only cannot be locked for writing. SQLite goes on as if it were busy; from here
            # it would come out as an error.
            raise apsw.BusyError from None

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        done = [tap.writing(self._file, offset, data) for tap in self._taps]
        if not all(done):
            return
        super().xWrite(data, offset)
        for tap in self._taps:
            tap.wrote(self._file, offset, data)

    def xTruncate(self, newsize: int) -> None:  # noqa: N802
        super().xTruncate(newsize)
        for tap in self._taps:
            tap.truncated(self._file, newsize)

    def xSync(self, flags: int) -> None:  # noqa: N802
        for tap in self._taps:
            tap.syncing(self._file)
        super().xSync(flags)
        for tap in self._taps:
            tap.synced(self._file)


def _kind(flags: int) -> FileKind:
    if flags & apsw.SQLITE_OPEN_MAIN_DB:
        return "main"
    if flags & apsw.SQLITE_OPEN_WAL:
        return "wal"
    return "journal" if flags & apsw.SQLITE_OPEN_MAIN_JOURNAL else "other"


class CountSyncs(Tap):
    """Counts syncs of any file."""

    def __init__(self) -> None:
        self.count = 0

    def synced(self, file: TappedFile) -> None:
        """See `Tap.synced`."""
        self.count += 1


class KillAtSync(Tap):
    """Ends the process with SIGKILL at its n-th sync, counted from 1: before it is done, or right after."""

    def __init__(self, number: int, *, after: bool = False) -> None:
        self._left, self._after = number, after

    def syncing(self, file: TappedFile) -> None:
        """See `Tap.syncing`."""
        self._left -= 1
        if not self._left and not self._after:
            os.kill(os.getpid(), signal.SIGKILL)

    def synced(self, file: TappedFile) -> None:
        """See `Tap.synced`."""
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)


class FailingDisk(Tap):
    """Refuses each write, or sync, after so many of them, until it is healed."""

    def __init__(
        self, operation: Operation, error: type[apsw.Error], *, after: int = 0, kind: FileKind | None = "wal"
    ) -> None:
        """`kind` says of which files; None: of all."""
        self._operation, self._error, self._left, self._kind = operation, error, after, kind
        self.failed_at_ns: int | None = None
        """When it first refused, on the steady clock; None before that."""

    def heal(self) -> None:
        """Refuses nothing more."""
        self._left = -1

    def writing(self, file: TappedFile, offset: int, data: bytes) -> bool:
        """See `Tap.writing`."""
        self._count("write", file)
        return True

    def syncing(self, file: TappedFile) -> None:
        """See `Tap.syncing`."""
        self._count("sync", file)

    def _count(self, operation: Operation, file: TappedFile) -> None:
        if operation != self._operation or self._kind not in (None, file.kind) or self._left < 0:
            return
        if self._left:
            self._left -= 1
            return
        self.failed_at_ns = self.failed_at_ns or time.monotonic_ns()
        raise self._error(f"the test's disk refuses to {operation}")


class SlowDisk(Tap):
    """Takes longer over each sync."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.syncs = 0

    def syncing(self, file: TappedFile) -> None:
        """See `Tap.syncing`."""
        self.syncs += 1
        time.sleep(self._seconds)


class LosingDisk(Tap):
    """Says of one write, the n-th to files of a kind, that it is done, and does not do it."""

    def __init__(self, number: int, kind: FileKind) -> None:
        self._left, self._kind = number, kind
        self.lost = False

    def writing(self, file: TappedFile, offset: int, data: bytes) -> bool:
        """See `Tap.writing`."""
        if file.kind != self._kind or self.lost:
            return True
        self._left -= 1
        self.lost = self._left <= 0
        return not self.lost
