"""The benchmark: what a durable turn costs beside its floor and beside other runtimes, with the targets it must reach.

    scripts/bench [--only w1,w2,w3,startup,peers] [--rounds 5] [--turns 100,1000,10000] [--quick] [--dir DIR]
                  [--out DIR] [--json FILE|-] [--no-strace] [--strict]

Every figure is taken in a process of its own, and stands beside a measurement of its floor on the same file system at
the same time; what is printed is the median over the rounds, and for ratios the median of the ratios. Exit 1: a target
was missed, with --strict; or a measurement failed. Exit 2: it cannot be measured here, or an option is wrong.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench import curves, report, startup, w1, w2, w3
from bench.disk import ROOT, Disk, MeasurementError, UnfitPlaceError, place
from bench.peers import contest


@dataclass(frozen=True)
class Sizes:
    """How much of each workload is measured."""

    w1: Sequence[int] = (100, 1000, 10_000)
    alone: int = 1000
    """The length of the W1 that stands beside W2."""
    runs: int = 200
    turns_per_run: int = 10
    w3: Sequence[int] = (1000, 10_000)
    starts: int = 21
    peers: contest.Sizes = field(default_factory=contest.Sizes)


QUICK = Sizes((10, 60), 60, 20, 5, (20, 100), 3, contest.Sizes((10, 40), 10, 5, (5, 25), 60.0))
"""To try the harness: the figures are those of a process that has hardly begun."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, and says whether the targets were reached."""
    options = parsed(arguments)
    folder = place(options.dir)
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=folder) as scratch:
        found = measured(Disk(Path(scratch), strace=not options.no_strace), options)
    shown = json.dumps(found, indent=2)
    print(shown if options.json == "-" else report.table(found))
    if options.json and options.json != "-":
        Path(options.json).write_text(shown + "\n", encoding="utf-8")
    draw(found, options)
    missed = any(target["verdict"] == "miss" for target in found["targets"])
    return 1 if missed and options.strict else 0


def measured(disk: Disk, options: argparse.Namespace) -> dict[str, Any]:
    """The report of the workloads asked for."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "file_system": disk.kind,
        "rounds": options.rounds,
    }
    before = os.getloadavg()[0]
    for name, measure in workloads(disk, options).items():
        if name in options.only:
            print(f"bench: measuring {name}", file=sys.stderr)
            found[name] = measure()
    found["load_average"] = [before, os.getloadavg()[0]]
    found["targets"] = [target.shown() for target in report.targets(found)]
    if options.quick:
        for target in found["targets"]:
            target["verdict"] = "not judged"
    return found


def workloads(disk: Disk, options: argparse.Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    """Each workload, still to be measured, by its name."""
    sizes, rounds = options.sizes, options.rounds
    return {
        "w1": lambda: w1.measure(disk, sizes.w1, rounds),
        "w2": lambda: w2.measure(disk, sizes.runs, sizes.turns_per_run, sizes.alone, rounds),
        "w3": lambda: w3.measure(disk, sizes.w3, rounds),
        "startup": lambda: startup.measure(sizes.starts),
        "peers": lambda: contest.measure(disk, sizes.peers, rounds, options.environments),
    }


def draw(found: dict[str, Any], options: argparse.Namespace) -> None:
    """Leaves the growth curves, where there is growth to show."""
    series = curves.series_of(found)
    if not series:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    files, without = curves.written(series, options.out, options.environments)
    print(f"bench: growth curves in {' and '.join(map(str, files))}", file=sys.stderr)
    if without is not None:
        print(f"bench: no PNG: {without}", file=sys.stderr)


# The command line


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with the sizes it asks for."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description="What a durable turn costs, beside its floor and beside other runtimes."
    )
    every = ",".join(report.SECTIONS)
    parser.add_argument("--only", type=names, default=list(report.SECTIONS), help=f"workloads to measure ({every})")
    parser.add_argument("--rounds", type=positive, default=5, help="how often each pair is measured (5)")
    parser.add_argument("--turns", type=lengths, help="lengths of W1, ascending (100,1000,10000)")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, to try the harness; nothing is judged by them"
    )
    parser.add_argument("--dir", type=Path, help="folder on the disk to measure on (no tmpfs)")
    parser.add_argument(
        "--out", type=folder_or_new, default=ROOT / "bench" / "results", help="folder for curves (bench/results)"
    )
    parser.add_argument("--json", metavar="FILE", type=file_or_dash, help="write JSON there; - prints it, no table")
    parser.add_argument(
        "--environments", type=folder_or_new, default=ROOT / ".bench-peers", help="folder for what peers need installed"
    )
    parser.add_argument("--no-strace", action="store_true", help="do not count syncs")
    parser.add_argument("--strict", action="store_true", help="exit 1 when a target is missed")
    options = parser.parse_args(arguments)
    sizes = QUICK if options.quick else Sizes()
    options.sizes = sizes if options.turns is None else replace(sizes, w1=options.turns)
    options.environments = options.environments.resolve()
    return options


def names(text: str) -> list[str]:
    """Names of workloads."""
    wanted = text.split(",")
    for name in wanted:
        if name not in report.SECTIONS:
            raise argparse.ArgumentTypeError(f"{name!r} is no workload; there are {', '.join(report.SECTIONS)}")
    return wanted


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def lengths(text: str) -> list[int]:
    """Numbers of turns, at least two and ascending: growth is measured between them."""
    numbers = [positive(part) for part in text.split(",")]
    if len(numbers) < 2 or numbers != sorted(set(numbers)):
        raise argparse.ArgumentTypeError(f"{text!r} is not two or more ascending numbers with commas between")
    return numbers


def folder_or_new(text: str) -> Path:
    """A folder, or a name that can become one."""
    path = Path(text)
    nearest = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} can be no folder: {nearest} is not a folder that can be written")
    return path


def file_or_dash(text: str) -> str:
    """A file that can be written, or `-`; said before minutes were spent, not after."""
    path = Path(text)
    if text != "-" and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: it is a folder, or its folder does not exist")
    return text


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MeasurementError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(1)
    except UnfitPlaceError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
