"""`perdure demo`: an agent recovers a failed job, is killed with SIGKILL at the worst moment, and is resumed.

The run is driven by the command line in processes of its own, exactly as a user would drive it. This module sets the
stage, kills, resumes, and reads afterwards from the journal and from the service's own database what came of it.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from perdure.errors import UsageError
from perdure.examples.job_recovery.findings import Findings, Journal, JsonLine, gather, requests_so_far, shortfalls
from perdure.examples.job_recovery.narration import Narrator
from perdure.examples.job_recovery.serving import serve
from perdure.examples.job_recovery.stage import AGENT_FILE, DemoError, Stage, end_process, set_stage
from perdure.examples.job_recovery.world import SCENARIOS

_HOLD_S = 600.0
"""The parent ends the hold itself; this only bounds it."""
_SERVED_HOLD_S = 15.0
"""Time to look at a run and kill it by hand."""
_PATIENCE_S = 120.0
"""Longest wait for the stand-in's run to reach the held call, and for the resumed run to end."""
_PATIENCE_REAL_MODEL_S = 600.0
_LOOK_INTERVAL_S = 0.005


@dataclass(frozen=True)
class DemoOptions:
    """What `perdure demo` was asked for."""

    json: bool = False
    """Print one line of JSON and nothing else on standard output."""
    serve: bool = False
    """Start service and model in the background, print `export` lines, and return."""
    seed: int | None = None
    """What the world is drawn from; None draws the seed too."""
    scenario: str = "transient"
    model: str | None = None
    """A real model in place of the stand-in, as `provider:name`."""
    no_key: bool = False
    """The control: the tool sends no idempotency key, and the crash costs a second retry."""
    workdir: Path | None = None
    """Where to work; kept. None: a temporary folder, kept only on failure."""


def run_demo(options: DemoOptions) -> int:
    """Carries the demo out and prints it. Returns 0 when the scenario came to its right end, else 1, having said why.

    Raises:
        UsageError: an unknown scenario, or a folder that cannot be used.
        FileNotFoundError: the working directory is no longer there.
        DemoError: a server did not start, or the run never reached the call it was to be killed in.
    """
    if options.scenario not in SCENARIOS:
        known = ", ".join(SCENARIOS)
        raise UsageError(f"unknown scenario {options.scenario!r}", where="--scenario", next=f"use one of {known}")
    Path.cwd()  # every process of the demo starts in it: that it is gone is told before anything is made
    seed = random.randrange(1, 1_000_000) if options.seed is None else options.seed
    folder = _prepared(options.workdir)
    if options.serve:
        print(serve(seed, options.scenario, hold_s=_served_hold(), no_key=options.no_key, folder=folder))
        print("both servers run in the background until: kill $PERDURE_DEMO_PID", file=sys.stderr)
        return 0
    place = Path(tempfile.mkdtemp(prefix="perdure-demo-")) if folder is None else folder
    narrator = Narrator(quiet=options.json)
    failed = False
    try:
        with _terminable():
            code = _play(options, seed, place, narrator)
        failed = code != 0
        return code
    except Exception:
        failed = True
        raise
    finally:
        if failed:
            print(f"kept for a look: {place} (scenario {options.scenario}, seed {seed})", file=sys.stderr)
        elif folder is None:
            shutil.rmtree(place, ignore_errors=True)


def _play(options: DemoOptions, seed: int, folder: Path, narrator: Narrator) -> int:
    with set_stage(folder, seed, options.scenario, stand_in=options.model is None, hold_s=_HOLD_S) as stage:
        play = _Play(options, stage, narrator)
        findings, report = play.carry_out()
        reasons = shortfalls(stage, findings, report)
    narrator.verdict(findings, reasons, no_key=options.no_key)
    for reason in reasons:
        print(f"not the right end: {reason}", file=sys.stderr)
    if options.json:
        print(json.dumps(asdict(findings)), flush=True)
    return 1 if reasons else 0


class _Play:
    """One run from start to end, over one stage."""

    def __init__(self, options: DemoOptions, stage: Stage, narrator: Narrator) -> None:
        self._options, self._stage, self._narrator = options, stage, narrator
        self._run_id = f"demo-{stage.scenario}-{stage.seed}"
        self._environment = os.environ | stage.exports() | {"PERDURE_STORE": f"sqlite:{stage.folder / 'perdure.db'}"}
        if options.no_key:
            self._environment["PERDURE_DEMO_NO_KEY"] = "1"
        else:
            self._environment.pop("PERDURE_DEMO_NO_KEY", None)
        self._patience_s = _PATIENCE_S if options.model is None else _PATIENCE_REAL_MODEL_S
        self._model = [] if options.model is None else ["--model", options.model]

    def carry_out(self) -> tuple[Findings, object]:
        """The findings, and the report the run ended with."""
        stage = self._stage
        self._narrator.opening(stage, self._run_id)
        exit_signal = self._run_until_killed()
        before, asked_before = self._history(), len(requests_so_far(stage.requests))
        self._narrator.killed(stage, before, exit_signal)
        stage.held.unlink(missing_ok=True)
        self._resume()
        after = self._history()
        shown: JsonLine = json.loads(self._ask("show", self._run_id, "--json"))
        findings = gather(stage, self._run_id, exit_signal, before, asked_before, after, shown)
        self._narrator.resumed(before, after)
        self._narrator.counted(stage)
        self._narrator.answered(shown)
        if not self._options.json:
            self._narrator.history()
            self._print_history()
        return findings, shown["output"]

    def _run_until_killed(self) -> int | None:
        """Starts the run, kills it while the service holds an answer back, and returns the signal that ended it."""
        job = self._stage.world.job_id
        task = ("run", str(AGENT_FILE), "--input", f"Recover job {job}", "--run-id", self._run_id)
        with self._driving("run.log", *task, *self._model) as process:
            deadline = time.monotonic() + self._patience_s
            while not self._stage.held.exists():
                if process.poll() is not None:
                    raise self._failed("run.log", f"the run ended by itself (exit code {process.returncode})")
                if time.monotonic() > deadline:
                    raise self._failed("run.log", f"the run did not get there within {self._patience_s:.0f} s")
                time.sleep(_LOOK_INTERVAL_S)
            process.send_signal(signal.SIGKILL)
            process.wait()
        return -process.returncode if process.returncode < 0 else None

    def _resume(self) -> None:
        with self._driving("resume.log", "resume", self._run_id, *self._model) as process:
            try:
                process.wait(self._patience_s)
            except subprocess.TimeoutExpired:
                raise self._failed("resume.log", f"the resumed run did not end in {self._patience_s:.0f} s") from None
        if process.returncode != 0:
            self._narrator.warn(f"resume ended with exit code {process.returncode}\n{self._tail('resume.log')}")

    @contextmanager
    def _driving(self, log: str, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
        """A driving command in a process of its own, which has ended when the block has. Its session is its own too:
        Ctrl-C comes to us alone. Tethered, so that it does not outlive us."""
        argv = [sys.executable, "-m", "perdure.examples.job_recovery.tether", "perdure.cli", *arguments]
        with (
            (self._stage.folder / log).open("wb") as output,
            subprocess.Popen(
                argv, env=self._environment, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as process,
        ):  # fmt: skip
            try:
                yield process
            finally:
                end_process(process)

    def _history(self) -> Journal:
        return Journal(tuple(json.loads(line) for line in self._ask("history", self._run_id, "--json").splitlines()))

    def _print_history(self) -> None:
        """Lets the command line print it on our own standard output, as it suits a terminal or a pipe."""
        sys.stdout.flush()
        argv = [sys.executable, "-m", "perdure.cli", "history", self._run_id]
        subprocess.run(argv, env=self._environment, stdin=subprocess.DEVNULL, check=False, timeout=_PATIENCE_S)

    def _ask(self, *arguments: str) -> str:
        """What a reading command prints."""
        argv = [sys.executable, "-m", "perdure.cli", *arguments]
        with (self._stage.folder / "reading.log").open("wb") as log:
            answer = subprocess.run(
                argv, env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
                check=False, timeout=_PATIENCE_S,
            )  # fmt: skip
        if answer.returncode != 0:
            raise self._failed("reading.log", f"perdure {' '.join(arguments)} ended with exit code {answer.returncode}")
        return answer.stdout.decode("utf-8")

    def _failed(self, log: str, what: str) -> DemoError:
        return DemoError(f"{what}\n{self._tail(log)}".strip(), where=str(self._stage.folder / log))

    def _tail(self, log: str) -> str:
        return (self._stage.folder / log).read_text(errors="replace")[-2000:]


def _prepared(workdir: Path | None) -> Path | None:
    if workdir is None:
        return None
    folder = workdir.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise UsageError("the folder is not empty", where=str(folder), next="name an empty or a new one")
    return folder


def _served_hold() -> float:
    value = os.environ.get("PERDURE_DEMO_HOLD", str(_SERVED_HOLD_S))
    try:
        return max(0.0, float(value))
    except ValueError:
        raise UsageError(
            f"{value!r} is no number of seconds", where="PERDURE_DEMO_HOLD", next="set it to e.g. 10"
        ) from None


@contextmanager
def _terminable() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into an ordinary exit, so that whatever was started is ended on the way out."""

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    earlier = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
