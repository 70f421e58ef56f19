"""Whether a store's files are still the ones that were opened.

SQLite goes on over a file that was removed, replaced or cut off under it: every commit succeeds, and none can be found
again. So a commit counts only while the store's name still leads to what was opened.
"""

import os
from pathlib import Path

import apsw

from perdure.errors import StoreError
from perdure.stores.faults import translated
from perdure.stores.wal import bytes_of, frames_read, log_path

_LOOKS = 3


class Presence:
    """The files of one connection, as its first check found them. Costs two calls of stat a check."""

    def __init__(self, path: Path) -> None:
        self._path, self._log_path = path, log_path(path)
        self._file: os.stat_result | None = None
        self._log: os.stat_result | None = None

    def check(self, connection: apsw.Connection) -> None:
        """Called between two transactions.

        Raises:
            StoreError: a file is gone, is another one, or was cut off.
        """
        with translated(self._path):
            file, log = _stat(self._path), _stat(self._log_path)
            self._must_be_same(self._path, self._file, file)
            self._must_be_same(self._log_path, self._log, log)
            if _shorter(self._file, file) and not self._vacuumed(connection):
                raise self._lost(self._path, "was cut off")
            if _shorter(self._log, log) and not self._begun_anew(connection):
                raise self._lost(self._log_path, "was cut off")
        self._file, self._log = file, log

    def _must_be_same(self, path: Path, before: os.stat_result | None, now: os.stat_result | None) -> None:
        if before is None:
            return
        if now is None:
            raise self._lost(path, "was removed")
        if (before.st_dev, before.st_ino) != (now.st_dev, now.st_ino):
            raise self._lost(path, "was replaced by another file")

    def _vacuumed(self, connection: apsw.Connection) -> bool:
        """Whether the file is shorter because the database is."""
        pages, page_bytes = connection.pragma("page_count"), connection.pragma("page_size")
        assert isinstance(pages, int)
        assert isinstance(page_bytes, int)
        return self._path.stat().st_size >= pages * page_bytes

    def _begun_anew(self, connection: apsw.Connection) -> bool:
        """Whether the log is shorter because what it held has been moved into the file. Others may write meanwhile, so
        one look that finds it whole is enough."""
        for _ in range(_LOOKS):
            frames = frames_read(connection)
            if frames is None or self._log_path.stat().st_size >= bytes_of(frames, connection):
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


def _shorter(before: os.stat_result | None, now: os.stat_result | None) -> bool:
    return before is not None and now is not None and now.st_size < before.st_size
