"""The same turn on other durable runtimes, in the same bench run, each beside the floor of its own moment.

A peer counts as being as durable as we are when each step waits for its record and its record is synced: it makes at
least one sync a step, two steps a turn. Only those are compared with; the others are shown, with what they survive.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.disk import Disk, Figures, MeasurementError, Pair, each, times_floor
from bench.environments import NotInstalledError, environment
from bench.targets import Target

HERE = Path(__file__).resolve().parent
STEPS_A_TURN = 2
"""A model's reply and a tool's result."""
ONCE_SECONDS = 5.0
"""What takes longer is measured once, not in every round."""


@dataclass(frozen=True)
class Contestant:
    """One runtime in one setting, and how its processes are started."""

    name: str
    requirements: str | None
    """The file of its pins; None for the project's own environment."""
    one: tuple[str, ...]
    """The module that drives one run, and what follows the number of turns on its command line."""
    many: str
    """The module that drives runs at once."""
    waits: bool
    """Whether a step's record is written before the next step starts. Read in its source."""
    syncs: bool
    """Whether its setting asks the disk to sync each record; what strace counts goes before it."""
    python: Path | None = None

    @property
    def environment(self) -> str:
        """The folder of its environment."""
        return "" if self.requirements is None else self.requirements.removeprefix("requirements-").removesuffix(".txt")

    def run_of(self, disk: Disk, turns: int) -> Callable[..., Figures]:
        """One run, still to be measured."""
        return partial(disk.run, self.one[0], turns, *self.one[1:], **self._options())

    def runs_of(self, disk: Disk, runs: int, turns: int) -> Callable[..., Figures]:
        """Many runs at once, still to be measured."""
        if self.requirements is None:
            return partial(disk.run, self.many, runs, turns)
        return partial(disk.run, self.many, turns, *self.one[1:], runs, **self._options())

    def syncs_of(self, disk: Disk, turns: int, seconds: float) -> int | None:
        """How often one run waits for the disk."""
        return disk.syncs(self.one[0], turns, *self.one[1:], seconds=seconds, **self._options())

    def _options(self) -> dict[str, Any]:
        return {} if self.python is None else {"python": self.python}


US = Contestant("perdure", None, ("measured.w1",), "measured.w2", waits=True, syncs=True)


def _durabl(name: str, setting: str, *, syncs: bool) -> Contestant:
    module = "peers.durabl_agent"
    return Contestant(name, "requirements-durabl.txt", (module, setting), module, waits=True, syncs=syncs)


def _langgraph(name: str, setting: str, *, waits: bool) -> Contestant:
    module = "peers.langgraph_agent"
    return Contestant(name, "requirements-langgraph.txt", (module, setting), module, waits=waits, syncs=True)


PEERS = (
    _durabl("durabl 0.1.0, FULL", "FULL", syncs=True),
    _durabl("durabl 0.1.0, NORMAL (default)", "NORMAL", syncs=False),
    _langgraph("langgraph 1.2.24, sync", "sync", waits=True),
    _langgraph("langgraph 1.2.24, async (default)", "async", waits=False),
    # Under `sync` a superstep is waited for; the writes of the tasks inside it are handed to a thread.
    _langgraph("langgraph 1.2.24, @task, sync", "sync-tasks", waits=False),
)


@dataclass(frozen=True)
class Sizes:
    """How much is measured of each."""

    turns: tuple[int, ...] = (100, 1000)
    runs: int = 200
    turns_per_run: int = 10
    synced: tuple[int, int] = (20, 220)
    """Lengths between which syncs are counted."""
    seconds: float = 90.0
    """The most that one measurement may take."""


Taken = Pair | str
"""A measurement beside its floor, or why there is none."""
TOGETHER = "together"
"""The runs at once, among measurements named by their number of turns."""
Round = dict[int | str, Taken]


def measure(
    disk: Disk, sizes: Sizes, rounds: int, environments: Path, contestants: Sequence[Contestant] = (US, *PEERS)
) -> dict[str, Any]:
    """Every contestant in turn in each round; a row each."""
    ready, missing = installed(contestants, environments)
    taken: dict[str, list[Round]] = {one.name: [] for one in ready}
    for _ in range(rounds):
        for one in ready:
            earlier, measurements = taken[one.name], _measurements(disk, one, sizes)
            earlier.append(
                {what: _attempt(disk, run) for what, run in measurements.items() if _is_worth_it(earlier, what)}
            )
    syncs = {one.name: _syncs_a_turn(disk, one, sizes) for one in ready}
    rows = [
        {"name": one.name, "not_measured": missing[one.name]}
        if one.name in missing
        else row(one, taken[one.name], syncs[one.name])
        for one in contestants
    ]
    return {
        "runs": sizes.runs,
        "turns_per_run": sizes.turns_per_run,
        "contestants": rows,
        "compared": compared(rows, taken),
    }


def installed(contestants: Sequence[Contestant], environments: Path) -> tuple[list[Contestant], dict[str, str]]:
    """Those that can be started, and of the others, by name, why they cannot."""
    ready: list[Contestant] = []
    missing: dict[str, str] = {}
    failed: dict[str, str] = {}
    for one in contestants:
        if one.requirements is None:
            ready.append(one)
        elif one.requirements in failed:
            missing[one.name] = failed[one.requirements]
        else:
            try:
                python = environment(environments / one.environment, HERE / one.requirements)
                ready.append(replace(one, python=python))
            except NotInstalledError as error:
                missing[one.name] = failed[one.requirements] = str(error)
    return ready, missing


def _measurements(disk: Disk, one: Contestant, sizes: Sizes) -> dict[int | str, Callable[[], Figures]]:
    wanted: dict[int | str, Callable[..., Figures]] = {turns: one.run_of(disk, turns) for turns in sizes.turns}
    wanted[TOGETHER] = one.runs_of(disk, sizes.runs, sizes.turns_per_run)
    return {what: partial(run, seconds=sizes.seconds) for what, run in wanted.items()}


def _attempt(disk: Disk, run: Callable[[], Figures]) -> Taken:
    try:
        (pair,) = disk.beside_floors([run])
    except MeasurementError as error:
        return str(error).splitlines()[-1]
    return pair


def _is_worth_it(earlier: Sequence[Round], what: int | str) -> bool:
    """Not again what failed or took long in the first round."""
    if not earlier:
        return True
    first = earlier[0][what]
    return not isinstance(first, str) and first[1]["seconds"] <= ONCE_SECONDS


def _syncs_a_turn(disk: Disk, one: Contestant, sizes: Sizes) -> float | None:
    small, large = sizes.synced
    try:
        fewer, more = (one.syncs_of(disk, turns, sizes.seconds) for turns in (small, large))
    except MeasurementError:
        return None
    return None if fewer is None or more is None else (more - fewer) / (large - small)


def row(one: Contestant, rounds: Sequence[Round], syncs: float | None) -> dict[str, Any]:
    """What is shown of one contestant: medians over the rounds that were measured."""
    lengths = [_length(rounds, turns) for turns in rounds[0] if isinstance(turns, int)]
    together = _pairs(rounds, TOGETHER)
    synced = one.syncs if syncs is None else syncs >= STEPS_A_TURN
    return {
        "name": one.name,
        "not_measured": None,
        "survives_kill": one.waits,
        "survives_power_cut": one.waits and synced,
        "syncs_per_turn": syncs,
        "lengths": lengths,
        "store_bytes_per_turn": _growth([length for length in lengths if length["not_measured"] is None]),
        "runs_per_second": median(many["runs"] / many["seconds"] for _, many in together) if together else None,
        "together_not_measured": None if together else rounds[0][TOGETHER],
        "together_peak_mb": median(many["peak_bytes"] / 1e6 for _, many in together) if together else None,
    }


def _length(rounds: Sequence[Round], turns: int) -> dict[str, Any]:
    pairs = _pairs(rounds, turns)
    if not pairs:
        return {"turns": turns, "not_measured": rounds[0][turns]}
    return {
        "turns": turns,
        "not_measured": None,
        "rounds": len(pairs),
        "ms_per_turn": median(each(run, "seconds") * 1e3 for _, run in pairs),
        "times_floor": median(times_floor(pair) for pair in pairs),
        "store_bytes_per_turn": median(each(run, "store_bytes") for _, run in pairs),
        "store_bytes": median(run["store_bytes"] for _, run in pairs),
        "peak_mb": median(run["peak_bytes"] / 1e6 for _, run in pairs),
    }


def _pairs(rounds: Sequence[Round], what: int | str) -> list[Pair]:
    return [taken for found in rounds if not isinstance(taken := found.get(what, ""), str)]


def _growth(lengths: Sequence[dict[str, Any]]) -> float | None:
    """What each further turn adds to the store, between the shortest and the longest run."""
    if len(lengths) < 2:
        return None
    first, last = lengths[0], lengths[-1]
    return float((last["store_bytes"] - first["store_bytes"]) / (last["turns"] - first["turns"]))


def compared(rows: Sequence[dict[str, Any]], taken: dict[str, list[Round]]) -> list[dict[str, Any]]:
    """Our turn over that of each peer that survives what we survive, at each length; the dearest first."""
    ours = taken.get(US.name, [])
    found = []
    for peer in rows:
        if peer["name"] == US.name or peer["not_measured"] is not None or not peer["survives_power_cut"]:
            continue
        for length in peer["lengths"]:
            turns = length["turns"]
            ratios = [
                each(us[1], "seconds") / each(them[1], "seconds")
                for mine, theirs in zip(ours, taken[peer["name"]], strict=True)
                if not isinstance(us := mine.get(turns, ""), str) and not isinstance(them := theirs.get(turns, ""), str)
            ]
            if ratios:
                found.append({"peer": peer["name"], "turns": turns, "times": median(ratios)})
    return sorted(found, key=lambda one: -one["times"])


def targets(found: dict[str, Any]) -> list[Target]:
    """A turn must cost less than on every peer that is as durable."""
    durable = {one.name for one in PEERS if one.waits and one.syncs}
    missing = [one["name"] for one in found["contestants"] if one["not_measured"] and one["name"] in durable]
    without = f"; without {' and '.join(missing)}" if missing else ""
    if not found["compared"]:
        return [Target("turn against peers", None, 1.0, "x", f"no peer as durable was measured{without}")]
    dearest = found["compared"][0]
    note = f"{dearest['peer']} at {dearest['turns']:,} turns; it waits for a sync a step{without}"
    return [Target("turn against peers", dearest["times"], 1.0, "x", note)]


def table(found: dict[str, Any]) -> list[str]:
    """The section for people."""
    measured = [one for one in found["contestants"] if one["not_measured"] is None]
    lengths = [length["turns"] for length in measured[0]["lengths"]] if measured else []
    spans = "".join(f" {f'ms at {turns:,}':>11} {'x floor':>8}" for turns in lengths)
    lines = [
        f"Peers  the turn of W1; runs/s: {found['runs']} runs of {found['turns_per_run']} turns at once",
        f"{'':<34}{spans} {'syncs':>6} {'bytes':>9} {'peak MB':>8} {'runs/s':>7}  survives",
    ]
    for one in found["contestants"]:
        if one["not_measured"] is not None:
            lines.append(f"{one['name']:<34} not measured: {one['not_measured']}")
        else:
            lines.append(_line(one))
            lines += [
                f"{'':<34} at {length['turns']:,} turns not measured: {length['not_measured']}"
                for length in one["lengths"]
                if length["not_measured"] is not None
            ]
            if one["together_not_measured"] is not None:
                lines.append(f"{'':<34} runs at once not measured: {one['together_not_measured']}")
    return lines


def _line(one: dict[str, Any]) -> str:
    spans = "".join(
        f" {_shown(length.get('ms_per_turn'), '.3f'):>11} {_shown(length.get('times_floor'), '.2f'):>8}"
        for length in one["lengths"]
    )
    peak = max((length["peak_mb"] for length in one["lengths"] if length["not_measured"] is None), default=None)
    survives = ["kill -9"] * one["survives_kill"] + ["power cut"] * one["survives_power_cut"]
    return (
        f"{one['name']:<34}{spans} {_shown(one['syncs_per_turn'], '.2f'):>6} "
        f"{_shown(one['store_bytes_per_turn'], ',.0f'):>9} {_shown(peak, '.1f'):>8} "
        f"{_shown(one['runs_per_second'], '.1f'):>7}  {', '.join(survives) or 'neither for certain'}"
    )


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
