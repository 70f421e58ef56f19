"""Blocking work beside the event loop, in daemon threads: unlike an executor's, they never hold the process back from
ending."""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import apsw

T = TypeVar("T")


def _tell(
    loop: asyncio.AbstractEventLoop, future: "asyncio.Future[Any]", value: Any, error: BaseException | None
) -> None:
    def settle() -> None:
        if future.done():  # its waiter was cancelled
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    if not loop.is_closed():
        loop.call_soon_threadsafe(settle)


async def in_thread(work: Callable[[], T]) -> T:
    """Runs blocking work in a thread of its own."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            value = work()
        except BaseException as error:  # noqa: BLE001 - handed to the waiter
            _tell(loop, future, None, error)
        else:
            _tell(loop, future, value, None)

    threading.Thread(target=run, name="perdure-read", daemon=True).start()
    return await future


class Reader:
    """One thread with one reading connection, opened on first use; `before_each` looks at it before every read."""

    def __init__(
        self, open_connection: Callable[[], apsw.Connection], before_each: Callable[[apsw.Connection], None]
    ) -> None:
        self._open_connection, self._before_each = open_connection, before_each
        self._queue: queue.SimpleQueue[tuple[Callable[[apsw.Connection], Any], asyncio.Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._loop = asyncio.get_running_loop()
        self._thread: threading.Thread | None = None

    async def read(self, work: Callable[[apsw.Connection], T]) -> T:
        """Runs the work over the connection; reads queue up, writes go on beside them."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.put((work, future))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="perdure-reader", daemon=True)
            self._thread.start()
        return await future

    async def close(self) -> None:
        """Ends the thread once its reads are done. Safe to call twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            await in_thread(thread.join)

    def _run(self) -> None:
        connection: apsw.Connection | None = None
        while (item := self._queue.get()) is not None:
            work, future = item
            try:
                if connection is None:
                    connection = self._open_connection()
                self._before_each(connection)
                value = work(connection)
            except BaseException as error:  # noqa: BLE001 - handed to the waiter
                _tell(self._loop, future, None, error)
            else:
                _tell(self._loop, future, value, None)
        if connection is not None:
            connection.close()
