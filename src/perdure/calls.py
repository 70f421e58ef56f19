"""What a tool's function may take and give besides plain values: the context of its call, and results that are not a
value."""

import asyncio
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime

from perdure.contracts.contract import JsonObject


@dataclass(frozen=True)
class Unknown:
    """A tool's result when it cannot say whether its effect happened. Nothing is assumed from it."""

    reason: str


@dataclass(frozen=True)
class Suspend:
    """A tool's result when it needs an answer from outside: the run parks; a fitting answer becomes the call's
    result."""

    reason: str
    schema: JsonObject
    """JSON schema the answer is checked against before it is recorded."""
    kind: str = "question"
    """What is waited for, carried unchanged into the park report (a webhook is never shown as a question)."""


@dataclass(frozen=True)
class Sleep:
    """A tool's result when it wants to go on later: the run parks until the instant."""

    until: datetime
    """Aware; kept as UTC."""


class ToolFailed(Exception):
    """A failure the model should read: raise it or return it. The message goes to the model, bounded."""

    def __init__(self, message: str) -> None:
        self.message = message
        super().__init__(message)


@dataclass(frozen=True)
class Media:
    """Bytes of a kind the model can look at (an image, a document)."""

    data: bytes
    media_type: str


@dataclass(frozen=True)
class ProcessResult:
    """How a process started by `CallContext.run` ended."""

    exit_code: int
    """Negative: ended by that signal."""
    stdout: bytes
    stderr: bytes


@dataclass(frozen=True)
class LeftThread:
    """A thread that goes on although its call was cancelled."""

    thread: threading.Thread
    result: "asyncio.Future[object]"
    """What it comes to; done a moment after the thread has ended, unless the event loop was closed before."""


class _Flag:
    """Raised once and never lowered; may be looked at from any thread."""

    __slots__ = ("raised",)

    def __init__(self) -> None:
        self.raised = False


@dataclass(frozen=True)
class CallContext:
    """The context of one attempt at one call, given to a tool's parameter of this type and absent from its schema."""

    run_id: str
    call_id: str
    attempt: int
    """1 for the first; recovery and live retries count on."""
    epoch: int
    """The driver's epoch: hand it to a system that can fence off an older driver."""
    idempotency_key: str | None
    """Stable over crashes and retries; None for reads and writes. Never shown to the model."""
    deadline: datetime | None
    """When the call times out (UTC); None without a time limit."""
    _given_up: _Flag = field(default_factory=_Flag, repr=False)
    _left: list[LeftThread] = field(default_factory=list, repr=False, compare=False)

    @property
    def cancelled(self) -> bool:
        """Whether the runtime has given the call up (a time limit, a cancel). For blocking functions to look at."""
        return self._given_up.raised

    def give_up(self) -> None:
        """Marks the call as given up; the runtime's to call."""
        self._given_up.raised = True

    def leave(self, work: LeftThread) -> None:
        """Says that the call's work goes on although it was cancelled (a thread cannot be stopped). A tool's adapter
        calls it."""
        self._left.append(work)

    @property
    def left(self) -> LeftThread | None:
        """The work that goes on after a cancel, if any; for the runtime to look at."""
        return self._left[-1] if self._left else None

    async def run(self, argv: Sequence[str], *, timeout: float | None = None) -> ProcessResult:
        """Runs a program in a process group of its own, which is ended when the call ends, is cancelled, or `timeout`
        seconds have passed (then TimeoutError is raised). A process that left the group lives on; while it holds the
        output open, only a time limit or a cancel ends the wait for it."""
        loop = asyncio.get_running_loop()
        output = _Output(loop.create_future())
        process, _ = await loop.subprocess_exec(
            lambda: output,
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout):
                await asyncio.wait({output.ended})
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.get_pid(), signal.SIGKILL)
            for pipe in (process.get_pipe_transport(1), process.get_pipe_transport(2)):
                if pipe is not None:
                    pipe.close()  # else somebody outside the group who holds it would be waited for
            await asyncio.wait({output.ended})
            process.close()
        return ProcessResult(process.get_returncode() or 0, bytes(output.stdout), bytes(output.stderr))


class _Output(asyncio.SubprocessProtocol):
    """Gathers what a process writes."""

    def __init__(self, ended: "asyncio.Future[None]") -> None:
        self.ended = ended
        """Done when the process has ended and its pipes are closed."""
        self.stdout, self.stderr = bytearray(), bytearray()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """More was written."""
        (self.stdout if fd == 1 else self.stderr).extend(data)

    def connection_lost(self, error: Exception | None) -> None:
        """The process has ended, and so have its pipes."""
        self.ended.set_result(None)
