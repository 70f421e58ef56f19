"""The default store: one SQLite file. Each instance is one driver."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import apsw

from perdure.contracts.contract import content_digest
from perdure.errors import PerdureError, StoreError
from perdure.journal.envelope import Envelope
from perdure.ports import Clock, Entropy, IndexRow, Lease, RunSummary, StoredRun
from perdure.stores import leases, reading, schema
from perdure.stores.driver_lock import DriverLock, driver_is_dead
from perdure.stores.faults import translated
from perdure.stores.leases import Driver, Holder
from perdure.stores.mounts import network_type
from perdure.stores.presence import Presence
from perdure.stores.threads import Reader
from perdure.stores.wal import Watch
from perdure.stores.writer import Writer, closed

T = TypeVar("T")

LEASE_SECONDS = 10.0
_WATCHES_PER_LEASE = 40


class SqliteStore:
    """Journals, leases and artifacts in one SQLite file; fills the port `perdure.ports.Store`."""

    def __init__(
        self, path: Path, driver: Driver, lock: DriverLock, clock: Clock, *, create: bool, read_only: bool
    ) -> None:
        """Use `open`."""
        self.path = path
        self._driver, self._lock, self._clock, self._create, self._read_only = driver, lock, clock, create, read_only
        self._closed = False
        self._writer = Writer(driver, clock, self._open_for_writing)
        self._reader = Reader(partial(schema.open_for_reading, path), _looks_before_reading(path))

    @classmethod
    async def open(
        cls,
        path: str | Path,
        *,
        clock: Clock,
        entropy: Entropy,
        lease_seconds: float = LEASE_SECONDS,
        create: bool = True,
        read_only: bool = False,
        force_network: bool = False,
    ) -> Self:
        """Opens the store in `path`; a missing file is created unless `create` is false.

        With `read_only` nothing is written and no lock file is made; whatever would write is refused. `lease_seconds`
        is how long a holder whose process still exists must stand still before another may take its run over.

        Raises:
            ConfigurationError: the path names no file, or its symbolic links lead in a circle.
            UnknownError: the file is missing and is not to be created.
            StoreError: it is not a Perdure store, is newer than this release, lies on a network file system (unless
                `force_network`), cannot be written, stays locked, or its log is damaged in the middle.
        """
        path = schema.store_file(path)
        drivers = path.with_name(path.name + ".drivers")
        driver = Driver(path, entropy.draw(16).hex(), lease_seconds, partial(driver_is_dead, drivers))
        lock = DriverLock(drivers, driver.driver_id)
        if not force_network:
            _refuse_network(path)
        store = cls(path, driver, lock, clock, create=create, read_only=read_only)
        try:
            if read_only:
                await store._reader.read(lambda _: None)
            else:
                await store._writer.start()
        except BaseException:
            await store.close()
            raise
        return store

    @property
    def identity(self) -> str:
        """See `Store.identity`."""
        return f"sqlite:{self.path}"

    def _open_for_writing(self) -> apsw.Connection:
        with translated(self.path):
            connection = schema.open_for_writing(self.path, self._lock.directory, create=self._create)
            try:
                self._lock.take()
            except BaseException:
                connection.close()
                raise
            return connection

    async def create(self, run_id: str, key: bytes, envelopes: Sequence[Envelope], index: IndexRow) -> Lease:
        """See `Store.create`."""
        found = await self._lease(lambda c: leases.create(c, self._driver, run_id, key, envelopes, index))
        assert isinstance(found, Lease)
        return found

    async def acquire(self, run_id: str) -> Lease:
        """See `Store.acquire`. Returns or refuses at once, unless the holder's process exists but its heartbeat is
        older than the lease time: then the heartbeat is watched for the lease time.

        A holder that was stopped (SIGSTOP) in the middle of a commit keeps the file's own lock as well. Then nobody can
        write, and StoreError says so, until it is continued or killed.
        """
        held = self._driver.held.get(run_id)
        if held is not None and not held.lost:
            raise leases.held_here(run_id)
        found = await self._take(run_id, None)
        if isinstance(found, Lease):
            return found
        # The wall clock only saves a wait: it never makes anybody lose a lease.
        if 0 <= self._clock.now_ns() - found.beat_at < self._driver.lease_ns:
            raise leases.held_elsewhere(run_id, found, self._lock.process_of(found.driver_id))
        return await self._outlast(run_id, found)

    async def _outlast(self, run_id: str, holder: Holder) -> Lease:
        deadline = self._clock.steady_ns() + self._driver.lease_ns
        while True:
            await self._clock.sleep(self._driver.lease_ns / 1e9 / _WATCHES_PER_LEASE)
            stood_still = self._clock.steady_ns() >= deadline
            found = await self._take(run_id, holder if stood_still else None)
            if isinstance(found, Lease):
                return found
            if found != holder:
                raise leases.held_elsewhere(run_id, found, self._lock.process_of(found.driver_id))

    async def _take(self, run_id: str, stalled: Holder | None) -> Lease | Holder:
        return await self._lease(lambda c: leases.take(c, self._driver, run_id, stalled))

    async def _lease(self, work: Callable[[apsw.Connection], Lease | Holder]) -> Lease | Holder:
        future = self._submit(work, renews=True)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._give_back)
            raise

    def _give_back(self, granted: "asyncio.Future[Lease | Holder]") -> None:
        """A lease whose taker was cancelled meanwhile is nobody's."""
        if not granted.cancelled() and granted.exception() is None and isinstance(lease := granted.result(), Lease):
            self._writer.submit(lambda c: leases.release(c, self._driver, lease))

    async def release(self, lease: Lease) -> None:
        """See `Store.release`. While the store fails or stays locked nothing can be given back: for others the run is
        free once this process has ended, and here it can be taken again."""
        if self._writer.failure is None:
            try:
                await self._submit(lambda c: leases.release(c, self._driver, lease))
            except StoreError:
                self._driver.give_up(lease)

    def append(self, lease: Lease, envelopes: Sequence[Envelope], index: IndexRow | None) -> "asyncio.Future[None]":
        """See `Store.append`."""
        return self._submit(lambda c: leases.append(c, self._driver, lease, envelopes, index))

    async def confirm(self, lease: Lease) -> None:
        """See `Store.confirm`."""
        self._driver.holding(lease)
        if not self._driver.fresh(self._clock.steady_ns()):
            await self._submit(lambda _: None, renews=True)
            self._driver.holding(lease)
            if not self._driver.fresh(self._clock.steady_ns()):
                raise leases.too_late(lease)

    async def read(self, run_id: str, from_seq: int = 0, most: int | None = None) -> StoredRun | None:
        """See `Store.read`.

        Raises:
            MalformedJournalError: an event is missing, out of place, unreadable, or has columns of wrong types.
            StoreError: the file cannot be read.
        """
        return await self._reader.read(lambda c: reading.read_run(c, self.path, run_id, from_seq, most))

    async def runs(
        self, run_id: str | None = None, *, problems: dict[str, PerdureError] | None = None
    ) -> list[RunSummary]:
        """See `Store.runs`.

        Raises:
            MalformedJournalError: a row of the list is damaged, and no `problems` are asked for.
            StoreError: the file cannot be read.
        """
        is_dead = self._driver.is_dead
        return await self._reader.read(lambda c: reading.list_runs(c, self.path, is_dead, run_id, problems))

    async def put_artifact(self, run_id: str, data: bytes) -> str:
        """See `Store.put_artifact`.

        Raises:
            UnknownError: no such run.
            StoreError: the store failed.
        """
        digest = content_digest(data)
        await self._submit(lambda c: leases.put_artifact(c, self._driver, run_id, digest, data))
        return digest

    async def get_artifact(self, run_id: str, digest: str) -> bytes | None:
        """See `Store.get_artifact`."""
        return await self._reader.read(lambda c: reading.read_artifact(c, self.path, run_id, digest))

    async def close(self) -> None:
        """See `Store.close`."""
        if self._closed:
            return
        self._closed = True
        # The reader first: the last connection carries the log over into the file and removes it, if it may write.
        await self._reader.close()
        if not self._read_only:
            if self._writer.failure is None:
                with suppress(StoreError):  # what cannot be given back is free once the lock is gone
                    await self._writer.submit(lambda c: leases.release_all(c, self._driver))
            await self._writer.close()
            self._lock.let_go()

    async def abandon(self) -> None:
        """Ends as a killed process would: what is queued is lost, no lease is given back, and the lock file stays,
        unlocked."""
        self._writer.fail(closed(self._driver))
        self._lock.let_go(remove=False)
        await self.close()

    def _submit(self, work: Callable[[apsw.Connection], T], *, renews: bool = False) -> "asyncio.Future[T]":
        if self._read_only:
            raise StoreError(
                "the store is open for reading only", where=f"store {self.path}", next="open it for writing"
            )
        return self._writer.submit(work, renews=renews)


def _looks_before_reading(path: Path) -> Callable[[apsw.Connection], None]:
    presence, watch = Presence(path), Watch(path)

    def look(connection: apsw.Connection) -> None:
        with translated(path):
            presence.check(connection)
        watch.look(connection)

    return look


def _refuse_network(path: Path) -> None:
    kind = network_type(path)
    if kind is not None:
        raise StoreError(
            f"it lies on a network file system ({kind}), where locks and shared memory do not hold across machines",
            where=f"store {path}",
            next="keep it on a local disk, or add ?force_network=1 to the URL if only this machine ever opens it",
        )
