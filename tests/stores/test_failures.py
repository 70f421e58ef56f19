"""Disks that are full, broken or read-only, and locks that do not clear."""

import asyncio
import re
import shutil
import time
from pathlib import Path

import apsw
import pytest
from tests.stores.shapes import OpenStore, Start, spoken

from perdure.errors import StoreError
from perdure.journal.envelope import check_chain
from perdure.stores.faults import translated
from perdure.testing.conformance import begun, read


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (("limited-files",), "reading or writing the file failed"),
        (("failing-disk", "write", "FullError", 40), "the disk is full"),
        (("failing-disk", "sync", "IOError", 25), "reading or writing the file failed"),
    ],
    ids=["file size limit", "full at a write", "error at a sync"],
)
async def test_a_disk_that_fails_stops_the_store_and_loses_nothing_that_was_confirmed(
    open_store: OpenStore, start: Start, path: Path, program: tuple[object, ...], says: str
) -> None:
    """O1, O17."""
    process = start(program[0], path, *program[1:])
    failed, later = spoken(process)
    confirmed, code, message = failed.split(" ", 2)
    assert (code, later) == ("store_error", "later: store_error")
    assert says in message
    assert str(path) in message
    # The failed process is gone or not: others go on at once.
    store = await open_store()
    journal = (await read(store, "full")).envelopes
    check_chain("full", journal)
    assert int(confirmed) <= len(journal) <= int(confirmed) + 20
    lease = await store.acquire("full")
    await store.release(lease)
    assert (await read(store, "before")).envelopes


async def test_a_failed_commit_frees_the_lock_for_another_process_while_the_first_still_lives(
    open_store: OpenStore, start: Start, path: Path
) -> None:
    """H08. The other process is this one; the failing one waits for its next line after it failed."""
    process = start("failing-disk-and-wait", path)
    assert process.stdout is not None
    assert "store_error" in process.stdout.readline()
    began = time.monotonic()
    await begun(await open_store(), "other")
    assert time.monotonic() - began < 2
    assert process.poll() is None


@pytest.mark.parametrize("locked", ["file", "directory"])
async def test_a_store_that_cannot_be_written_says_so(start: Start, public_directory: Path, locked: str) -> None:
    path = public_directory / "store.db"
    assert start("drive", path, "before", 3).wait(timeout=30) == 0
    path.chmod(0o444)
    path.with_name("store.db.drivers").chmod(0o755)
    public_directory.chmod(0o777 if locked == "file" else 0o555)
    writing, reading = spoken(start("read-only", path))
    assert writing.startswith("store_error ")
    assert "read-only" in writing
    if locked == "file":
        assert reading == "opened 7"


@pytest.mark.slow
async def test_a_lock_that_does_not_clear_is_an_error_within_bounds_and_the_store_goes_on_afterwards(
    open_store: OpenStore, path: Path
) -> None:
    """H08."""
    store = await open_store()
    chain, lease = await begun(store)
    other = apsw.Connection(str(path))
    other.execute("begin immediate")
    began = time.monotonic()
    piece = chain.next()
    with pytest.raises(StoreError, match="the store is locked") as caught:
        await store.append(lease, piece, None)
    took = time.monotonic() - began
    assert 9 < took < 15
    said = re.search(r"held its lock for (\d+\.\d) s", caught.value.found)
    assert said is not None
    assert 9 < float(said[1]) <= took + 0.1
    other.execute("rollback")
    other.close()
    await store.append(lease, piece, None)
    assert (await read(store, "run-1")).envelopes == tuple(chain.sealed)


def test_a_lock_that_was_not_waited_for_is_told_without_a_time(path: Path) -> None:
    holder, impatient = apsw.Connection(str(path)), apsw.Connection(str(path))
    holder.execute("begin immediate")
    with pytest.raises(StoreError, match="locked: another process holds its lock") as caught, translated(path):
        impatient.execute("begin immediate")
    assert re.search(r"\d+(\.\d+)? s\b", caught.value.found) is None
    holder.close()
    impatient.close()


@pytest.mark.parametrize("read_only", [False, True], ids=["writing", "reading"])
async def test_a_file_in_the_place_of_the_lock_files_directory_is_named_and_left_as_it_was(
    open_store: OpenStore, path: Path, read_only: bool
) -> None:
    """C16."""
    killed, locks = await open_store(), path.with_name(path.name + ".drivers")
    await begun(killed)
    await killed.abandon()
    shutil.rmtree(locks)
    locks.write_text("in the way")
    with pytest.raises(StoreError, match="it is no directory") as caught:
        await (await open_store(read_only=read_only)).runs()  # which asks whether the killed driver lives
    assert caught.value.where == str(locks)
    assert "move it away" in caught.value.next
    assert locks.read_text() == "in the way"


async def test_a_lock_that_clears_in_time_is_waited_for(open_store: OpenStore, path: Path) -> None:
    """H08."""
    store = await open_store()
    chain, lease = await begun(store)
    other = apsw.Connection(str(path))
    other.execute("begin immediate")
    waiting = store.append(lease, chain.next(), None)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 0.5)
    other.execute("rollback")
    other.close()
    await asyncio.wait_for(waiting, 2)
