"""Turns what SQLite and the file system report into errors that say what was found and what to do: the one place that
does."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw

from perdure.errors import StoreError

BUSY_SECONDS = 10
"""Longest wait for another process's lock. A commit takes milliseconds, so a lock held longer is stuck or held on
purpose."""

_RESUME = "then resume: what was not confirmed may or may not be stored, and is read at the next open"

_CHECK = (
    "check the path and its permissions; a store whose -wal file lies on a disk that nobody can write is read from a "
    "copy of both files elsewhere"
)


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Raises StoreError for errors of SQLite or the file system."""
    try:
        yield
    except (apsw.Error, OSError) as error:
        raise store_error(error, path) from error


def store_error(error: BaseException, path: Path, *, waited_s: float | None = None) -> StoreError:
    """The StoreError for anything that went wrong in or around the store's file. `waited_s` is how long a lock was
    waited for, where that was measured: SQLite gives up at once where waiting cannot help."""
    if isinstance(error, StoreError):
        return error
    found, next_step = _sqlite_words(error, waited_s) if isinstance(error, apsw.Error) else _system_words(error)
    return StoreError(f"{found} ({type(error).__name__}: {error})", where=f"store {path}", next=next_step)


def _sqlite_words(error: apsw.Error, waited_s: float | None) -> tuple[str, str]:
    match error:
        case apsw.BusyError() | apsw.LockedError():
            held = "holds its lock" if waited_s is None else f"held its lock for {waited_s:.1f} s"
            return f"the store is locked: another process {held}", "end that process, " + _RESUME
        case apsw.FullError():
            return "the disk is full", "free space on that file system, " + _RESUME
        case apsw.ReadOnlyError() | apsw.PermissionsError():
            return (
                "the store is read-only",
                "make the file, those beside it (-wal, -shm) and its directory writable, " + _RESUME,
            )
        case apsw.NotADBError():
            return "the file is not a Perdure store", "name another file, or restore this one from a copy"
        case apsw.CorruptError():
            return "the file is damaged", "run `perdure verify`, and restore the file from a copy that it accepts"
        case apsw.CantOpenError():
            return "the file cannot be opened", _CHECK
        case apsw.IOError():
            return "reading or writing the file failed", "check the disk, its quota and its space, " + _RESUME
        case _:
            return "the store failed", "run `perdure verify`, " + _RESUME


def _system_words(error: BaseException) -> tuple[str, str]:
    code = error.errno if isinstance(error, OSError) else None
    if code in {errno.EROFS, errno.EACCES, errno.EPERM}:
        return "the store's directory is read-only", "make it writable, or name a store elsewhere"
    if code in {errno.ENOSPC, errno.EDQUOT}:
        return "the disk is full", "free space on that file system, " + _RESUME
    return "the store cannot be used", "check the path and its permissions"
