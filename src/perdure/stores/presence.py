"""Whether a store's files are still the ones that were opened.

SQLite goes on over a file that was removed, replaced or cut off under it: every commit succeeds, and none can be found
again. So it is looked whether the store's name still leads to what was opened: the file, the log, and the index of the
log (`-shm`), through which processes keep out of each other's way.
"""

import os
from pathlib import Path

import apsw

from perdure.errors import StoreError
from perdure.stores.wal import bytes_of, frames_read, log_path

_LOOKS = 3


class Presence:
    """The files of one connection, as its first check found them. Costs three calls of stat a check, and a look at the
    log where a file has become shorter."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._beside = (log_path(path), path.with_name(path.name + "-shm"))
        self._known: dict[Path, os.stat_result] = {}

    def check(self, connection: apsw.Connection) -> None:
        """Called between two transactions.

        Raises:
            StoreError: a file is gone, is another one, or was cut off.
            apsw.Error: the log cannot be looked at.
        """
        log, index = self._beside
        if self._shorter(self._path) and not self._smaller(connection):
            raise self._lost(self._path, "was cut off")
        if self._shorter(log) and not self._begun_anew(connection):
            raise self._lost(log, "was cut off")
        self._shorter(index)  # it comes and goes with nothing in it that counts, but not while it is open

    def _shorter(self, path: Path) -> bool:
        """Whether the file is shorter than it was; it must be the same one."""
        before, now = self._known.get(path), _stat(path)
        if now is not None:
            self._known[path] = now
        if before is None:
            return False
        if now is None:
            raise self._lost(path, "was removed")
        if (before.st_dev, before.st_ino) != (now.st_dev, now.st_ino):
            raise self._lost(path, "was replaced by another file")
        return now.st_size < before.st_size

    def _smaller(self, connection: apsw.Connection) -> bool:
        """Whether the file is shorter because the database is, as after a VACUUM. Pages that are new since stand in the
        log."""
        pages, page_bytes = connection.pragma("page_count"), connection.pragma("page_size")
        assert isinstance(pages, int)
        assert isinstance(page_bytes, int)
        in_file = max(pages - (frames_read(connection) or 0), 1)
        return self._path.stat().st_size >= in_file * page_bytes

    def _begun_anew(self, connection: apsw.Connection) -> bool:
        """Whether the log is shorter because what it held has been moved into the file. Others may write meanwhile, so
        one look that finds it whole is enough."""
        for _ in range(_LOOKS):
            frames = frames_read(connection)
            if frames is None or self._beside[0].stat().st_size >= bytes_of(frames, connection):
                return True
        return False

    def _lost(self, path: Path, how: str) -> StoreError:
        return StoreError(
            f"{path.name} {how} while the store was open: what is written now would not be found again",
            where=f"store {self._path}",
            next="put back the store's file and the -wal file that belongs to it, see that `perdure verify` accepts "
            "them, then resume: what was not confirmed may or may not be stored",
        )


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
