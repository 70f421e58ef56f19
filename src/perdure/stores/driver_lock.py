"""Who is alive: one file per driver, locked by the operating system for as long as the driver lives.

A killed process loses its lock at once, whatever it was doing; a stopped one keeps it. So a lock that can be had
proves that its owner is dead, and one that cannot be had proves nothing more than that a process exists.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from perdure.errors import StoreError
from perdure.stores.faults import BUSY_SECONDS

_OPENING = "opening"
_UNLOCKED_SUFFIX = ".new"


class DriverLock:
    """The lock of one driver. Held from `take` to `let_go`."""

    def __init__(self, directory: Path, driver_id: str) -> None:
        self.directory, self.driver_id = directory, driver_id
        self._descriptor: int | None = None

    def take(self) -> None:
        """Creates the file and locks it; removes the files of drivers that are dead."""
        # Locked under another name first: a file that bears a driver's name is locked from the moment it can be seen,
        # so no prober can take a driver that is just starting for a dead one.
        make_directory(self.directory)
        fresh = self.directory / (self.driver_id + _UNLOCKED_SUFFIX)
        self._descriptor = os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(OSError):  # a full disk: whom to look for is a help, and no part of the lock
            os.write(self._descriptor, str(os.getpid()).encode())
        fresh.rename(self.directory / self.driver_id)
        self._sweep()

    def process_of(self, driver_id: str) -> int | None:
        """The process of another driver, by the number it had where it began; None when that is not known."""
        try:
            return int((self.directory / driver_id).read_bytes()[:20])
        except (OSError, ValueError):
            return None

    def let_go(self, *, remove: bool = True) -> None:
        """Gives the lock up. Without `remove` the file stays, as after a kill. Safe to call twice."""
        if self._descriptor is None:
            return
        if remove:
            with suppress(OSError):  # the directory may be gone or read-only by now; the lock goes either way
                (self.directory / self.driver_id).unlink()
        os.close(self._descriptor)
        self._descriptor = None

    def _sweep(self) -> None:
        for entry in list(self.directory.iterdir()):
            named_by_driver = entry.name not in {_OPENING, self.driver_id} and not entry.name.endswith(_UNLOCKED_SUFFIX)
            if named_by_driver and driver_is_dead(self.directory, entry.name):
                with suppress(FileNotFoundError):  # another sweeper was quicker
                    entry.unlink()


def make_directory(directory: Path) -> None:
    """Makes the directory of lock files, for the owner alone.

    Raises:
        StoreError: something else stands in its place.
    """
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        raise no_directory(directory) from None


def no_directory(directory: Path) -> StoreError:
    """The error for something else in the place of the directory of lock files."""
    return StoreError(
        "it is no directory, and drivers keep their lock files there",
        where=str(directory),
        next="move it away: the next run makes the directory",
    )


def driver_is_dead(directory: Path, driver_id: str) -> bool:
    """Whether the driver is proven dead: its lock file is gone, or its lock can be had. Leaves the lock as it was.

    Raises:
        StoreError: the directory is none.
    """
    try:
        descriptor = os.open(directory / driver_id, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except NotADirectoryError:
        raise no_directory(directory) from None
    except PermissionError:  # another user's
        return False
    try:
        # Shared, so that two who look at the same moment never take each other for the owner.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


@contextmanager
def opening(directory: Path, where: str) -> Iterator[None]:
    """One process at a time creates the store's file.

    Raises:
        StoreError: another process did not finish in time.
    """
    descriptor = os.open(directory / _OPENING, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StoreError(
                        f"another process has been creating the store for {BUSY_SECONDS} s",
                        where=where,
                        next="end that process, then try again",
                    ) from None
                time.sleep(0.005)
        yield
    finally:
        os.close(descriptor)
