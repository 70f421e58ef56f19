"""Sets a demo's stage: runbook, job service and stand-in model, each server a child process that ends with us."""

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from perdure.errors import PerdureError
from perdure.examples.job_recovery.jobs import Jobs
from perdure.examples.job_recovery.world import SCENARIOS, Scenario, World, draw_world

AGENT_FILE = Path(__file__).with_name("agent.toml")
_START_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 3.0


class DemoError(PerdureError):
    """The demo could not be carried out."""

    code = "demo"


@dataclass(frozen=True)
class Stage:
    """Everything a run of the example agent needs, standing."""

    folder: Path
    seed: int
    scenario: str
    world: World
    origin: str
    base_url: str | None
    """Of the stand-in model; None when a real one is used."""

    @property
    def plot(self) -> Scenario:
        """The scenario with its right end."""
        return SCENARIOS[self.scenario]

    @property
    def jobs(self) -> Jobs:
        """The service's own database."""
        return Jobs(self.folder / "service.db")

    @property
    def requests(self) -> Path:
        """What the stand-in was asked, a line a request, as the wire server writes it."""
        return self.folder / "requests.jsonl"

    @property
    def held(self) -> Path:
        """Exists while the service holds its answer back; removing it lets the answer go."""
        return self.folder / "switches" / f"held_{self.plot.hold}"

    def exports(self) -> dict[str, str]:
        """The environment a run of the example agent needs."""
        names = {
            "PERDURE_DEMO_ORIGIN": self.origin,
            "PERDURE_DEMO_RUNBOOK": str(self.folder / "runbook.md"),
            "PERDURE_DEMO_JOB": self.world.job_id,
            "PERDURE_DEMO_SEED": str(self.seed),
            "PERDURE_DEMO_SCENARIO": self.scenario,
            "PERDURE_DEMO_FOLDER": str(self.folder),
        }
        if self.base_url is not None:
            # Loopback only, so any key does; the client library wants one.
            names |= {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": "stand-in-needs-no-key"}
            names |= {"NO_PROXY": without_proxy(os.environ)}
        return names


def without_proxy(environment: Mapping[str, str]) -> str:
    """The value of NO_PROXY with loopback in it, so that a proxy of the machine is not asked for our own servers."""
    known = environment.get("NO_PROXY") or environment.get("no_proxy") or ""
    return ",".join(dict.fromkeys([*filter(None, known.split(",")), "127.0.0.1", "localhost"]))


@contextmanager
def set_stage(folder: Path, seed: int, scenario: str, *, stand_in: bool, hold_s: float) -> Iterator[Stage]:
    """Starts the servers in `folder`, which must exist; both have ended when the block has.

    Args:
        folder: holds the databases, the runbook, the switches and the servers' logs.
        seed: what the world is drawn from.
        scenario: a key of `SCENARIOS`.
        stand_in: whether a stand-in model is started.
        hold_s: the longest time the service keeps the one held answer back, in seconds; 0 holds none.

    Raises:
        DemoError: a server did not start.
    """
    world = draw_world(seed, scenario)
    (folder / "runbook.md").write_text(world.runbook, encoding="utf-8")
    switches = folder / "switches"
    switches.mkdir(exist_ok=True)
    if hold_s:
        (switches / f"hold_{SCENARIOS[scenario].hold}").write_text(str(hold_s))
    service = ["perdure.examples.job_recovery.service", "--db", str(folder / "service.db"), "--seed", str(seed)]
    service += ["--scenario", scenario, "--switches", str(switches)]
    model = ["perdure.testing.wire", "openai-chat", "--replies", "perdure.examples.job_recovery.standin:decide"]
    model += ["--port", "0", "--request-log", str(folder / "requests.jsonl")]
    with ExitStack() as ending:
        started = [ending.enter_context(_server(service, folder / "service.log"))]
        if stand_in:
            started.append(ending.enter_context(_server(model, folder / "model.log")))
        announced = [_announcement(process, log) for process, log in started]
        base_url = announced[1]["base_url"] if stand_in else None
        yield Stage(folder, seed, scenario, world, announced[0]["origin"], base_url)


@contextmanager
def _server(module: Sequence[str], log: Path) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
    """A server tethered to this process. A session of its own: Ctrl-C reaches us first, and we end it."""
    argv = [sys.executable, "-m", "perdure.examples.job_recovery.tether", *module]
    with (
        log.open("ab") as errors,
        subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process, log
        finally:
            end_process(process)


def end_process(process: "subprocess.Popen[bytes]") -> None:
    """Ends a child for certain and reaps it: politely at first, then not."""
    process.terminate()
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _announcement(process: "subprocess.Popen[bytes]", log: Path) -> dict[str, Any]:
    assert process.stdout is not None
    line = read_line(process.stdout, _START_TIMEOUT_S)
    try:
        announced: dict[str, Any] = json.loads(line)
    except ValueError:
        tail = log.read_text(errors="replace")[-2000:].strip()
        raise DemoError(f"a server did not start: {tail or 'it said nothing'}", where=str(log)) from None
    return announced


def read_line(stream: IO[bytes], timeout_s: float) -> bytes:
    """The first line a child writes, as far as it came: up to its newline, the end of the stream or the time limit."""
    deadline, line = time.monotonic() + timeout_s, b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while not line.endswith(b"\n") and selector.select(max(0.0, deadline - time.monotonic())):
            piece = os.read(stream.fileno(), 1)
            if not piece:
                break
            line += piece
    return line
