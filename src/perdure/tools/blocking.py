"""Running a blocking function beside the event loop, in a daemon thread of ours.

A pool of the standard library joins its threads when the process ends, so one stuck tool would hold it for ever.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable

from perdure.calls import LeftThread

Leave = Callable[[LeftThread], None]
"""Takes work that goes on although its caller was cancelled."""


async def run_blocking(work: Callable[[], object], name: str, leave: Leave) -> object:
    """What `work` returns, run in a thread of its own with the caller's context variables.

    Cancelling the caller leaves the thread to itself: `leave` is handed it, with what it still comes to.

    Raises:
        RuntimeError: `work` raised something that would end a thread or a process (SystemExit, KeyboardInterrupt).
        Exception: whatever else `work` raised.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[object] = loop.create_future()
    context = contextvars.copy_context()

    def settle(value: object, error: Exception | None) -> None:
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)
            # Read at once: whoever waits is still told, and where nobody does any more, asyncio has nothing to print.
            result.exception()

    def run() -> None:
        value, error = None, None
        try:
            value = context.run(work)
        except BaseException as raised:  # noqa: BLE001 - a thread's error must reach the call, whatever it is
            error = as_error(raised)
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    thread = threading.Thread(target=run, name=f"perdure-tool-{name}", daemon=True)
    thread.start()
    try:
        # Waited for beside the caller: the thread goes on when it is cancelled, and so does what it comes to.
        await asyncio.wait({result})
    except asyncio.CancelledError:
        leave(LeftThread(thread, result))
        raise
    return result.result()


def as_error(raised: BaseException) -> Exception:
    """The error itself, or an ordinary one in place of a signal meant for a thread, a task or a future."""
    if isinstance(raised, Exception) and not isinstance(raised, StopIteration):
        return raised
    error = RuntimeError(f"the tool raised {type(raised).__name__}" + (f": {raised}" if str(raised) else ""))
    error.__cause__ = raised
    return error
