"""The SQLite store's file: how it is made, refused, shared, and what it costs."""

import asyncio
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from pathlib import Path

import apsw
import pytest
from tests.stores.shapes import OpenStore, Start

from perdure.clock import SystemClock, SystemEntropy
from perdure.errors import StoreError, UnknownError
from perdure.journal.envelope import FIRST_PREVIOUS, Envelope, seal
from perdure.stores.schema import APPLICATION_ID, EVENT_COLUMNS, MIGRATIONS
from perdure.stores.sqlite import SqliteStore
from perdure.testing.conformance import KEY, OPEN, begun, read


def turns(run_id: str, count: int) -> list[list[Envelope]]:
    """The pieces of a run with one call a turn, in the sizes of the benchmark's first workload: two pieces a turn."""
    previous, events = FIRST_PREVIOUS, []
    sizes = {
        "model_call_completed": 480,
        "tool_call_requested": 110,
        "tool_call_completed": 250,
        "model_call_requested": 100,
    }
    for kind, size in list(sizes.items()) * count:
        payload = b'"' + b"x" * (size - 2) + b'"'
        at = time.time_ns()
        event = seal(previous, run_id, len(events), kind, at, at % 10**12, os.urandom(16), payload)
        previous = event.digest
        events.append(event)
    return [events[at : at + 2] for at in range(0, len(events), 2)]


async def test_runs_that_append_at_once_share_their_commits(open_store: OpenStore) -> None:
    store = await open_store()
    commits = 0

    def count() -> bool:
        nonlocal commits
        commits += 1
        return False

    runs = 200
    await store._submit(lambda connection: connection.set_commit_hook(count))

    async def drive(number: int) -> None:
        pieces = turns(f"run-{number}", 10)
        lease = await store.create(f"run-{number}", KEY, pieces[0], OPEN)
        for piece in pieces[1:]:
            await store.append(lease, piece, None)

    await asyncio.gather(*[drive(number) for number in range(runs)])
    assert commits / (runs * 10) <= 0.02
    assert all(run.events == 40 for run in await store.runs())


async def test_a_turn_costs_at_most_1800_bytes_however_many_there_are(open_store: OpenStore, path: Path) -> None:
    sizes = []
    for run_id, count in (("0198c0de-1234-7abc-8def-0123456789ab", 200), ("0198c0de-1234-7abc-8def-0123456789ac", 800)):
        store = await open_store()
        pieces = turns(run_id, count)
        lease = await store.create(run_id, KEY, pieces[0], OPEN)
        await asyncio.gather(*[store.append(lease, piece, None) for piece in pieces[1:]])
        await store.close()
        sizes.append(path.stat().st_size)
    assert (sizes[1] - sizes[0]) / 800 <= 1_800
    assert sizes[0] <= 200 * 1_800 + 20 * 8_192  # and the empty tables


@pytest.mark.bench
async def test_a_turn_syncs_the_disk_at_most_two_times_and_a_tenth(path: Path) -> None:
    assert shutil.which("strace"), "this needs strace"
    count = 1_500
    command = ["strace", "-f", "-c", "-o", str(path) + ".trace", "-e", "trace=fsync,fdatasync", sys.executable]
    program = str(Path(__file__).with_name("programs.py"))
    subprocess.run([*command, program, "drive", str(path), "run", str(2 * count)], check=True)
    lines = [line.split() for line in Path(str(path) + ".trace").read_text().splitlines()]
    syncs = sum(int(fields[3]) for fields in lines if fields and fields[-1] in {"fsync", "fdatasync"})
    assert 2 * count <= syncs <= 2.1 * count


@pytest.mark.bench
async def test_an_append_takes_as_long_at_ten_thousand_turns_as_at_the_beginning(open_store: OpenStore) -> None:
    store = await open_store()
    pieces = turns("run", 10_000)
    lease = await store.create("run", KEY, pieces[0], OPEN)
    spent = []
    for piece in pieces[1:]:
        began = time.perf_counter()
        await store.append(lease, piece, None)
        spent.append(time.perf_counter() - began)
    early, late = sorted(spent[:2_000])[1_000], sorted(spent[-2_000:])[1_000]
    assert late <= 1.2 * early


@pytest.mark.bench
async def test_reading_a_journal_takes_less_than_four_times_what_fetching_its_rows_takes(
    open_store: OpenStore, path: Path
) -> None:
    store = await open_store()
    pieces = turns("run", 2_500)
    lease = await store.create("run", KEY, pieces[0], OPEN)
    await asyncio.gather(*[store.append(lease, piece, None) for piece in pieces[1:]])
    plain = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    reading, fetching = [], []
    for _ in range(7):
        began = time.perf_counter()
        assert len((await read(store, "run")).envelopes) == 10_000
        reading.append(time.perf_counter() - began)
        began = time.perf_counter()
        assert len(plain.execute("select * from event").fetchall()) == 10_000
        fetching.append(time.perf_counter() - began)
    plain.close()
    assert min(reading) < 4 * min(fetching)


@pytest.mark.slow
async def test_the_log_does_not_grow_without_bound(open_store: OpenStore, path: Path) -> None:
    store = await open_store()
    chain, lease = await begun(store)
    for _ in range(2_500):
        await store.append(lease, chain.next(), None)
    assert path.with_name("store.db-wal").stat().st_size < 12 * 1024 * 1024


async def test_the_store_and_everything_beside_it_is_for_the_owner_alone(open_store: OpenStore, path: Path) -> None:
    before = os.umask(0)
    try:
        await begun(await open_store())
    finally:
        os.umask(before)
    modes = {entry.relative_to(path.parent): stat.S_IMODE(entry.stat().st_mode) for entry in path.parent.rglob("*")}
    drivers = Path("store.db.drivers")
    assert modes.pop(drivers) == 0o700
    assert {Path("store.db"), Path("store.db-wal"), Path("store.db-shm")} <= modes.keys()
    assert len(modes) == 5  # the two lock files
    assert set(modes.values()) == {0o600}


async def test_the_file_says_whose_it_is_and_has_the_agreed_table(open_store: OpenStore, path: Path) -> None:
    chain, _ = await begun(await open_store())
    reader = sqlite3.connect(path)
    assert reader.execute("pragma application_id").fetchone() == (APPLICATION_ID,)
    assert reader.execute("pragma user_version").fetchone() == (len(MIGRATIONS),)
    assert reader.execute("pragma journal_mode").fetchone() == ("wal",)
    cursor = reader.execute("select * from event where run_id = 'run-1' order by seq")
    assert ", ".join(column[0] for column in cursor.description) == EVENT_COLUMNS
    assert [Envelope(*row) for row in cursor] == chain.sealed
    reader.close()


async def test_a_vacuum_leaves_every_event_in_its_place(open_store: OpenStore, path: Path) -> None:
    store = await open_store()
    chains = [(await begun(store, f"run-{number}", 3))[0] for number in range(3)]
    await store.close()
    other = sqlite3.connect(path)
    other.execute("vacuum")
    other.close()
    store = await open_store()
    for chain in chains:
        assert (await read(store, chain.run_id)).envelopes == tuple(chain.sealed)


async def test_commits_wait_for_the_disk(open_store: OpenStore) -> None:
    store = await open_store()
    assert await store._submit(lambda connection: connection.pragma("synchronous")) == 2


async def test_a_missing_store_is_not_made_by_those_who_only_look(open_store: OpenStore, path: Path) -> None:
    for options in ({"create": False}, {"read_only": True}):
        with pytest.raises(UnknownError, match="there is no store"):
            await open_store(**options)
    assert list(path.parent.iterdir()) == []


async def test_an_empty_file_becomes_a_store(open_store: OpenStore, path: Path) -> None:
    path.touch()
    await begun(await open_store())


async def test_a_store_in_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="directory does not exist"):
        await SqliteStore.open(tmp_path / "no" / "store.db", clock=SystemClock(), entropy=SystemEntropy())
    with pytest.raises(StoreError, match="is a directory"):
        await SqliteStore.open(tmp_path, clock=SystemClock(), entropy=SystemEntropy())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("foreign", ["text", "short", "database", "wal database"])
async def test_a_file_of_another_program_is_refused_and_left_as_it_was(
    open_store: OpenStore, path: Path, foreign: str, read_only: bool
) -> None:
    if "database" in foreign:
        other = sqlite3.connect(path)
        other.execute(f"pragma journal_mode={'wal' if 'wal' in foreign else 'delete'}")
        other.executescript("create table event(run_id); insert into event values('mine'); pragma user_version=1")
        other.close()
    else:
        path.write_bytes(b"my notes\n" * (1 if foreign == "short" else 1_000))
    before = path.read_bytes()
    with pytest.raises(StoreError, match="not a Perdure store"):
        await open_store(read_only=read_only)
    assert path.read_bytes() == before
    assert {entry.name.removeprefix("store.db") for entry in path.parent.iterdir()} <= {"", "-wal", "-shm"}


@pytest.mark.parametrize("read_only", [False, True])
async def test_a_store_of_a_later_release_is_refused_and_left_as_it_was(
    open_store: OpenStore, path: Path, read_only: bool
) -> None:
    await begun(await open_store())
    newer = apsw.Connection(str(path))
    newer.execute(f"pragma user_version={len(MIGRATIONS) + 1}")
    newer.close()
    with pytest.raises(StoreError, match=f"version {len(MIGRATIONS) + 1}, this release knows up to {len(MIGRATIONS)}"):
        await open_store(read_only=read_only)


async def test_who_only_looks_writes_nothing_and_takes_no_lock(open_store: OpenStore, path: Path) -> None:
    writer = await open_store()
    chain, lease = await begun(writer)
    locks = set(path.with_name("store.db.drivers").iterdir())
    looker = await open_store(read_only=True)
    await writer.append(lease, chain.next(), None)
    assert (await read(looker, "run-1")).envelopes == tuple(chain.sealed)
    for refused in (looker.acquire("run-1"), looker.create("x", KEY, [], OPEN), looker.put_artifact("run-1", b"")):
        with pytest.raises(StoreError, match="reading only"):
            await refused
    assert set(path.with_name("store.db.drivers").iterdir()) == locks


async def test_a_store_that_was_killed_reads_back_for_one_who_only_looks(
    open_store: OpenStore, start: Start, path: Path
) -> None:
    holder = start("hold", path, 10)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    holder.wait()
    looker = await open_store(read_only=True)
    assert (await read(looker, "held")).envelopes
    assert [run.held for run in await looker.runs()] == [False]


async def test_an_open_read_holds_no_writer_up_and_sees_its_own_moment(open_store: OpenStore, path: Path) -> None:
    """H08."""
    store = await open_store()
    chain, lease = await begun(store)
    reader = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    reader.execute("begin")
    assert reader.execute("select count(*) from event").get == 2
    for _ in range(50):
        await asyncio.wait_for(store.append(lease, chain.next(), None), 1)
    assert reader.execute("select count(*) from event").get == 2
    reader.close()


async def test_what_waits_for_a_read_is_not_the_event_loop(open_store: OpenStore) -> None:
    store = await open_store()
    chain, lease = await begun(store)
    reading = asyncio.create_task(store._reader.read(lambda _: time.sleep(0.5)))
    began = time.monotonic()
    for _ in range(5):
        await store.append(lease, chain.next(), None)
    assert time.monotonic() - began < 0.4
    assert not reading.done()
    await reading


async def test_a_refused_piece_frees_the_lock_for_others_at_once(open_store: OpenStore) -> None:
    """H08."""
    one, two = await open_store(), await open_store()
    chain, lease = await begun(one)
    skipped = chain.next(2)[1]
    with pytest.raises(StoreError, match="does not follow"):
        await one.append(lease, [skipped], None)
    await asyncio.wait_for(begun(two, "run-2"), 1)


async def test_a_closed_store_refuses_everything_that_writes(open_store: OpenStore) -> None:
    store = await open_store()
    chain, lease = await begun(store)
    await store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.append(lease, chain.next(), None)
    with pytest.raises(StoreError, match="closed"):
        await store.acquire("run-1")


async def test_a_clean_close_leaves_the_file_alone_without_a_log(open_store: OpenStore, path: Path) -> None:
    store = await open_store()
    await begun(store)
    await store.close()
    assert {entry.name for entry in path.parent.iterdir()} == {"store.db", "store.db.drivers"}
    assert [entry.name for entry in path.with_name("store.db.drivers").iterdir()] == ["opening"]


async def test_two_names_of_one_file_are_one_store(path: Path) -> None:
    one = await SqliteStore.open(path, clock=SystemClock(), entropy=SystemEntropy())
    await begun(one)
    alias = path.with_name("alias.db")
    alias.symlink_to(path)
    two = await SqliteStore.open(alias, clock=SystemClock(), entropy=SystemEntropy())
    with pytest.raises(Exception, match="another driver holds it"):
        await two.acquire("run-1")
    await one.close()
    await two.close()


def test_importing_the_package_loads_no_database() -> None:
    code = "import sys, perdure.stores.url; print('apsw' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
