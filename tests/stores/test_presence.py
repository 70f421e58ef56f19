"""A store's files taken away while it is open: removed, replaced, cut off; and what only looks like it."""

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest
from tests.stores.shapes import OpenStore

from perdure.errors import StoreError
from perdure.ports import Lease
from perdure.stores.sqlite import SqliteStore
from perdure.stores.writer import LOOK_NS
from perdure.testing.conformance import begun, read


def _log(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def _replace(path: Path) -> None:
    shutil.copy(path, path.with_name("copy"))
    path.with_name("copy").replace(path)


def _cut_log(path: Path) -> None:
    os.truncate(_log(path), 0)


def _cut_file(path: Path) -> None:
    os.truncate(path, 0)


def _move_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))


TAKEN: list[tuple[Callable[[Path], object], str]] = [
    (Path.unlink, r"store.db was removed"),
    (_replace, r"store.db was replaced"),
    (_cut_file, r"store.db was cut off"),
    (lambda path: _log(path).unlink(), r"store.db-wal was removed"),
    (lambda path: _replace(_log(path)), r"store.db-wal was replaced"),
    (_cut_log, r"store.db-wal was cut off"),
    (_move_folder, r"store.db was removed"),
    (lambda path: path.with_name(path.name + "-shm").unlink(), r"store.db-shm was removed"),
]
NAMES = [
    "removed",
    "replaced",
    "cut off",
    "log removed",
    "log replaced",
    "log cut off",
    "folder moved",
    "index removed",
]


@pytest.mark.parametrize(("take", "says"), TAKEN, ids=NAMES)
async def test_nothing_is_confirmed_to_a_store_that_was_taken_away(
    open_store: OpenStore, path: Path, take: Callable[[Path], object], says: str
) -> None:
    """O1: what is told to be durable is found again under the store's name."""
    store = await open_store()
    chain, lease = await begun(store)
    await store.append(lease, chain.next(), None)
    await asyncio.sleep(2 * LOOK_NS / 1e9)
    take(path)
    with pytest.raises(StoreError, match=says):
        await store.append(lease, chain.next(), None)
    with pytest.raises(StoreError, match=says):
        await store.append(lease, chain.next(), None)


async def test_a_heartbeat_notices_a_store_that_was_taken_away(open_store: OpenStore, path: Path) -> None:
    """A holder that waits for a slow tool appends nothing for long."""
    store = await open_store(lease_seconds=0.3)
    _, lease = await begun(store)
    path.unlink()
    deadline = asyncio.get_running_loop().time() + 20
    with pytest.raises(StoreError, match="was removed"):
        await _confirmed_until(store, lease, deadline)


async def _confirmed_until(store: SqliteStore, lease: Lease, deadline: float) -> None:
    while asyncio.get_running_loop().time() < deadline:
        await store.confirm(lease)
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(("take", "says"), TAKEN[:2], ids=NAMES[:2])
async def test_a_reader_does_not_go_on_with_a_file_that_is_no_longer_the_store(
    open_store: OpenStore, path: Path, take: Callable[[Path], object], says: str
) -> None:
    writer = await open_store()
    await begun(writer)
    reader = await open_store(read_only=True)
    assert await reader.runs()
    take(path)
    with pytest.raises(StoreError, match=says):
        await reader.runs()


async def test_a_log_moved_into_the_file_by_another_program_stops_nobody(open_store: OpenStore, path: Path) -> None:
    """The log is cut to nothing then, and begins anew."""
    store = await open_store()
    chain, lease = await begun(store)
    for _ in range(20):
        await store.append(lease, chain.next(), None)
    other = apsw.Connection(str(path))
    other.pragma("user_version")  # before its first read it knows of no log
    other.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    other.close()
    assert _log(path).stat().st_size == 0
    await asyncio.sleep(2 * LOOK_NS / 1e9)
    await store.append(lease, chain.next(), None)
    assert (await read(store, "run-1")).envelopes == tuple(chain.sealed)


@pytest.mark.parametrize("since", [0, 3, 50])
async def test_a_store_that_another_program_made_smaller_stops_nobody(
    open_store: OpenStore, path: Path, since: int
) -> None:
    """Nor when pages that are new `since` stand in the log alone."""
    store = await open_store()
    chain, lease = await begun(store)
    other = apsw.Connection(str(path))
    other.execute("create table large (data)")
    other.execute("insert into large values (zeroblob(5000000))")
    other.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    await store.append(lease, chain.next(), None)
    large = path.stat().st_size
    other.execute("drop table large")
    other.execute("vacuum")
    other.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    other.execute("create table small (data)")
    other.execute(f"insert into small values (zeroblob({4096 * since}))")
    other.close()
    assert path.stat().st_size < large / 2
    await asyncio.sleep(2 * LOOK_NS / 1e9)
    await store.append(lease, chain.next(), None)
    assert (await read(store, "run-1")).envelopes == tuple(chain.sealed)
