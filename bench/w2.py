"""W2, many runs at once: what sharing commits is worth, and what it costs in CPU."""

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

from bench.disk import Disk, Pair, each
from bench.targets import Target

MOST_SYNCS = 0.2
MOST_CPU = 1.3
LEAST_RUNS = 300.0
QUICK_COMMIT = 0.11e-3
"""Seconds of a raw commit on the disk that LEAST_RUNS was set for."""


def measure(disk: Disk, runs: int, turns: int, alone: int, rounds: int) -> dict[str, Any]:
    """In each round one run of `alone` turns, then the many, between floors; then the syncs."""
    both = [partial(disk.run, "measured.w1", alone), partial(disk.run, "measured.w2", runs, turns)]
    return summary([disk.beside_floors(both) for _ in range(rounds)], syncs_a_turn(disk, runs, turns))


def syncs_a_turn(disk: Disk, runs: int, turns: int) -> float | None:
    """Of the runs alone: those of the same process without the runs are taken off."""
    empty = disk.syncs("measured.w2", 0, turns)
    full = None if empty is None else disk.syncs("measured.w2", runs, turns)
    return None if empty is None or full is None else (full - empty) / (runs * turns)


def summary(rounds: Sequence[Sequence[Pair]], syncs: float | None) -> dict[str, Any]:
    """Medians over the rounds; each round is W1, then W2, with their floors."""
    together = [w2 for _, (_, w2) in rounds]
    commit = median(each(floor, "seconds") / 2 for _, (floor, _) in rounds)
    return {
        "runs": int(together[0]["runs"]),
        "turns_per_run": int(together[0]["turns"] / together[0]["runs"]),
        "runs_per_second": median(w2["runs"] / w2["seconds"] for w2 in together),
        "ms_per_turn": median(each(w2, "seconds") * 1e3 for w2 in together),
        "floor_commit_ms": commit * 1e3,
        "least_runs_per_second": least_runs_a_second(commit, together[0]["turns"] / together[0]["runs"]),
        "cpu_ms_per_turn": median(each(w2, "cpu_seconds") * 1e3 for w2 in together),
        "w1_turns": int(rounds[0][0][1]["turns"]),
        "w1_cpu_ms_per_turn": median(each(w1, "cpu_seconds") * 1e3 for (_, w1), _ in rounds),
        "cpu_times_w1": median(each(w2, "cpu_seconds") / each(w1, "cpu_seconds") for (_, w1), (_, w2) in rounds),
        "commits_per_turn": median(each(w2, "commits") for w2 in together),
        "syncs_per_turn": syncs,
        "peak_mb": median(w2["peak_bytes"] / 1e6 for w2 in together),
    }


def least_runs_a_second(commit: float, turns: float) -> float:
    """The target on this disk: where a commit takes longer than 0.11 ms, a run may take longer by what the syncs it is
    allowed cost here, and by nothing else."""
    later = max(0.0, commit - QUICK_COMMIT)
    return 1 / (1 / LEAST_RUNS + MOST_SYNCS * turns * later)


def targets(found: dict[str, Any]) -> list[Target]:
    """What W2 must reach."""
    floor = f"raw commit {found['floor_commit_ms']:.3f} ms; {LEAST_RUNS:g} where it takes {QUICK_COMMIT * 1e3:g}"
    beside = f"W1 of {found['w1_turns']:,} turns beside it: {found['w1_cpu_ms_per_turn']:.3f} ms"
    return [
        Target("W2 syncs a turn", found["syncs_per_turn"], MOST_SYNCS, note="strace, checkpoints included"),
        Target("W2 CPU a turn", found["cpu_times_w1"], MOST_CPU, "x W1", beside),
        Target(
            "W2 runs a second", found["runs_per_second"], found["least_runs_per_second"], note=floor, side="at least"
        ),
    ]


def table(found: dict[str, Any]) -> list[str]:
    """The section for people."""
    syncs = "-" if found["syncs_per_turn"] is None else f"{found['syncs_per_turn']:.3f}"
    figures = (
        f"{found['runs_per_second']:>8.1f} {found['ms_per_turn']:>9.3f} {found['cpu_ms_per_turn']:>9.3f} "
        f"{found['cpu_times_w1']:>9.2f} {found['commits_per_turn']:>8.3f} {syncs:>8} {found['peak_mb']:>8.1f}"
    )
    return [
        f"W2  {found['runs']} runs of {found['turns_per_run']} turns at once, one process",
        f"{'runs/s':>8} {'ms/turn':>9} {'CPU ms':>9} {'x W1 CPU':>9} {'commits':>8} {'syncs':>8} {'peak MB':>8}",
        figures,
    ]
