"""Folders that belong to one test alone, and whole files in them."""

import errno
from pathlib import Path

from perdure.errors import UsageError

_NAMED = 3
_ROOM_BYTES = 1_048_576
"""Room that a drive's store and notes may need. They leave less than they needed when they fail for want of it."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""What a system says of a disk that is full, or of a share of it that is used up."""


def must_be_empty(folder: Path) -> None:
    """Makes the folder; refuses one that holds anything, since what a test puts there is killed, changed and removed.

    Raises:
        UsageError: it is not empty, or no folder, or cannot be had.
    """
    another = "name an empty or a new folder"
    where = f"{folder!s:.200}"
    try:
        found = _entries(folder)
    except NotADirectoryError:
        raise UsageError("it is no folder", where=where, next=another) from None
    except OSError as error:
        raise UsageError(f"it cannot be used: {error.strerror}", where=where, next=another) from error
    if found:
        names = ", ".join(found[:_NAMED]) + " and more" * (len(found) > _NAMED)
        raise UsageError(f"it is not empty: {names}", where=where, next=another)


def _entries(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except FileNotFoundError:
        folder.mkdir(parents=True)
        return []


def write_whole(path: Path, data: bytes) -> None:
    """Makes the file, or does not: it is never there in part, whenever the process ends and whatever the disk holds.

    Raises:
        OSError: it cannot be written. What could be is left beside it, so that a full disk stays full and can be told.
    """
    beside = path.with_name(path.name + ".part")
    beside.write_bytes(data)
    beside.replace(path)


def is_full(folder: Path) -> bool:
    """Whether the disk has no room there for what one drive needs (1 MiB)."""
    probe = folder / "room"
    try:
        probe.write_bytes(bytes(_ROOM_BYTES))
    except OSError as error:
        if error.errno not in FULL:
            raise
        return True
    finally:
        probe.unlink(missing_ok=True)
    return False
