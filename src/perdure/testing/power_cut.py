"""What a disk may hold after the power was cut: every write and sync of some files is recorded, and the files are built
anew as they could have been found at any moment.

What was synced is there. Of what was not, each sector is there or is not, in any order: a disk keeps writes back, takes
later ones first, and tears them at its sectors. A file that grew by writes that were lost holds zeros there, or has not
grown. Nothing is said of files that were deleted: they may still be there.

    recorder = Recorder()
    with tapped(recorder):
        ...                     # a mark says where in the record something happened outside
        recorder.mark("paid")
    for image in images(recorder, seed=1):
        image.write(folder)
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from perdure.testing.disks import Tap, TappedFile

SECTOR_BYTES = 512
"""The unit a disk writes whole: what SQLite itself assumes of one."""
Loss = Literal["all", "none", "some"]
"""How much of what was not synced is lost."""


@dataclass(frozen=True)
class Write:
    """Bytes at a place of a file."""

    path: str
    offset: int
    data: bytes


@dataclass(frozen=True)
class Truncate:
    """A file's new size."""

    path: str
    size: int


@dataclass(frozen=True)
class Sync:
    """All of a file's writes before this are on the disk after it."""

    path: str


@dataclass(frozen=True)
class Mark:
    """Something happened outside, after everything before it in the record."""

    what: object


Record = Write | Truncate | Sync | Mark


class Recorder(Tap):
    """Records what is done to files. Appends from several threads stay in the order they were done in."""

    def __init__(self) -> None:
        self.start: dict[str, bytes] = {}
        """The files as they were before the first record."""
        self.records: list[Record] = []

    def begin(self, *files: Path) -> None:
        """Takes the files as they are now, safely on the disk, and forgets what was recorded before."""
        self.start = {str(file): file.read_bytes() for file in files if file.exists()}
        self.records.clear()

    def mark(self, what: object) -> None:
        """Records that something happened now."""
        self.records.append(Mark(what))

    def wrote(self, file: TappedFile, offset: int, data: bytes) -> None:
        """See `Tap.wrote`."""
        self.records.append(Write(file.path, offset, bytes(data)))

    def truncated(self, file: TappedFile, size: int) -> None:
        """See `Tap.truncated`."""
        self.records.append(Truncate(file.path, size))

    def synced(self, file: TappedFile) -> None:
        """See `Tap.synced`."""
        self.records.append(Sync(file.path))


@dataclass(frozen=True)
class Image:
    """The files as they could be found after a power cut."""

    at: int
    """How many records lie before the cut."""
    loss: Loss
    files: dict[str, bytes]
    marks: tuple[object, ...]
    """What had happened outside by then."""

    def __str__(self) -> str:
        return f"power cut after {self.at} records, {self.loss} of what was not synced lost"

    def write(self, folder: Path) -> None:
        """Puts the files, by their own names, into a folder."""
        for path, data in self.files.items():
            (folder / Path(path).name).write_bytes(data)


@dataclass
class _File:
    """One file while the record is gone through."""

    synced: bytearray
    pending: list[Write | Truncate] = field(default_factory=list)

    def sync(self) -> None:
        for one in self.pending:
            _apply(self.synced, one)
        self.pending.clear()

    def found(self, loss: Loss, chance: random.Random) -> bytes:
        data = bytearray(self.synced)
        for one in _kept(self.pending, loss, chance):
            _apply(data, one)
        return bytes(data)


def images(recorder: Recorder, *, seed: int, some: int = 2) -> Iterator[Image]:
    """Every image: just before each sync and at each mark, with all, none, and `some` times a part of what was not
    synced lost."""
    chance = random.Random(seed)
    losses: list[Loss] = ["all", "none"]
    losses.extend(["some"] * some)
    files = {path: _File(bytearray(data)) for path, data in recorder.start.items()}
    marks: list[object] = []
    for at, record in enumerate(recorder.records):
        if isinstance(record, Mark):
            marks.append(record.what)
        if isinstance(record, Mark | Sync):
            for loss in losses:
                found = {path: file.found(loss, chance) for path, file in files.items()}
                yield Image(at, loss, found, tuple(marks))
        if isinstance(record, Sync):
            files.setdefault(record.path, _File(bytearray())).sync()
        elif isinstance(record, Write | Truncate):
            files.setdefault(record.path, _File(bytearray())).pending.append(record)


def _kept(pending: Sequence[Write | Truncate], loss: Loss, chance: random.Random) -> Iterator[Write | Truncate]:
    if loss == "all":
        return
    for one in pending:
        if loss == "none":
            yield one
        elif isinstance(one, Truncate):
            if chance.random() < 0.5:
                yield one
        else:
            yield from _torn(one, chance)


def _torn(write: Write, chance: random.Random) -> Iterator[Write]:
    """The write whole, not at all, or some of its sectors."""
    fate = chance.random()
    if fate < 1 / 3:
        return
    if fate < 2 / 3:
        yield write
        return
    end, at = write.offset + len(write.data), write.offset
    while at < end:
        until = min(end, (at // SECTOR_BYTES + 1) * SECTOR_BYTES)
        if chance.random() < 0.5:
            yield Write(write.path, at, write.data[at - write.offset : until - write.offset])
        at = until


def _apply(data: bytearray, record: Write | Truncate) -> None:
    if isinstance(record, Truncate):
        del data[record.size :]
        data.extend(bytes(record.size - len(data)))
        return
    data.extend(bytes(max(0, record.offset - len(data))))
    data[record.offset : record.offset + len(record.data)] = record.data
