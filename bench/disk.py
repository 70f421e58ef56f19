"""Where is measured, and the processes that are: each figure comes from a process of its own over files of its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
"""File systems on which a sync costs nothing: a figure from there would say nothing."""
SYNC_CALLS = "fdatasync,fsync,sync_file_range,msync"

FLOOR_TURNS = 500
"""So many that a single slow sync does not make the floor."""

Figures = dict[str, float]
Pair = tuple[Figures, Figures]
"""The floor and what was measured beside it."""


class UnfitPlaceError(Exception):
    """A folder that says nothing about a disk."""


class MeasurementError(Exception):
    """A measured process failed."""


class TooSlowError(MeasurementError):
    """A measured process took longer than it may."""


def place(wanted: Path | None) -> Path:
    """The folder to measure in: the one asked for, else the project's own or the system's temporary one."""
    if wanted is not None:
        if not wanted.is_dir():
            raise UnfitPlaceError(f"{wanted} is no folder; name one that exists with --dir")
        kind = file_system(wanted)
        if kind in IN_MEMORY:
            raise UnfitPlaceError(
                f"{wanted} lies on {kind}, where a sync costs nothing; name a folder on a disk with --dir"
            )
        if not os.access(wanted, os.W_OK):
            raise UnfitPlaceError(f"{wanted} cannot be written; name a folder of your own with --dir")
        return wanted.resolve()
    candidates = [ROOT, Path(tempfile.gettempdir())]
    for folder in candidates:
        if os.access(folder, os.W_OK) and file_system(folder) not in IN_MEMORY:
            return folder
    raise UnfitPlaceError(f"neither {candidates[0]} nor {candidates[1]} is a writable folder on a disk; give --dir")


def file_system(folder: Path) -> str:
    """The type of the file system a folder lies on; `unknown` where the system does not tell."""
    found = subprocess.run(["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else "unknown"


class Disk:
    """Measurements in one folder."""

    def __init__(self, folder: Path, *, strace: bool = True) -> None:
        self.folder = folder
        self.kind = file_system(folder)
        self._strace = strace and shutil.which("strace") is not None

    def floor(self) -> Figures:
        """What raw commits cost at this moment."""
        return self.run("measured.floor", FLOOR_TURNS)

    def beside_floors(self, measurements: Sequence[Callable[[], Figures]]) -> list[Pair]:
        """Each measurement with the mean of the floors before and after it, so that a disk that is slow for a while is
        slow for both."""
        found, before = [], self.floor()
        for measure in measurements:
            measured = measure()
            after = self.floor()
            found.append(({name: (before[name] + after[name]) / 2 for name in before}, measured))
            before = after
        return found

    def run(
        self,
        module: str,
        *arguments: object,
        python: Path | str = sys.executable,
        prefix: Sequence[str] = (),
        seconds: float | None = None,
        over: Path | None = None,
    ) -> Figures:
        """The figures a module of `bench` prints, run as a process over a fresh folder, or over a copy of `over`.

        Raises:
            TooSlowError: it did not end within `seconds`; it was killed.
            MeasurementError: it failed.
        """
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            fresh = Path(scratch) / "store"
            if over is None:
                fresh.mkdir()
            else:
                shutil.copytree(over, fresh)
            code, out, err = self._process(module, arguments, python, prefix, seconds, fresh)
        if code != 0:
            raise MeasurementError(f"bench.{module} {arguments} ended with {code}: {err.strip()[-2000:]}")
        figures: Figures = json.loads(out)
        return figures

    def killed(self, module: str, *arguments: object) -> Path:
        """The folder that a module leaves which dies by SIGKILL.

        Raises:
            MeasurementError: it ended otherwise.
        """
        fresh = Path(tempfile.mkdtemp(dir=self.folder))
        code, _, err = self._process(module, arguments, sys.executable, (), None, fresh)
        if code != -signal.SIGKILL:
            raise MeasurementError(f"bench.{module} {arguments} ended with {code}: {err.strip()[-2000:]}")
        return fresh

    def syncs(self, module: str, *arguments: object, **options: Any) -> int | None:
        """How often that process waited for the disk, checkpoints included; None without a working strace."""
        if not self._strace:
            return None
        log = self.folder / "strace.log"
        tracing = ["strace", "-f", "-qq", "-e", f"trace={SYNC_CALLS}", "-o", str(log)]
        try:
            self.run(module, *arguments, prefix=tracing, **options)
        except MeasurementError as error:
            if "ptrace" in str(error):  # a container may forbid it
                return None
            raise
        with log.open(encoding="utf-8", errors="replace") as lines:
            # A call that another thread's line cuts in two is shown once more as resumed.
            return sum(1 for line in lines if "sync" in line and "resumed>" not in line)

    @staticmethod
    def _process(
        module: str,
        arguments: Sequence[object],
        python: Path | str,
        prefix: Sequence[str],
        seconds: float | None,
        folder: Path,
    ) -> tuple[int, str, str]:
        command = [*prefix, str(python), "-P", "-m", f"bench.{module}", str(folder / "bench.db"), *map(str, arguments)]
        found_first = [str(ROOT)]
        if str(python) == sys.executable and os.environ.get("PYTHONPATH"):
            found_first.append(os.environ["PYTHONPATH"])
        # Tracing would send what a peer does over the network.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(found_first), "LANGSMITH_TRACING": "false"}
        # An interrupt while it starts would leave it without anyone who knows of it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        # In a group of its own, so that a tracer and what it traces end together.
        started = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            out, err = started.communicate(timeout=seconds)
        except BaseException as error:
            os.killpg(started.pid, signal.SIGKILL)
            started.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise TooSlowError(f"over {seconds:g} s") from error
            raise
        return started.returncode, out, err


def each(figures: Figures, name: str) -> float:
    """That figure for one turn."""
    return figures[name] / figures["turns"]


def times_floor(pair: Pair) -> float:
    """A turn in turns of the floor beside it."""
    floor, measured = pair
    return each(measured, "seconds") / each(floor, "seconds")
