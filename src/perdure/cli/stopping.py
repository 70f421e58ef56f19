"""The first Ctrl-C or SIGTERM parks in good order; a second one leaves at once."""

import asyncio
import os
import signal
from types import TracebackType
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
