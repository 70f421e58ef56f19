"""The first Ctrl-C or SIGTERM parks a run in good order, and a second one leaves at once; what drives no run of its own
cleans up and leaves."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Self

from perdure.cli import failure, output

if TYPE_CHECKING:
    from perdure.engine import Engine

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """While entered, SIGINT and SIGTERM ask the engine to stop at the next safe point and to give its leases up."""

    def __init__(self) -> None:
        self.requested = False
        self._engine: Engine | None = None

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._signalled)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    def of(self, engine: "Engine") -> None:
        """From here on there is something to stop."""
        self._engine = engine

    def again(self) -> None:
        """Passes a request on to runs that were not driven yet when it came."""
        if self.requested and self._engine is not None:
            self._engine.stop()

    def _signalled(self) -> None:
        if self.requested or self._engine is None:
            os._exit(failure.INTERRUPTED)
        self.requested = True
        self._engine.stop()
        output.note("stopping at the next safe point; once more leaves at once")


class Interrupted(BaseException):
    """A signal asked the process to leave. A BaseException, so that no `except Exception` on the way swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.exit_code = 128 + number


@contextmanager
def unwinding() -> Iterator[None]:
    """While entered, the first SIGINT, SIGTERM or SIGHUP is raised as `Interrupted`, so that what there is to clean up
    is cleaned up. From then on the process ignores all three. What was ignored before stays so.

    Not around an event loop: a loop takes what a callback raises for its own matter.
    """
    numbers = [one for one in (*_SIGNALS, signal.SIGHUP) if signal.getsignal(one) is not signal.SIG_IGN]
    before, owner = {one: signal.getsignal(one) for one in numbers}, os.getpid()

    def leave(number: int, _: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked process is to do as if this one had not been entered
            signal.signal(number, before[signal.Signals(number)])
            os.kill(os.getpid(), number)
            return
        for one in numbers:
            signal.signal(one, signal.SIG_IGN)
        raise Interrupted(number)

    for one in numbers:
        signal.signal(one, leave)
    try:
        yield
    finally:
        for one, how in before.items():
            if signal.getsignal(one) is leave:
                signal.signal(one, how)
