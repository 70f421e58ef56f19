"""Folders that belong to one test alone."""

from pathlib import Path

from perdure.errors import UsageError

_NAMED = 3


def must_be_empty(folder: Path) -> None:
    """Makes the folder; refuses one that holds anything, since what a test puts there is killed, changed and removed.

    Raises:
        UsageError: it is not empty, or no folder.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError("it is no folder", where=str(folder), next="name an empty or a new folder")
    found = sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []
    if found:
        names = ", ".join(found[:_NAMED]) + " and more" * (len(found) > _NAMED)
        raise UsageError(f"it is not empty: {names}", where=str(folder), next="name an empty or a new folder")
    folder.mkdir(parents=True, exist_ok=True)
