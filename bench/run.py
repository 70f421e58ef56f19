"""The benchmark: what a durable turn costs beside its floor, with the targets it must reach.

    scripts/bench [--dir DIR] [--json FILE|-] [--rounds 5] [--turns 100,1000,10000] [--strict]

Every figure is taken in a process of its own. In each round every size of W1 stands between two measurements of the
floor on the same file system, so that a disk that is slow for a while is slow for both; what is printed is the median
over the rounds, and for ratios the median of the ratios. Exit 1: a target was missed, with --strict; or a measurement
failed. Exit 2: it cannot be measured here.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

BENCH = Path(__file__).resolve().parent
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
"""File systems on which a sync costs nothing: a figure from there would say nothing."""
SYNC_CALLS = "fdatasync,fsync,sync_file_range,msync"

MOST_COMMITS = 2.05
"""Two commits a turn; a heartbeat that falls due while nothing is written is one more, a few in a thousand turns."""

FLOOR_TURNS = 500
"""So many that a single slow sync does not make the floor."""

Figures = dict[str, float]
Pair = tuple[Figures, Figures]
"""The floor and W1, measured side by side."""


@dataclass(frozen=True)
class Target:
    """One promise about W1, what was measured, and the most it may be."""

    name: str
    value: float | None
    """None: not measured here."""
    most: float
    unit: str = ""
    note: str = ""

    @property
    def verdict(self) -> str:
        """`ok`, `miss` or `not measured`."""
        if self.value is None:
            return "not measured"
        return "ok" if self.value <= self.most else "miss"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, and says whether the targets were reached."""
    options = parsed(arguments)
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=place(options.dir)) as folder:
        disk = Disk(Path(folder))
        rounds = [disk.pairs(options.turns) for _ in range(options.rounds)]
        syncs = None if options.no_strace else disk.syncs_a_turn(options.turns)
        report = summary(options.turns, rounds, syncs, disk.kind)
    shown = json.dumps(report, indent=2)
    if options.json == "-":
        print(shown)
    else:
        print(table(report))
        if options.json:
            Path(options.json).write_text(shown + "\n", encoding="utf-8")
    missed = any(target["verdict"] == "miss" for target in report["targets"])
    return 1 if missed and options.strict else 0


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description="What a durable turn costs, beside its floor.")
    parser.add_argument("--dir", type=Path, help="folder on the disk to measure on (no tmpfs)")
    parser.add_argument("--json", metavar="FILE", help="write JSON there; - prints it in place of the table")
    parser.add_argument("--rounds", type=positive, default=5, help="how often each pair is measured (5)")
    parser.add_argument(
        "--turns", type=sizes, default=[100, 1000, 10_000], help="sizes of W1, ascending (100,1000,10000)"
    )
    parser.add_argument("--no-strace", action="store_true", help="do not count syncs")
    parser.add_argument("--strict", action="store_true", help="exit 1 when a target is missed")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def sizes(text: str) -> list[int]:
    """Numbers of turns, at least two and ascending: growth is measured between them."""
    numbers = [positive(part) for part in text.split(",")]
    if len(numbers) < 2 or numbers != sorted(set(numbers)):
        raise argparse.ArgumentTypeError(f"{text!r} is not two or more ascending numbers with commas between")
    return numbers


# Where


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
        return wanted
    candidates = [BENCH.parent, Path(tempfile.gettempdir())]
    for folder in candidates:
        if os.access(folder, os.W_OK) and file_system(folder) not in IN_MEMORY:
            return folder
    raise UnfitPlaceError(f"neither {candidates[0]} nor {candidates[1]} is a writable folder on a disk; give --dir")


def file_system(folder: Path) -> str:
    """The type of the file system a folder lies on; `unknown` where the system does not tell."""
    found = subprocess.run(["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else "unknown"


# Measuring


class Disk:
    """Measurements in one folder; each in a fresh process over fresh files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.kind = file_system(folder)

    def pairs(self, sizes: Sequence[int]) -> list[Pair]:
        """Every size of W1, with the mean of the floors before and after it."""
        found, before = [], self._run("floor.py", FLOOR_TURNS)
        for turns in sizes:
            measured = self._run("w1.py", turns)
            after = self._run("floor.py", FLOOR_TURNS)
            found.append(({name: (before[name] + after[name]) / 2 for name in before}, measured))
            before = after
        return found

    def syncs_a_turn(self, sizes: Sequence[int]) -> float | None:
        """Calls that wait for the disk, checkpoints included; None without strace.

        Counted between two sizes, so that opening and closing the store does not count; the larger one is long enough
        for several checkpoints.
        """
        if shutil.which("strace") is None:
            return None
        small, large = sizes[0], min(sizes[-1], sizes[0] + 2000)
        counted = [self._syncs(turns) for turns in (small, large)]
        return None if None in counted else (counted[1] - counted[0]) / (large - small)  # type: ignore[operator]

    def _syncs(self, turns: int) -> int | None:
        log = self._folder / "strace.log"
        tracing = ["strace", "-f", "-qq", "-e", f"trace={SYNC_CALLS}", "-o", str(log)]
        try:
            self._run("w1.py", turns, tracing)
        except MeasurementError as error:
            if "ptrace" in str(error):  # a container may forbid it
                return None
            raise
        with log.open(encoding="utf-8", errors="replace") as lines:
            # A call that another thread's line cuts in two is shown once more as resumed.
            return sum(1 for line in lines if "sync" in line and "resumed>" not in line)

    def _run(self, script: str, turns: int, prefix: Sequence[str] = ()) -> Figures:
        with tempfile.TemporaryDirectory(dir=self._folder) as fresh:
            command = [*prefix, sys.executable, str(BENCH / script), str(Path(fresh) / "bench.db"), str(turns)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise MeasurementError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
        figures: Figures = json.loads(done.stdout)
        return figures


class UnfitPlaceError(Exception):
    """A folder that says nothing about a disk."""


class MeasurementError(Exception):
    """A measured process failed."""


# Reporting


def summary(turns: Sequence[int], rounds: Sequence[Sequence[Pair]], syncs: float | None, kind: str) -> dict[str, Any]:
    """The report: a row a size, then the targets."""

    def over_rounds(size: int, value: Callable[[Figures, Figures], float]) -> float:
        return median(value(*measured[size]) for measured in rounds)

    rows = [
        {
            "turns": count,
            "ms_per_turn": over_rounds(size, lambda _, w1: each(w1, "seconds") * 1e3),
            "floor_ms_per_turn": over_rounds(size, lambda floor, _: each(floor, "seconds") * 1e3),
            "times_floor": median(times_floor(measured[size]) for measured in rounds),
            "cpu_ms_per_turn": over_rounds(size, lambda _, w1: each(w1, "cpu_seconds") * 1e3),
            "floor_cpu_ms_per_turn": over_rounds(size, lambda floor, _: each(floor, "cpu_seconds") * 1e3),
            "commits_per_turn": over_rounds(size, lambda _, w1: each(w1, "commits")),
            "peak_mb": over_rounds(size, lambda _, w1: w1["peak_bytes"] / 1e6),
        }
        for size, count in enumerate(turns)
    ]
    growth = [
        {
            "from": turns[size],
            "to": turns[size + 1],
            "store_bytes_per_turn": median(growth_of(measured, size, "store_bytes") for measured in rounds),
            "commits_per_turn": median(growth_of(measured, size, "commits") for measured in rounds),
        }
        for size in range(len(turns) - 1)
    ]
    # Each over its own floor: minutes lie between the two, in which the disk may have become another.
    last_to_first = median(times_floor(measured[-1]) / times_floor(measured[0]) for measured in rounds)
    report: dict[str, Any] = {
        "workload": "w1",
        "rounds": len(rounds),
        "file_system": kind,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "sizes": rows,
        "growth": growth,
        "growth_of_a_turn": last_to_first,
        "syncs_per_turn": syncs,
    }
    report["targets"] = [shown(target) for target in targets(rows, growth, syncs, last_to_first)]
    return report


def times_floor(pair: Pair) -> float:
    """A turn of W1 in turns of the floor beside it."""
    floor, w1 = pair
    return each(w1, "seconds") / each(floor, "seconds")


def growth_of(measured: Sequence[Pair], size: int, name: str) -> float:
    """What each further turn adds between a size and the next: a run's first and last event do not count."""
    smaller, larger = measured[size][1], measured[size + 1][1]
    return (larger[name] - smaller[name]) / (larger["turns"] - smaller["turns"])


def each(figures: Figures, name: str) -> float:
    """That figure for one turn."""
    return figures[name] / figures["turns"]


def targets(
    rows: Sequence[dict[str, float]], growth: Sequence[dict[str, float]], syncs: float | None, last_to_first: float
) -> list[Target]:
    """What W1 must reach, judged at 1,000 turns, or at the nearest size that was measured."""
    middle = min(rows, key=lambda row: abs(row["turns"] - 1000))
    at = f"at {middle['turns']:,} turns"
    store = max(step["store_bytes_per_turn"] for step in growth) / 1e3
    ends = f"{rows[-1]['turns']:,} against {rows[0]['turns']:,} turns, each over its floor"
    commits = max(step["commits_per_turn"] for step in growth)
    return [
        Target("commits a turn", commits, MOST_COMMITS, note="two, and the driver's heartbeats"),
        Target("syncs a turn", syncs, 2.1, note="strace, checkpoints included"),
        Target("times the floor", middle["times_floor"], 4.0, note=f"{at}; the aim is 2.5"),
        Target("growth of a turn", last_to_first, 1.2, note=ends),
        Target("store a turn", store, 1.8, "KB", "the steepest step between sizes"),
        Target("peak memory", middle["peak_mb"], 60.0, "MB", at),
    ]


def shown(target: Target) -> dict[str, Any]:
    """A target as JSON."""
    return {
        "name": target.name,
        "value": target.value,
        "most": target.most,
        "unit": target.unit,
        "verdict": target.verdict,
        "note": target.note,
    }


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    header = (
        f"W1 on {report['file_system']}, Python {report['python']}, {report['cpus']} CPUs, median of {report['rounds']}"
    )
    lines = [
        header,
        "",
        f"{'turns':>8} {'ms/turn':>9} {'floor':>9} {'x floor':>8} {'CPU ms':>8} {'commits':>8} {'peak MB':>8}",
    ]
    lines += [
        f"{row['turns']:>8,} {row['ms_per_turn']:>9.3f} {row['floor_ms_per_turn']:>9.3f} {row['times_floor']:>8.2f} "
        f"{row['cpu_ms_per_turn']:>8.3f} {row['commits_per_turn']:>8.3f} {row['peak_mb']:>8.1f}"
        for row in report["sizes"]
    ]
    lines += [""] + [
        f"store, {step['from']:,} to {step['to']:,} turns: {step['store_bytes_per_turn']:,.0f} bytes a turn"
        for step in report["growth"]
    ]
    lines += ["", f"{'target':<18} {'measured':>12} {'at most':>8}"]
    for target in report["targets"]:
        measured = "-" if target["value"] is None else f"{target['value']:.2f} {target['unit']}".strip()
        judged = f"{target['name']:<18} {measured:>12} {target['most']:>8g}  {target['verdict']:<12} {target['note']}"
        lines.append(judged.rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MeasurementError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(1)
    except UnfitPlaceError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(2)
