"""W3, coming back: the replay of a long run that was killed, beside what reading and proving its rows costs."""

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

from bench.disk import Disk, Pair, each, times_floor
from bench.targets import Target

MOST_TIMES_FLOOR = 3.0
MOST_GROWTH = 1.2


def measure(disk: Disk, turns: Sequence[int], rounds: int) -> dict[str, Any]:
    """Each length is cut once; every measurement is over a copy of it, the floor before the replay."""
    with ExitStack() as clean:
        stores = [disk.killed("measured.w3_cut", count) for count in turns]
        for store in stores:
            clean.callback(shutil.rmtree, store)
        measured = [
            [
                (disk.run("measured.w3_floor", count, over=store), disk.run("measured.w3", count, over=store))
                for count, store in zip(turns, stores, strict=True)
            ]
            for _ in range(rounds)
        ]
    return summary(turns, measured)


def summary(turns: Sequence[int], rounds: Sequence[Sequence[Pair]]) -> dict[str, Any]:
    """A row a length, medians over the rounds."""
    rows = [
        {
            "turns": count,
            "seconds": median(measured[size][1]["seconds"] for measured in rounds),
            "us_per_turn": median(each(measured[size][1], "seconds") * 1e6 for measured in rounds),
            "floor_us_per_turn": median(each(measured[size][0], "seconds") * 1e6 for measured in rounds),
            "times_floor": median(times_floor(measured[size]) for measured in rounds),
            "events_per_second": median(
                measured[size][0]["events"] / measured[size][1]["seconds"] for measured in rounds
            ),
            "peak_mb": median(measured[size][1]["peak_bytes"] / 1e6 for measured in rounds),
        }
        for size, count in enumerate(turns)
    ]
    growth = median(each(measured[-1][1], "seconds") / each(measured[0][1], "seconds") for measured in rounds)
    return {"sizes": rows, "growth_of_a_turn": growth}


def targets(found: dict[str, Any]) -> list[Target]:
    """What W3 must reach; the dearest length counts."""
    rows = found["sizes"]
    dearest = max(rows, key=lambda row: row["times_floor"])
    ends = f"{rows[-1]['turns']:,} against {rows[0]['turns']:,} turns"
    note = f"at {dearest['turns']:,} turns; rows read, both hashes, JSON decoded"
    return [
        Target("W3 times the floor", dearest["times_floor"], MOST_TIMES_FLOOR, note=note),
        Target("W3 growth of a turn", found["growth_of_a_turn"], MOST_GROWTH, note=ends),
    ]


def table(found: dict[str, Any]) -> list[str]:
    """The section for people."""
    lines = [
        "W3  from `resume` of a killed run to its first new model request",
        f"{'turns':>8} {'seconds':>9} {'us/turn':>9} {'floor':>9} {'x floor':>8} {'events/s':>9} {'peak MB':>8}",
    ]
    return lines + [
        f"{row['turns']:>8,} {row['seconds']:>9.3f} {row['us_per_turn']:>9.1f} {row['floor_us_per_turn']:>9.1f} "
        f"{row['times_floor']:>8.2f} {row['events_per_second']:>9,.0f} {row['peak_mb']:>8.1f}"
        for row in found["sizes"]
    ]
