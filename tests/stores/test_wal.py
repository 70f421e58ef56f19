"""The write-ahead log: a torn end is dropped and told, damage in the middle is refused. Damaged are copies of what a
killed process leaves: the store's file and its log, as they stand between two commits."""

import logging
import random
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import pytest
from tests.stores.shapes import OpenStore, Start, spoken

from perdure.clock import SystemClock, SystemEntropy
from perdure.errors import StoreError
from perdure.stores.schema import reading_options
from perdure.stores.sqlite import SqliteStore
from perdure.stores.verify import verify
from perdure.testing.conformance import Chain, begun, read
from perdure.testing.disks import Tap, TappedFile, tapped

HEADER, FRAME_HEADER, PAGE = 32, 24, 8192
FRAME = FRAME_HEADER + PAGE
PIECES = (2, 1, 90, 2, 40, 3, 70)
"""Events of each commit; the large ones take several frames."""
DAMAGED = "damaged in the middle"


async def opened(path: Path, *, read_only: bool = False) -> SqliteStore:
    return await SqliteStore.open(path, clock=SystemClock(), entropy=SystemEntropy(), read_only=read_only)


def log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


class Crashed:
    """What a killed process left, and copies of it to damage. Frames count from 0."""

    def __init__(self, directory: Path, main: bytes, log: bytes) -> None:
        self.path, self.main, self.log = directory / "crashed.db", main, log
        self.frames = (len(log) - HEADER) // FRAME
        # The size of the file after the commit; zero in a frame that ends no transaction.
        sizes = [struct.unpack(">I", log[at + 4 : at + 8])[0] for at in range(HEADER, len(log) - PAGE, FRAME)]
        self.commits = [number for number, size in enumerate(sizes) if size]

    @property
    def last(self) -> int:
        """The first frame of the last transaction."""
        return self.commits[-2] + 1

    def left(self, log: bytes) -> Path:
        """The store with this log, as after a kill: without shared memory, and nobody's."""
        for leftover in self.path.parent.glob("crashed.db*"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        self.path.write_bytes(self.main)
        log_of(self.path).write_bytes(log)
        return self.path

    def with_bytes(self, offset: int, data: bytes) -> Path:
        return self.left(self.log[:offset] + data + self.log[offset + len(data) :])

    def flipped(self, offset: int, bit: int = 0) -> Path:
        return self.with_bytes(offset, bytes([self.log[offset] ^ 1 << bit]))

    def unchanged(self, log: bytes) -> bool:
        return (self.path.read_bytes(), log_of(self.path).read_bytes()) == (self.main, log)


def at(frame: int, within: int = 0) -> int:
    """Where the byte of a frame stands in the log."""
    return HEADER + frame * FRAME + within


def image(path: Path, directory: Path) -> Crashed:
    return Crashed(directory, path.read_bytes(), log_of(path).read_bytes())


@pytest.fixture
async def crashed(tmp_path: Path) -> Crashed:
    path = tmp_path / "live.db"
    store = await opened(path)
    chain, lease = await begun(store, count=PIECES[0])
    for count in PIECES[1:]:
        await store.append(lease, chain.next(count), None)
    found = image(path, tmp_path)
    await store.close()
    assert len(found.commits) == len(PIECES)
    assert found.commits[-1] == found.frames - 1 > found.last
    return found


def sealed(events: int) -> tuple[object, ...]:
    return tuple(Chain("run-1").next(events))


async def refusals(crashed: Crashed) -> list[str]:
    """How each way in is refused, twice; whatever is damaged stays as it is."""
    before = log_of(crashed.path).read_bytes()
    said = []
    for read_only in (False, True, False, True):
        with pytest.raises(StoreError) as refused:
            await opened(crashed.path, read_only=read_only)
        said.append(str(refused.value))
        assert crashed.unchanged(before)
    report = await verify(crashed.path)
    assert not report.ok
    assert report.first_bad is not None
    said.append(report.first_bad.problem)
    assert crashed.unchanged(before)
    return said


async def must_be_refused(crashed: Crashed, frame: int) -> None:
    for said in await refusals(crashed):
        assert f"{DAMAGED}: from frame {frame + 1} of {crashed.frames} on (byte {at(frame)} of the -wal file)" in said


async def must_lose_only_the_last(crashed: Crashed, torn: int, warned: Callable[[], list[str]]) -> None:
    """The last transaction is dropped and told, and what is appended instead of it reads back."""
    kept = sum(PIECES[:-1])
    report = await verify(crashed.path)
    assert (report.ok, report.events, report.torn) == (True, kept, torn)
    looker = await opened(crashed.path, read_only=True)
    assert (await read(looker, "run-1")).envelopes == sealed(kept)
    await looker.close()
    warned().clear()
    store = await opened(crashed.path)
    frames = "1 frame " if torn == 1 else f"{torn} frames "
    assert [frames in text for text in warned()] == ([True] if torn else [])
    lease = await store.acquire("run-1")
    await store.append(lease, Chain("run-1").next(kept + 5)[kept:], None)
    await store.close()
    again = await opened(crashed.path)
    assert (await read(again, "run-1")).envelopes == sealed(kept + 5)
    await again.close()
    assert (await verify(crashed.path)).ok


class Warnings(logging.Handler):
    """What the package warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def warned() -> Iterator[Callable[[], list[str]]]:
    handler = Warnings()
    logging.getLogger("perdure").addHandler(handler)
    yield lambda: handler.texts
    logging.getLogger("perdure").removeHandler(handler)


# A torn end


async def test_a_log_that_ends_inside_the_last_transaction_loses_that_one_alone(
    crashed: Crashed, warned: Callable[[], list[str]]
) -> None:
    """H06: on frame boundaries, in a frame's header, in its page."""
    within = (0, 1, 9, 16, FRAME_HEADER, FRAME_HEADER + 1, FRAME // 2, FRAME - 1)
    for frame in range(crashed.last, crashed.frames):
        for more in within:
            crashed.left(crashed.log[: at(frame, more)])
            await must_lose_only_the_last(crashed, frame - crashed.last + (more > 0), warned)


async def test_a_log_that_ends_inside_a_character_loses_the_last_transaction_alone(
    crashed: Crashed, warned: Callable[[], list[str]]
) -> None:
    """H06."""
    last_record = crashed.log.rindex(b"vent %d" % (sum(PIECES) - 1)) - 1
    assert crashed.log[last_record - 1 : last_record + 1] == "é".encode()
    crashed.left(crashed.log[:last_record])
    torn = (last_record - at(crashed.last)) // FRAME + 1
    await must_lose_only_the_last(crashed, torn, warned)


async def test_frames_of_the_last_transaction_that_never_reached_the_disk_are_a_torn_end(
    crashed: Crashed, warned: Callable[[], list[str]]
) -> None:
    """H06. A power cut may keep any of them: what was written last may be there, and what was written first not."""
    torn = crashed.frames - crashed.last
    for frame in range(crashed.last, crashed.frames):
        for data in (bytes(FRAME), crashed.log[at(frame) : at(frame, 500)] + bytes(FRAME - 500)):
            crashed.with_bytes(at(frame), data)
            gone = data == bytes(FRAME)
            await must_lose_only_the_last(crashed, torn - gone, warned)


async def test_a_bit_flipped_in_the_last_transaction_is_told_and_loses_that_one_alone(
    crashed: Crashed, warned: Callable[[], list[str]]
) -> None:
    """H06. Nothing was written upon it, so nobody can tell it from a torn one."""
    torn = crashed.frames - crashed.last
    for frame in range(crashed.last, crashed.frames):
        crashed.flipped(at(frame, 3000), 4)
        await must_lose_only_the_last(crashed, torn, warned)


async def test_a_store_whose_end_was_torn_twice_goes_on(
    crashed: Crashed, warned: Callable[[], list[str]], tmp_path: Path
) -> None:
    """H06. Behind the short transaction that took the place of a torn one stand the frames of that one, its commit
    among them."""
    crashed.flipped(at(crashed.last, 3000))
    kept = sum(PIECES[:-1])
    chain = Chain("run-1").next(kept + 2)
    store = await opened(crashed.path)
    lease = await store.acquire("run-1")
    await store.append(lease, chain[kept:], None)
    twice = image(crashed.path, tmp_path)
    await store.abandon()
    assert twice.frames == crashed.frames
    assert twice.commits[-1] == twice.frames - 1
    twice.left(twice.log)
    report = await verify(twice.path)
    assert (report.ok, report.events) == (True, kept + 2)
    assert report.torn > 0
    store = await opened(twice.path)
    assert (await read(store, "run-1")).envelopes == tuple(chain)
    await store.close()


async def test_a_whole_log_is_read_back_whole_without_a_word(crashed: Crashed, warned: Callable[[], list[str]]) -> None:
    crashed.left(crashed.log)
    report = await verify(crashed.path)
    assert (report.ok, report.events, report.torn) == (True, sum(PIECES), 0)
    store = await opened(crashed.path)
    assert (await read(store, "run-1")).envelopes == sealed(sum(PIECES))
    await store.close()
    assert warned() == []


# Damage in the middle


FIELDS = {"page": 1, "size": 7, "salts": 8, "more salts": 15, "checksum": 16, "more checksum": 23, "row": 5000}


@pytest.mark.parametrize("field", FIELDS)
async def test_a_bit_flipped_before_the_last_transaction_is_refused_and_its_frame_named(
    crashed: Crashed, field: str
) -> None:
    """H06. In a frame that ends a transaction, in one that does not, and in the last one that something was written
    upon."""
    for frame in (0, crashed.commits[1] + 1, crashed.commits[2], crashed.commits[-2]):
        crashed.flipped(at(frame, FIELDS[field]), 2)
        await must_be_refused(crashed, frame)


@pytest.mark.parametrize(("begin", "count"), [(0, FRAME_HEADER), (FRAME_HEADER, PAGE), (FRAME_HEADER + 4096, 512)])
async def test_zeros_before_the_last_transaction_are_refused_and_the_frame_named(
    crashed: Crashed, begin: int, count: int
) -> None:
    """H06: in place of a frame's header, of its page, of a sector."""
    for frame in (0, crashed.commits[2] - 1, crashed.commits[2], crashed.commits[-2]):
        if crashed.log[at(frame, begin) : at(frame, begin) + count].strip(b"\0"):
            crashed.with_bytes(at(frame, begin), bytes(count))
            await must_be_refused(crashed, frame)


async def test_a_lost_frame_before_the_last_two_transactions_is_refused(crashed: Crashed) -> None:
    """H06. A frame that ended a transaction and is gone altogether cannot say so; those behind it can."""
    for frame in range(crashed.commits[-3]):
        crashed.with_bytes(at(frame), bytes(FRAME))
        await must_be_refused(crashed, frame)


async def test_a_damaged_header_of_the_log_is_refused(crashed: Crashed) -> None:
    """H06: each bit of it, and zeros."""
    for offset in range(HEADER):
        crashed.flipped(offset, offset % 8)
        with pytest.raises(StoreError, match="header of the write-ahead log"):
            await opened(crashed.path)
    crashed.with_bytes(0, bytes(HEADER))
    assert all("header of the write-ahead log" in said for said in await refusals(crashed))


async def every_frame(crashed: Crashed, flips: Iterator[tuple[int, int]], most_refused: int = 0) -> None:
    """Damage before the last transaction is refused; damage in it is told, and refused at most so often."""
    kept, refused = sum(PIECES[:-1]), 0
    for frame, bit in flips:
        crashed.flipped(at(frame) + bit // 8, bit % 8)
        if frame < crashed.last:
            with pytest.raises(StoreError, match=f"{DAMAGED}: from frame {frame + 1} "):
                await opened(crashed.path)
        else:
            # A few flips make the checksums look as if there had been one commit more.
            report = await verify(crashed.path)
            assert (report.events, report.torn > 0) == (kept, True), (frame, bit)
            assert report.ok or report.first_bad is not None, (frame, bit)
            refused += not report.ok
    assert refused <= most_refused


async def test_a_flip_anywhere_in_any_frame_is_refused_or_told(crashed: Crashed) -> None:
    """H06. A slice of the campaign below."""
    chosen = random.Random(11)
    await every_frame(crashed, ((frame, chosen.randrange(FRAME * 8)) for frame in range(crashed.frames)))


@pytest.mark.soak
async def test_each_bit_of_each_frames_header_and_many_of_its_page_are_refused_or_told(crashed: Crashed) -> None:
    """H06."""
    chosen = random.Random(12)
    header = FRAME_HEADER * 8
    await every_frame(
        crashed,
        (
            (frame, bit)
            for frame in range(crashed.frames)
            for bit in (*range(header), *(chosen.randrange(header, FRAME * 8) for _ in range(100)))
        ),
        most_refused=6,
    )


async def test_a_log_that_began_anew_is_told_from_what_it_held_before(
    open_store: OpenStore, path: Path, tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    """H06. Frames of an earlier round stand behind those of this one, whole and with commits among them."""
    store = await open_store()
    chain, lease = await begun(store)
    for _ in range(30):
        await store.append(lease, chain.next(), None)
    restart = apsw.SQLITE_CHECKPOINT_RESTART
    await store._submit(lambda _: None)
    looker = apsw.Connection(str(path))
    looker.pragma("user_version")
    looker.wal_checkpoint(mode=restart)
    looker.close()
    for _ in range(3):
        await store.append(lease, chain.next(), None)
    found = image(path, tmp_path)
    found.left(found.log)
    report = await verify(found.path)
    assert (report.ok, report.events, report.torn) == (True, len(chain.sealed), 0)
    found.flipped(at(0, 5000))
    with pytest.raises(StoreError, match=f"{DAMAGED}: from frame 1 "):
        await opened(found.path)
    assert warned() == []


async def test_a_process_that_died_as_the_log_began_anew_is_no_damage(path: Path, open_store: OpenStore) -> None:
    """H06. Readers are told that the log is empty before its header is written, which still names what it held. All of
    that is in the store's file by then, so that even damage in it loses nothing."""
    store = await open_store()
    chain, lease = await begun(store)
    for _ in range(5):
        await store.append(lease, chain.next(), None)
    writing = refusing_to_begin_anew(path)
    writing.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_RESTART)
    with pytest.raises(apsw.IOError):
        writing.execute("insert into driver(driver_id, beat, beat_at) values('none', 1, 1)")
    assert writing.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)[0] == 0
    for flip in (False, True):
        if flip:
            write_into(log_of(path), at(image(path, path.parent).commits[1], 3000), b"\xff\xff")
        other = await open_store()
        assert (await read(other, "run-1")).envelopes == tuple(chain.sealed)
        assert (await verify(path)).ok
    writing.close()


def write_into(file: Path, offset: int, data: bytes) -> None:
    with file.open("r+b") as opened_file:
        opened_file.seek(offset)
        opened_file.write(data)


class NoNewLog(Tap):
    """Refuses to write a log's header."""

    def writing(self, file: TappedFile, offset: int, data: bytes) -> bool:
        if file.kind == "wal" and offset == 0 and len(data) == HEADER:
            raise apsw.IOError("the test's disk refuses to write a header")
        return True


def refusing_to_begin_anew(path: Path) -> apsw.Connection:
    with tapped(NoNewLog()):  # a connection stays with the disk it was opened on
        connection = apsw.Connection(str(path))
        connection.pragma("user_version")
    return connection


@pytest.mark.slow
async def test_who_opens_a_store_while_others_write_is_never_refused_or_warned(
    start: Start, path: Path, warned: Callable[[], list[str]]
) -> None:
    """H06, H08. The log begins anew several times meanwhile."""
    writers = [start("drive", path, f"run-{number}", 1_500) for number in range(2)]
    opens = 0
    while any(writer.poll() is None for writer in writers):
        for read_only in (True, False):
            if path.exists():
                store = await opened(path, read_only=read_only)
                await store.runs()
                await store.close()
                opens += 1
        if path.exists():
            assert (await verify(path)).ok
    assert [writer.returncode for writer in writers] == [0, 0]
    assert opens > 10
    assert warned() == []


async def test_who_cannot_write_the_files_finds_the_damage_too(
    crashed: Crashed, start: Start, public_directory: Path
) -> None:
    """H06. To such a user SQLite does not tell how much of the log it reads."""
    there = Crashed(public_directory, crashed.main, crashed.log)
    for offset, said in ((at(there.last), "opened"), (at(3), f"store_error .*{DAMAGED}")):
        there.flipped(offset + 3000)
        for file in (there.path, log_of(there.path)):
            file.chmod(0o444)
        public_directory.chmod(0o777)
        _, reading = spoken(start("read-only", there.path))
        assert re.match(said, reading), (offset, reading)


def test_a_log_left_on_a_disk_that_nobody_can_write_is_not_passed_over(crashed: Crashed) -> None:
    """H06. Opened as a file that never changes, the store would be read without it."""
    crashed.left(crashed.log)
    assert reading_options(crashed.path, True) == reading_options(crashed.path, False) == ""
    for empty in (crashed.log[:HEADER], b""):
        crashed.left(empty)
        assert reading_options(crashed.path, True) == "?immutable=1"
    log_of(crashed.path).unlink()
    assert reading_options(crashed.path, True) == "?immutable=1"
    assert reading_options(crashed.path, False) == ""


async def test_a_reader_finds_what_another_recovery_lost(crashed: Crashed) -> None:
    """H06. The log is damaged under a reader that is there already, and read anew by a writer after the shared memory
    was lost with a writer killed inside it."""
    crashed.left(crashed.log)
    looker = await opened(crashed.path, read_only=True)
    assert (await read(looker, "run-1")).envelopes == sealed(sum(PIECES))
    write_into(log_of(crashed.path), at(crashed.commits[2], 3000), b"\xff\xff\xff")
    write_into(crashed.path.with_name(crashed.path.name + "-shm"), 0, bytes(10))
    with pytest.raises(StoreError, match=DAMAGED):
        await looker.read("run-1")
    with pytest.raises(StoreError, match=DAMAGED):
        await opened(crashed.path)
    await looker.close()
