"""The write-ahead log beside a store's file: proves, when a store is opened, that only its end can be missing.

SQLite reads the log up to the first frame that is not what was written, and takes everything behind it for a
transaction that was never finished. That is right for a torn end. After damage in the middle it loses commits that had
been synced, without a word, and the next commit overwrites them. The two are told apart by what stands behind: a
transaction begins only after the one before it was synced (`synchronous=FULL`), so a commit that something was written
upon cannot have been torn. (https://sqlite.org/fileformat2.html, section 4)
"""

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import apsw
import msgspec

from perdure.errors import StoreError
from perdure.stores.faults import translated

Sums = tuple[int, int]
"""A running checksum: two words of 32 bits."""

_HEADER_BYTES = 32
_HEADER = struct.Struct(">IIII8sII")
_FRAME = struct.Struct(">II8sII")
_MAGIC = 0x377F0682
"""The lowest bit says whether checksums are made over words in big-endian order."""
_FORMAT = 3_007_000
_SALTS = slice(8, 16)
"""In a frame's header. What stands before them goes into the checksum, and so does the page."""
_WORD = 0xFFFFFFFF
# SQLite syncs the header before it writes the first frame, and it lies in one sector: it cannot have been torn.
_HEADER_DAMAGE = (
    "the header of the write-ahead log (byte 0 of the -wal file) is damaged: no commit in it can be reached"
)


class LogReport(msgspec.Struct, frozen=True):
    """What a look at the log found."""

    frames: int
    """How many frames are read back."""
    torn: int
    """How many stand behind them that belong to no finished transaction: one that was cut off or taken back, or, while
    others write, one that is not finished yet."""
    damage: str | None
    """Where the log is damaged so that commits behind it cannot be reached; None when nothing tells of any."""
    header: bytes = b""


class _Frame(msgspec.Struct, frozen=True):
    page: int
    size: int
    """Pages of the file after the commit; zero when the frame does not end a transaction."""
    salts: bytes
    sums: Sums


class _Log:
    """The frames of one log whose header is sound. What others cut off meanwhile reads as zeros."""

    def __init__(self, descriptor: int, header: bytes) -> None:
        self._descriptor = descriptor
        magic, _, page_bytes, _, salts, *sums = _HEADER.unpack(header)
        self.page_bytes: int = page_bytes
        self.salts: bytes = salts
        self.begin: Sums = (sums[0], sums[1])
        self._big_endian = bool(magic & 1)
        length = os.fstat(descriptor).st_size - _HEADER_BYTES
        self.count: int
        self.count, self._rest = divmod(length, _FRAME.size + self.page_bytes)

    def offset(self, number: int) -> int:
        """Where the frame begins in the file; the first has number 1."""
        return _HEADER_BYTES + (number - 1) * (_FRAME.size + self.page_bytes)

    def frame(self, number: int) -> _Frame:
        """The header of a frame."""
        page, size, salts, *sums = _FRAME.unpack(self._read(_FRAME.size, number))
        return _Frame(page, size, salts, (sums[0], sums[1]))

    def of_this_log(self, number: int) -> bool:
        """Whether the frame is there and was written since the log last began anew."""
        return 0 < number <= self.count and self.frame(number).salts == self.salts

    def cut_short(self) -> bool:
        """Whether the file ends inside a frame of this log."""
        salts = self._read(min(self._rest, _SALTS.stop), self.count + 1)[_SALTS]
        if not salts:
            return self._rest > 0 and (self.count == 0 or self.of_this_log(self.count))
        return self.salts.startswith(salts)

    def fits(self, number: int, before: Sums) -> bool:
        """Whether the frame's checksum is right behind the one before it. The salts do not go into it."""
        if number > self.count:
            return False
        head, page = self._words(number)
        return _summed(page, _summed(head, before)) == self.frame(number).sums

    def follows(self, number: int, before: Sums) -> bool:
        """Whether the frame is what was written behind one with that checksum."""
        return self.of_this_log(number) and self.fits(number, before)

    def sums_at(self, number: int) -> Sums:
        """The checksum that the next frame goes on from."""
        return self.frame(number).sums if number else self.begin

    def committed(self) -> int:
        """How many frames recovery reads back: all up to the last commit before the first one that does not follow."""
        number, commit, before = 1, 0, self.begin
        while self.follows(number, before):
            before = self.frame(number).sums
            if self.frame(number).size:
                commit = number
            number += 1
        return commit

    def written_head(self, number: int, before: Sums) -> tuple[int, int, Sums]:
        """Page, size and checksum of a frame as they were when the next one was written behind it. The checksums around
        the frame tell them: the last is right when the next frame is as it was written, the others when the page is,
        too."""
        (head, next_page), (_, page) = self._words(number + 1), self._words(number)
        sums = _unsummed(head, _unsummed(next_page, self.frame(number + 1).sums))
        first, second = _unsummed(page, sums)
        page_word, size_word = (first - before[0] - before[1]) & _WORD, (second - before[1] - first) & _WORD
        return self._number(page_word), self._number(size_word), sums

    def _words(self, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the checksum is made over: of the frame's header, and of its page."""
        data = self._read(_FRAME.size + self.page_bytes, number)
        return self._split(data[: _SALTS.start]), self._split(data[_FRAME.size :])

    def _read(self, count: int, number: int) -> bytes:
        return os.pread(self._descriptor, count, self.offset(number)).ljust(count, b"\0")

    def _split(self, data: bytes) -> tuple[int, ...]:
        return struct.unpack(f"{'>' if self._big_endian else '<'}{len(data) // 4}I", data)

    def _number(self, word: int) -> int:
        """The number in a header, which is always big-endian, that its checksum took as this word."""
        return word if self._big_endian else int.from_bytes(word.to_bytes(4, "little"), "big")


class Watch:
    """Looks at the log again when less of it is read back than before, as after somebody else's recovery."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: int | None = None

    def look(self, connection: apsw.Connection) -> None:
        """Called before a read.

        Raises:
            StoreError: commits in the log cannot be reached.
        """
        with translated(self._path):
            frames = frames_read(connection)
        if self._seen is None or (frames is not None and frames < self._seen):
            frames = must_be_whole(connection, self._path).frames
        self._seen = self._seen if frames is None else frames


def must_be_whole(connection: apsw.Connection, path: Path) -> LogReport:
    """Refuses a store whose log holds commits that cannot be reached.

    Raises:
        StoreError: it does.
    """
    report = inspect(connection, path)
    if report.damage is not None:
        raise StoreError(
            f"{report.damage}; nothing was changed",
            where=f"store {path}",
            next="restore the store, its -wal file included, from a copy that `perdure verify` accepts",
        )
    return report


def inspect(connection: apsw.Connection, path: Path) -> LogReport:
    """Looks at the log of a store that is open. Others may write meanwhile."""
    report = _look(connection, path)
    while report.damage is not None:
        again = _look(connection, path)
        if again == report:
            break
        report = again  # somebody wrote while it was looked at
    return report


def torn_end(frames: int) -> str:
    """What is said of frames that belong to no finished transaction."""
    number = "1 frame" if frames == 1 else f"{frames} frames"
    return f"{number} at the end of the write-ahead log belong to no finished transaction and count for nothing"


def bytes_of(frames: int, connection: apsw.Connection) -> int:
    """How long a log with so many frames is at least, in bytes."""
    return _HEADER_BYTES + frames * (_FRAME.size + _page_bytes(connection)) if frames else 0


def frames_read(connection: apsw.Connection) -> int | None:
    """How many frames of the log are read back; None where SQLite does not tell: this user cannot write the files, or
    the connection is in the middle of a read."""
    connection.pragma("user_version")  # before its first read a connection knows of no log
    try:
        return max(connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)[0], 0)
    except (apsw.ReadOnlyError, apsw.LockedError):
        return None


def log_path(path: Path) -> Path:
    """The log's file."""
    return path.with_name(path.name + "-wal")


def holds_frames(path: Path) -> bool:
    """Whether anything may have to be read back from the log."""
    try:
        return log_path(path).stat().st_size > _HEADER_BYTES
    except FileNotFoundError:
        return False


def _look(connection: apsw.Connection, path: Path) -> LogReport:
    with translated(path):
        frames = frames_read(connection)
        try:
            # None of SQLite's locks lies on this file, so closing it drops none.
            descriptor = os.open(log_path(path), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return LogReport(0, 0, None)
        try:
            header = os.pread(descriptor, _HEADER_BYTES, 0)
            if _sound(header):
                log = _Log(descriptor, header)
                return _report(log, log.committed() if frames is None else frames, header, path)
            if os.fstat(descriptor).st_size < _HEADER_BYTES + _FRAME.size + _page_bytes(connection):
                return LogReport(0, int(len(header) == _HEADER_BYTES), None, header)
            return LogReport(0, 0, _HEADER_DAMAGE, header)
        finally:
            os.close(descriptor)


def _page_bytes(connection: apsw.Connection) -> int:
    page_bytes = connection.pragma("page_size")
    assert isinstance(page_bytes, int)
    return page_bytes


def _sound(header: bytes) -> bool:
    if len(header) < _HEADER_BYTES:
        return False
    magic, form, _, _, _, *sums = _HEADER.unpack(header)
    order = ">" if magic & 1 else "<"
    return (
        magic | 1 == _MAGIC | 1
        and form == _FORMAT
        and _summed(struct.unpack(f"{order}6I", header[:24]), (0, 0)) == tuple(sums)
    )


def _report(log: _Log, frames: int, header: bytes, path: Path) -> LogReport:
    behind = sum(log.of_this_log(number) for number in range(frames + 1, log.count + 1))
    if not behind and log.fits(frames + 1, log.sums_at(frames)):
        behind = 1  # only its salts are not what they were
    damage = _damage(log, frames, path.stat().st_size // log.page_bytes) if behind else None
    return LogReport(frames, behind + log.cut_short(), damage, header)


def _damage(log: _Log, frames: int, pages: int) -> str | None:
    number, before = frames + 1, log.sums_at(frames)
    while log.follows(number, before):
        if log.frame(number).size:
            # A commit that no reader was told of yet, or a log that is about to begin anew: not what recovery leaves.
            return None
        number, before = number + 1, log.frame(number).sums
    # A commit adds no more pages than it has frames. Without one, the file may have grown by what was moved into it.
    least, pages = (log.frame(frames).size,) * 2 if frames else (1, pages)
    was_commit = _was_commit(log, number, before, least, pages + number - frames)
    if not (was_commit or _commit_written_upon(log, number + 1)):
        return None
    commits = sum(log.of_this_log(later) and log.frame(later).size > 0 for later in range(number, log.count + 1))
    return (
        f"the write-ahead log is damaged in the middle: from frame {number} of {log.count} on (byte "
        f"{log.offset(number)} of the -wal file) at least {commits} commits are there that cannot be reached"
    )


def _was_commit(log: _Log, number: int, before: Sums, least: int, most: int) -> bool:
    """Whether the first frame that is not what was written ended a transaction that the next one was written upon.

    Either its header is damaged or its page is, so neither is believed unless the size is one that the file can have
    had: a damaged page makes the checksums tell another one.
    """
    if not log.of_this_log(number + 1):
        return False
    page, size, sums = log.written_head(number, before)
    frame = log.frame(number)
    if (page, size) == (frame.page, 0):
        return False  # only the size in its header is not what it was
    return (least <= size <= most and 0 < page <= size) or (frame.sums == sums and least <= frame.size <= most)


def _commit_written_upon(log: _Log, first: int) -> bool:
    return any(_written_upon(log, number) for number in range(first, log.count))


def _written_upon(log: _Log, number: int) -> bool:
    frame = log.frame(number)
    return frame.size > 0 and log.follows(number + 1, frame.sums)


def _summed(words: Sequence[int], sums: Sums) -> Sums:
    first, second = sums
    for one, two in zip(words[::2], words[1::2], strict=True):
        first = (first + one + second) & _WORD
        second = (second + two + first) & _WORD
    return first, second


def _unsummed(words: Sequence[int], sums: Sums) -> Sums:
    """The checksum before these words, from the one after them."""
    first, second = sums
    for one, two in zip(words[-2::-2], words[::-2], strict=True):
        second = (second - two - first) & _WORD
        first = (first - one - second) & _WORD
    return first, second
