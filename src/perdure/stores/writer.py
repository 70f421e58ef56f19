"""The one thread that writes to a store: it gathers what all runs queued into one transaction (group commit), and
keeps the driver's heartbeat.

Each piece is a savepoint: one that is refused leaves no trace and fails alone. A transaction that could not begin
fails its pieces, with nothing written. Any other failure leaves the fate of what was under way unknown: the writer
then writes nothing more, and everything queued or asked later fails with the same StoreError.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import apsw

from perdure.errors import PerdureError, StoreError
from perdure.ports import Clock
from perdure.stores import leases
from perdure.stores.faults import store_error
from perdure.stores.leases import Driver
from perdure.stores.presence import Presence

LOOK_NS = 20_000_000
"""The store's files are looked at before and after a commit, but no more often than this. Each look lets another thread
in, and what is taken away may be taken away right after a commit as well."""

T = TypeVar("T")
Work = Callable[[apsw.Connection], Any]

_ALONE = (PerdureError, apsw.ConstraintError, apsw.TooBigError, TypeError, ValueError, OverflowError)
"""What fails one piece and nothing else: refusals, and values that cannot be bound."""


class Piece:
    """One atomic piece of work, and who waits for it. One that `renews` makes its transaction carry a heartbeat that
    is due even when nothing is held yet."""

    __slots__ = ("future", "renews", "work")

    def __init__(self, work: Work, future: "asyncio.Future[Any]", renews: bool = False) -> None:
        self.work, self.future, self.renews = work, future, renews


Settled = tuple[Piece, Any, BaseException | None]


class Writer:
    """Queues pieces from the event loop's thread; the thread of its own commits them."""

    def __init__(self, driver: Driver, clock: Clock, open_connection: Callable[[], apsw.Connection]) -> None:
        self._driver, self._clock, self._open_connection = driver, clock, open_connection
        self._loop = asyncio.get_running_loop()
        self._gathered: list[Piece] = []
        self._queue: queue.SimpleQueue[list[Piece] | None] = queue.SimpleQueue()
        self._closing = False
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._connection: apsw.Connection | None = None
        self._presence = Presence(driver.path)
        self._looked_ns = 0
        self.failure: StoreError | None = None
        """Why nothing is written any more; None while all is well."""
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        """Opens the store in the writer's thread.

        Raises:
            StoreError, UnknownError: it cannot be opened.
        """
        opened: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="perdure-writer", daemon=True)
        self._thread.start()
        await opened

    def submit(self, work: Callable[[apsw.Connection], T], *, renews: bool = False) -> "asyncio.Future[T]":
        """Queues one piece; the future is done when it is durable. Pieces are committed in the order they were
        queued."""
        future: asyncio.Future[T] = self._loop.create_future()
        if self.failure is not None or self._closing:
            future.set_exception(self.failure or closed(self._driver))
            return future
        self._gathered.append(Piece(work, future, renews))
        if len(self._gathered) == 1:
            # At the next tick, so that runs woken by one commit go into the next one together.
            self._loop.call_soon(self._hand_over)
        return future

    def fail(self, error: StoreError) -> None:
        """Makes everything that is not yet under way fail."""
        if self.failure is None:
            self.failure = error

    async def close(self) -> None:
        """Commits what is queued, then ends the thread. Safe to call twice."""
        if not self._closing:
            self._closing = True
            self._hand_over()
            self._queue.put(None)
        if self._thread is not None:
            await asyncio.shield(self._ended)
            self._thread.join()

    def _hand_over(self) -> None:
        if self._gathered:
            batch, self._gathered = self._gathered, []
            self._queue.put(batch)

    # From here on: the writer's thread.

    def _run(self, opened: "asyncio.Future[None]") -> None:
        try:
            self._open(opened)
            while (batch := self._next_batch()) is not None:
                self._tell(self._settle(batch))
        finally:
            self._disconnect()
            self._call(lambda: self._ended.set_result(None))

    def _open(self, opened: "asyncio.Future[None]") -> None:
        error: Exception | None = None
        try:
            self._connection = self._open_connection()
            self._presence.check(self._connection)
        except Exception as refused:  # noqa: BLE001 - handed to whoever opens the store
            self.failure = store_error(refused, self._driver.path)
            error = refused if isinstance(refused, PerdureError) else self.failure
        self._tell([(Piece(_nothing, opened), None, error)])

    def _next_batch(self) -> list[Piece] | None:
        """Everything queued, once there is something or the heartbeat is due; None at the end."""
        beat_due_in = None if self.failure is not None else self._driver.beat_due_in(self._clock.steady_ns())
        batch: list[Piece] = []
        try:
            more = self._queue.get(timeout=beat_due_in)
            while more is not None:
                batch += more
                more = self._queue.get_nowait()
        except queue.Empty:
            return batch
        if batch:
            self._queue.put(None)
        return batch or None

    def _settle(self, batch: list[Piece]) -> list[Settled]:
        if self.failure is not None:
            return [(piece, None, self.failure) for piece in batch]
        assert self._connection is not None
        began = time.monotonic()  # of the lock itself, which no clock of a test moves
        look = self._clock.steady_ns() - self._looked_ns >= LOOK_NS
        try:
            if look:
                self._presence.check(self._connection)
            self._connection.execute("begin immediate")
        except apsw.BusyError as error:
            busy = store_error(error, self._driver.path, waited_s=time.monotonic() - began)
            return [(piece, None, busy) for piece in batch]
        except (apsw.Error, StoreError) as error:
            return self._fail(batch, error)
        try:
            settled = self._commit(self._connection, batch)
            if look:  # before anybody is told that it is durable
                self._presence.check(self._connection)
                self._looked_ns = self._clock.steady_ns()
            return settled
        except Exception as error:  # noqa: BLE001 - whatever it was, what is stored is unknown from here on
            return self._fail(batch, error)

    def _commit(self, connection: apsw.Connection, batch: list[Piece]) -> list[Settled]:
        started = self._clock.steady_ns()
        beats = self._driver.must_beat(started, any(piece.renews for piece in batch))
        lost = leases.beat(connection, self._driver, self._clock.now_ns()) if beats else []
        if len(batch) == 1 and not beats:
            settled = [self._apply_alone(connection, batch[0])]
        else:
            settled = [self._apply(connection, piece) for piece in batch]
        if connection.in_transaction:
            connection.execute("commit")
        if beats:
            # In this order: who sees the renewal must see what was lost, too.
            self._driver.lose(lost)
            self._driver.renewed_ns = started
        return settled

    def _apply_alone(self, connection: apsw.Connection, piece: Piece) -> Settled:
        """A piece that is a transaction of its own."""
        try:
            return piece, piece.work(connection), None
        except _ALONE as error:
            connection.execute("rollback")
            return piece, None, self._refusal(error)

    def _apply(self, connection: apsw.Connection, piece: Piece) -> Settled:
        connection.execute("savepoint piece")
        try:
            value = piece.work(connection)
        except _ALONE as error:
            connection.execute("rollback to piece")
            connection.execute("release piece")
            return piece, None, self._refusal(error)
        connection.execute("release piece")
        return piece, value, None

    def _refusal(self, error: BaseException) -> BaseException:
        return store_error(error, self._driver.path) if isinstance(error, apsw.Error) else error

    def _fail(self, batch: list[Piece], error: BaseException) -> list[Settled]:
        self.failure = store_error(error, self._driver.path)
        self._disconnect()
        return [(piece, None, self.failure) for piece in batch]

    def _disconnect(self) -> None:
        """Closes the connection, which frees the file's lock for others."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        # A disk that failed may fail here, too; the first failure is the one that is told.
        with suppress(apsw.Error):
            if self.failure is not None:
                connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            if connection.in_transaction:
                connection.execute("rollback")
        with suppress(apsw.Error):
            connection.close(force=True)

    def _tell(self, settled: list[Settled]) -> None:
        if settled:
            self._call(lambda: _resolve(settled))

    def _call(self, callback: Callable[[], Any]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            # The loop is closed: nobody is left to be told, and what is stored stays stored.
            self._closing = True


def _nothing(connection: apsw.Connection) -> None:
    """What opening writes."""


def _resolve(settled: list[Settled]) -> None:
    for piece, value, error in settled:
        if piece.future.done():  # its waiter was cancelled
            continue
        if error is None:
            piece.future.set_result(value)
        else:
            piece.future.set_exception(error)


def closed(driver: Driver) -> StoreError:
    """The error of a store that was closed."""
    return StoreError("the store is closed", where=f"store {driver.path}", next="open it again")
