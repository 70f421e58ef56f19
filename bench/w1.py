"""W1, the price of a turn: one run, at several lengths, beside the floor."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

from bench.disk import Disk, Figures, Pair, each, times_floor
from bench.targets import Target

MOST_COMMITS = 2.05
"""Two commits a turn; a heartbeat that falls due while nothing is written is one more, a few in a thousand turns."""
JUDGED_AT = 1000


def measure(disk: Disk, turns: Sequence[int], rounds: int) -> dict[str, Any]:
    """Every length between floors, in each round; then the syncs."""
    lengths = [partial(disk.run, "measured.w1", count) for count in turns]
    return summary(turns, [disk.beside_floors(lengths) for _ in range(rounds)], syncs_a_turn(disk, turns))


def syncs_a_turn(disk: Disk, turns: Sequence[int]) -> float | None:
    """Counted between two lengths, so that opening and closing the store does not count; the larger one is long enough
    for several checkpoints."""
    small, large = turns[0], min(turns[-1], turns[0] + 2000)
    fewer = disk.syncs("measured.w1", small)
    more = None if fewer is None else disk.syncs("measured.w1", large)
    return None if fewer is None or more is None else (more - fewer) / (large - small)


def summary(turns: Sequence[int], rounds: Sequence[Sequence[Pair]], syncs: float | None) -> dict[str, Any]:
    """A row a length, medians over the rounds, and what each further turn adds."""

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
            "store_bytes_per_turn": over_rounds(size, lambda _, w1: each(w1, "store_bytes")),
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
    return {"sizes": rows, "growth": growth, "growth_of_a_turn": last_to_first, "syncs_per_turn": syncs}


def growth_of(measured: Sequence[Pair], size: int, name: str) -> float:
    """What each further turn adds between a length and the next: a run's first and last event do not count."""
    smaller, larger = measured[size][1], measured[size + 1][1]
    return (larger[name] - smaller[name]) / (larger["turns"] - smaller["turns"])


def targets(found: dict[str, Any]) -> list[Target]:
    """What W1 must reach, judged at 1,000 turns, or at the nearest length that was measured."""
    rows, growth = found["sizes"], found["growth"]
    middle = min(rows, key=lambda row: abs(row["turns"] - JUDGED_AT))
    at = f"at {middle['turns']:,} turns"
    store = max(step["store_bytes_per_turn"] for step in growth) / 1e3
    commits = max(step["commits_per_turn"] for step in growth)
    ends = f"{rows[-1]['turns']:,} against {rows[0]['turns']:,} turns, each over its floor"
    return [
        Target("W1 commits a turn", commits, MOST_COMMITS, note="two, and the driver's heartbeats"),
        Target("W1 syncs a turn", found["syncs_per_turn"], 2.1, note="strace, checkpoints included"),
        Target("W1 times the floor", middle["times_floor"], 4.0, note=f"{at}; the aim is 2.5"),
        Target("W1 growth of a turn", found["growth_of_a_turn"], 1.2, note=ends),
        Target("W1 store a turn", store, 1.8, "KB", "the steepest step between lengths"),
        Target("W1 peak memory", middle["peak_mb"], 60.0, "MB", at),
    ]


def table(found: dict[str, Any]) -> list[str]:
    """The section for people."""
    lines = [
        "W1  one run, one call a turn; the floor is two raw commits",
        f"{'turns':>8} {'ms/turn':>9} {'floor':>9} {'x floor':>8} {'CPU ms':>8} {'commits':>8} {'peak MB':>8}",
    ]
    lines += [
        f"{row['turns']:>8,} {row['ms_per_turn']:>9.3f} {row['floor_ms_per_turn']:>9.3f} {row['times_floor']:>8.2f} "
        f"{row['cpu_ms_per_turn']:>8.3f} {row['commits_per_turn']:>8.3f} {row['peak_mb']:>8.1f}"
        for row in found["sizes"]
    ]
    return lines + [
        f"store, {step['from']:,} to {step['to']:,} turns: {step['store_bytes_per_turn']:,.0f} bytes a turn"
        for step in found["growth"]
    ]
