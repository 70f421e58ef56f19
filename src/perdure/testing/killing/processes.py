"""Processes made to be killed: each has a session of its own, and nothing of it is left behind.

They are forked, not started: what is imported need not be imported again, so that a death costs milliseconds.
"""

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from perdure.errors import UsageError

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.0005
_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
RAISED = 70
"""Exit code of a process whose work raised; what it raised is in its output."""


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    """Its exit code, or the negated signal that killed it."""
    left_behind: int = 0
    """Processes of its making that were still there, and were killed."""

    @property
    def killed(self) -> bool:
        """Whether SIGKILL ended it."""
        return self.code == -signal.SIGKILL


class Process:
    """A forked process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None
        self._ended: Ended | None = None

    def kill(self) -> None:
        """Ends it at once, wherever it is."""
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float | None = None) -> Ended | None:
        """How it ended, once whatever it left behind is gone as well; None when it has not ended in that time."""
        try:
            return self._waited(timeout_s)
        except BaseException:  # told to stop: it must not go on alone
            self.kill()
            self._waited(None)
            raise

    def ended(self) -> Ended:
        """How it ended, however long that takes."""
        ended = self.wait()
        assert ended is not None
        return ended

    def _waited(self, timeout_s: float | None) -> Ended | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        # Polled: the parent has no thread and no loop, so that it may fork again at any time.
        while self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG if deadline is not None else 0)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
                break
            if deadline is not None and time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_S)
        if self._ended is None:
            self._ended = Ended(self._code, _clear_away(self.pid))
        return self._ended


def fork(work: Callable[[], int], output: Path) -> Process:
    """Does the work in a process of its own, which ends with the code the work returns.

    Args:
        output: where its standard output and error are appended to.

    Raises:
        UsageError: this process has threads, which a fork would leave in an unknown state.
        OSError: the output cannot be written to.
    """
    if threading.active_count() > 1:
        names = ", ".join(
            sorted(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
        )
        raise UsageError(
            f"this process has threads ({names}), so it cannot be forked safely",
            where="crash test",
            next="start them when a tool is first called, not when its module is imported",
        )
    sys.stdout.flush()
    sys.stderr.flush()
    # Opened on this side, so that what is wrong with it is raised where it can be told.
    parent, written = os.getpid(), os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
    # Held back: Python swallows what a signal's handler raises within the functions that run at a fork.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _REQUESTS)
    try:
        pid = os.fork()
        if pid:
            os.close(written)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if pid:
        return Process(pid)
    code = RAISED
    try:
        os.setsid()
        _end_with(parent)
        _redirect(written)
        code = work()
    except BaseException:  # noqa: BLE001 - a forked process must not return into its parent's code
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


_adopting: list[int] = []
"""The process that adopts orphans: a forked process inherits this list, but not the right."""


def adopt_orphans() -> None:
    """Makes this process the parent of what its children leave behind, sessions of their own included, so that it can
    be found and ended. On Linux; elsewhere nothing that is left behind is found.

    For a process that has one such child at a time: whatever else it is the parent of then counts as left behind.
    """
    with suppress(OSError, AttributeError):
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0:
            _adopting[:] = [os.getpid()]


def end_children() -> None:
    """Ends every process this one is the parent of, where it adopts orphans: also one it was asked to leave over before
    anything knew of it."""
    if _adopting == [os.getpid()]:
        _clear_away(None)


def _end_with(parent: int) -> None:
    """Has the system end this process when its parent is gone, also by SIGKILL. On Linux."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was quicker
        os._exit(RAISED)


def _redirect(written: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.close(nothing)
    os.close(written)


def _clear_away(session: int | None) -> int:
    """Kills what a dead process left behind; returns how many processes there were. None: what any of them left."""
    found: set[int] = set()
    while (alive := _left_behind(session)) - found:
        found |= alive
        # What they in turn leave behind comes to light once they are gone.
        for pid in alive:
            with suppress(ProcessLookupError, PermissionError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    return len(found)


def _left_behind(session: int | None) -> set[int]:
    adopting = _adopting == [os.getpid()]
    if not ((session is not None and _group_exists(session)) or (adopting and _has_children())):
        return set()
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            # The name stands in brackets and may hold anything; state, parent, group and session follow it.
            state, parent, _, its_session, *_ = entry.read_text("utf-8", "replace").rpartition(")")[2].split()
            if int(its_session) == session or (adopting and int(parent) == os.getpid()):
                if state == "Z" and int(parent) != os.getpid():
                    continue
                found.add(int(entry.parent.name))
    return found


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)  # of others' processes: it is there
    return True


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
