"""The campaign: runs of the errand killed over and over, at random moments and at syncs of the store, until each has
ended; then everything that happened is counted.

    python -m perdure.testing.killing.campaign --kills 3000 --minutes 30

Its last line is `{"kills", "by_phase", "duplicates", "lost", "wedged", "refused_or_parked"}`. A kill counts when it met
a run that was being driven and had not ended. Lanes share one store; each kills its own runs.
"""

import argparse
import asyncio
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from perdure.engine import Engine
from perdure.errors import PerdureError
from perdure.runs import indexed
from perdure.stores.verify import verify
from perdure.testing.killing import victim
from perdure.testing.killing.errand import LOST, SETTLED, Ledger, doubled, missing
from perdure.testing.killing.folders import must_be_empty
from perdure.testing.killing.marks import PHASES, Marks
from perdure.testing.killing.processes import Ended, Process, adopt_orphans, fork

RUN_PREFIX = "errand-"
LEAST_SHARE = 0.1
"""Each phase must have had at least this share of the kills."""
SHARES_FROM = 100
"""Below so many kills the shares say nothing."""
_MOST_MINUTES = 10_000.0
_KILLS_A_RUN = 12
_DRIVES_A_RUN = 200
_MOST_WEDGED = 20
"""A lane that met so many runs that do not end has found enough."""
_LONGEST_DRIVE_S = 60.0
_SPREAD_S = 0.1
"""A random kill comes up to so long after the run is driven: about what an undisturbed drive takes."""
_SYNCS = 40
"""A kill at a sync comes at one of the first so many: about those of an undisturbed drive."""
_POLL_S = 0.0005
_AIMED_SHARE = 0.6
_AIMS = ("between", "between", "model", "effect", "committing")
"""What aimed kills aim at. Between two calls a driver is for the shortest time."""
_STRACE_SHARE = 0.02
_AT_SYNC_SHARE = 0.2


@dataclass
class Tally:
    """What came of a campaign, or of one lane."""

    by_phase: Counter[str] = field(default_factory=Counter)
    how: Counter[str] = field(default_factory=Counter)
    """Kills by how they were made."""
    runs: int = 0
    duplicates: int = 0
    lost: int = 0
    wedged: int = 0
    refused_or_parked: int = 0
    findings: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        """All that counted."""
        return self.by_phase.total()

    def add(self, other: "Tally") -> None:
        """Adds another lane's."""
        self.by_phase += other.by_phase
        self.how += other.how
        self.findings += other.findings
        for name in ("runs", "duplicates", "lost", "wedged", "refused_or_parked"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def line(self) -> str:
        """The campaign's last line."""
        return json.dumps(
            {
                "kills": self.kills,
                "by_phase": {phase: self.by_phase[phase] for phase in PHASES},
                "duplicates": self.duplicates,
                "lost": self.lost,
                "wedged": self.wedged,
                "refused_or_parked": self.refused_or_parked,
            }
        )

    def problems(self) -> list[str]:
        """Why the campaign failed; empty when it did not."""
        found = [f"{getattr(self, name)} {name}" for name in ("duplicates", "lost", "wedged") if getattr(self, name)]
        if not self.kills:
            found.append("no kill met a live run: nothing was tried")
        if self.kills >= SHARES_FROM:
            thin = [phase for phase in PHASES if self.by_phase[phase] < LEAST_SHARE * self.kills]
            found += [f"only {self.by_phase[phase]} of {self.kills} kills met the phase {phase}" for phase in thin]
        return found


@dataclass(frozen=True)
class Lane:
    """One sequence of runs, each killed until it has ended."""

    directory: Path
    number: int
    kills: int
    """How many to make."""
    deadline: float
    """On the monotonic clock: no new run is begun after it."""
    seed: int
    sabotage: str | None
    strace: bool

    def work(self) -> int:
        """Does it, in a process of its own; leaves the tally in a file."""
        adopt_orphans()
        tally, chance = Tally(), random.Random(f"{self.seed} {self.number}")
        with Marks(self._page) as marks:
            while tally.kills < self.kills and tally.wedged < _MOST_WEDGED and time.monotonic() < self.deadline:
                self._run(f"{RUN_PREFIX}{self.number}-{tally.runs}", marks, tally, chance)
                tally.runs += 1
        self.result.write_text(json.dumps(tally.__dict__), "utf-8")
        return 0

    @property
    def result(self) -> Path:
        """The file with the tally."""
        return self.directory / f"lane-{self.number}.json"

    @property
    def output(self) -> Path:
        """What the lane and its processes printed."""
        return self.directory / f"lane-{self.number}.out"

    @property
    def _page(self) -> Path:
        return self.directory / f"lane-{self.number}.marks"

    def _run(self, run_id: str, marks: Marks, tally: Tally, chance: random.Random) -> None:
        marks.durable = killed = 0
        for _ in range(_DRIVES_A_RUN):
            marks.clear()
            spare = killed >= _KILLS_A_RUN
            how, ended = self._drive(run_id, marks, chance, spare)
            if ended is None:
                tally.wedged += 1
                tally.findings.append(
                    f"{run_id}: a drive ({how}) neither came to its kill nor ended in {_LONGEST_DRIVE_S:g} s"
                )
                return
            if ended.killed and marks.live:
                killed += 1
                tally.by_phase[marks.phase] += 1
                tally.how[how] += 1
            elif ended.code in (victim.PARKED, victim.REFUSED):
                tally.refused_or_parked += 1
            elif ended.code == victim.ENDED:
                return
            elif not ended.killed:
                tally.wedged += 1
                tally.findings.append(f"{run_id}: a drive ended with {ended.code}; see {self.output.name}")
                return
        tally.wedged += 1
        tally.findings.append(f"{run_id}: it has not ended after {_DRIVES_A_RUN} drives")

    def _drive(self, run_id: str, marks: Marks, chance: random.Random, spare: bool) -> tuple[str, Ended | None]:
        """One drive, killed somewhere unless it is spared. None: it was spared and did not end."""
        part = victim.Part(str(self.directory), str(self._page), run_id, chance.getrandbits(32), sabotage=self.sabotage)
        drawn, sync = chance.random(), chance.randrange(1, _SYNCS)
        if not spare and self.strace and drawn < _STRACE_SHARE:
            return "strace", _under_strace(part, sync, self.output)
        at_sync = not spare and drawn < _AT_SYNC_SHARE
        if at_sync:
            part = msgspec.structs.replace(part, sync=sync, after=chance.random() < 0.5)
        process = fork(partial(victim.drive, part), self.output)
        if spare or at_sync:
            return "sync", _ended(process)
        return "random", self._killed(process, marks, chance)

    def _killed(self, process: Process, marks: Marks, chance: random.Random) -> Ended | None:
        """Kills it at a random moment after it began to drive; more often than not at the next moment of a drawn phase,
        so that the short phases are met as well."""
        until = time.monotonic() + _LONGEST_DRIVE_S
        while not marks.live and time.monotonic() < until:
            if (ended := process.wait(_POLL_S)) is not None:
                return ended
        if not marks.live:
            process.kill()
            process.wait()
            return None
        aim = chance.choice(_AIMS) if chance.random() < _AIMED_SHARE else None
        if (ended := process.wait(chance.uniform(0, _SPREAD_S))) is not None:
            return ended
        until = time.monotonic() + _SPREAD_S
        while aim is not None and marks.live and marks.phase != aim and time.monotonic() < until:
            pass  # a phase may last less than a sleep would
        process.kill()
        return process.wait()


def _ended(process: Process) -> Ended | None:
    """How it ended by itself; None when it had to be ended."""
    ended = process.wait(_LONGEST_DRIVE_S)
    if ended is None:
        process.kill()
        process.wait()
    return ended


def _under_strace(part: victim.Part, sync: int, output: Path) -> Ended | None:
    """One drive in a process that the kernel's tracer kills as it enters a sync; None when it did not end."""
    syncs = "fdatasync,fsync"
    tracer = ["strace", "-f", "-qq", "-o", os.devnull, "-e", f"trace={syncs}"]
    tracer += ["-e", f"inject={syncs}:signal=KILL:when={sync}"]
    program = [sys.executable, "-m", "perdure.testing.killing.victim", msgspec.json.encode(part).decode()]
    with output.open("ab") as written, suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            [*tracer, *program], stdout=written, stderr=written, check=False, timeout=_LONGEST_DRIVE_S
        )
        return Ended(done.returncode)
    return None


def campaign(
    directory: Path, *, kills: int, minutes: float, lanes: int, seed: int, sabotage: str | None, strace: bool
) -> Tally:
    """Runs the campaign in an empty directory.

    Raises:
        UsageError: the directory is not empty.
    """
    must_be_empty(directory)
    deadline = time.monotonic() + 60 * minutes
    shares = [kills // lanes + (number < kills % lanes) for number in range(lanes)]
    work = [Lane(directory, number, share, deadline, seed, sabotage, strace) for number, share in enumerate(shares)]
    wardens = [(lane, fork(lane.work, lane.output)) for lane in work]
    tally = Tally()
    for lane, warden in wardens:
        ended = warden.wait()
        if ended is None or ended.code != 0 or not lane.result.exists():
            tally.wedged += 1
            tally.findings.append(f"lane {lane.number} itself failed ({ended}); see {lane.output.name}")
            continue
        counted = json.loads(lane.result.read_text("utf-8"))
        counted["by_phase"], counted["how"] = Counter(counted["by_phase"]), Counter(counted["how"])
        tally.add(Tally(**counted))
    asyncio.run(_examine(directory, tally))
    return tally


async def _examine(directory: Path, tally: Tally) -> None:
    """Counts what happened, and proves what is recorded."""
    store = directory / "perdure.db"
    if not store.exists():
        return
    report = await verify(store, fold_problem=indexed)
    if not report.ok:
        tally.lost += 1
        tally.findings.append(f"the store does not verify: {report.first_bad}")
    ledger = Ledger(directory / "ledger")
    async with Engine.open(f"sqlite:{store}", create=False, read_only=True) as engine:
        for record in await engine.runs():
            run_id = str(record["run_id"])
            lines = ledger.of(run_id)
            again = doubled(lines)
            gone = sorted({line.call for line in lines if line.what == LOST})  # each later drive sees it again
            if record["status"] == "completed":
                gone += missing(lines)
            tally.refused_or_parked += sum(line.what == SETTLED for line in lines)
            tally.duplicates += len(again)
            tally.lost += len(gone)
            tally.findings += [f"{run_id}: {problem}" for problem in again + gone]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a campaign as told; 1: it found something, or a phase was met too seldom."""
    options = _parsed(arguments)
    scratch = Path(tempfile.mkdtemp(prefix="perdure-soak-")) if options.dir is None else options.dir
    strace = shutil.which("strace") is not None and not options.no_strace
    try:
        tally = campaign(
            scratch,
            kills=options.kills,
            minutes=options.minutes,
            lanes=options.lanes,
            seed=options.seed,
            sabotage=options.sabotage,
            strace=strace,
        )
    except PerdureError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"soak: stopped; what there is stays in {scratch}", file=sys.stderr)
        return 130
    problems = tally.problems()
    if 0 < tally.kills < options.kills:
        made = f"only {tally.kills} of {options.kills} kills were made"
        print(f"soak: {made} before it stopped (--minutes {options.minutes:g})", file=sys.stderr)
    for finding in tally.findings[:20]:
        print(f"soak: {finding}", file=sys.stderr)
    print(f"{tally.runs} runs, killed {dict(tally.how)}, seed {options.seed}")
    for problem in problems:
        print(f"soak: {problem}", file=sys.stderr)
    if problems or options.dir is not None:
        print(f"soak: everything is kept in {scratch}", file=sys.stderr)
    else:
        shutil.rmtree(scratch)
    print(tally.line())
    return int(bool(problems))


def _parsed(arguments: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description="Kills runs over and over, and counts what happened."
    )
    parser.add_argument("--kills", type=_positive, default=3000, help="kills to make that meet a live run (3000)")
    parser.add_argument("--minutes", type=_minutes, default=60.0, help="begin no new run after so long (60)")
    parser.add_argument("--lanes", type=_positive, default=max(2, os.cpu_count() or 2), help="runs driven at a time")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6, help="where and when to kill")
    parser.add_argument("--sabotage", choices=victim.SABOTAGES, help="break the promise on purpose: must be found")
    parser.add_argument("--dir", type=Path, help="an empty directory for store and ledger; kept")
    parser.add_argument("--no-strace", action="store_true", help="no kills by the kernel's tracer")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes <= _MOST_MINUTES:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes: above 0, up to {_MOST_MINUTES:g}")
    return minutes


if __name__ == "__main__":
    sys.exit(main())
