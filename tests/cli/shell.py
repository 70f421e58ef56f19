"""A folder with agents, tools and a scripted model, and `perdure` started in it as a process of its own."""

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODELS = '''
from pathlib import Path

from perdure.testing.scripted import ScriptedModel, calls, text

HERE = Path(__file__).parent


def scripted(*replies, delay_ms=0):
    """Writes a line for each request before it answers."""

    def reply(request):
        with (HERE / "asked").open("a") as log:
            log.write(f"{request.transcript.turns}\\n")
        return replies[request.transcript.turns]

    return ScriptedModel(reply, delay_ms=delay_ms)


adding = scripted(calls(("add", {"a": 1, "b": 2})), text("three"))
booking = scripted(calls(("book", {"what": "one"})), calls(("book", {"what": "two"})), text("booked"))
asking = scripted(calls(("ask", {"question": "Publish?"})), text("published"))
napping = scripted(calls(("nap", {})), text("rested"))
counting = scripted(*[calls(("add", {"a": number, "b": 1})) for number in range(100)], text("counted"))
empty = scripted(*[text("")] * 9)
steering = scripted(text("\\x1b[31mred\\x1b[0m\\x07 \\x9b2J \\u202eright\\nsecond line"))
'''

TOOLS = '''
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from perdure import Sleep, Suspend, tool

HERE = Path(__file__).parent


@tool(effect="read")
async def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@tool(effect="write", timeout=60)
def book(what: str) -> str:
    """Books something; while a file named `hold` is there, the answer does not come."""
    with (HERE / "effects").open("a") as log:
        log.write(what + "\\n")
    while (HERE / "hold").exists():
        time.sleep(0.01)
    return f"booked {what}"


@tool(effect="read")
async def ask(question: str) -> Suspend:
    """Asks a person."""
    return Suspend(question, {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]})


@tool(effect="read")
async def nap() -> Sleep:
    """Sleeps for the time given in a file."""
    return Sleep(datetime.now(UTC) + timedelta(seconds=float((HERE / "nap").read_text())))


def untyped(a, b):
    """Adds two things."""
    return a + b
'''

AGENT = """
name = "{name}"
model = "my_models:{name}"
tools = ["my_tools:{tool}"]
[limits]
max_model_turns = 120
"""

AGENTS = {
    "counting": "add",
    "adding": "add",
    "booking": "book",
    "asking": "ask",
    "napping": "nap",
    "empty": "add",
    "steering": "add",
}

_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 24, 1, 2


@dataclass(frozen=True)
class Result:
    """What a command said, and how it ended."""

    argv: tuple[str, ...]
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The records on standard output."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def record(self) -> dict[str, Any]:
        """The last record on standard output."""
        return self.lines[-1]

    @property
    def error(self) -> dict[str, str]:
        """The one record on standard error."""
        found: dict[str, dict[str, str]] = json.loads(self.err)
        assert set(found) == {"error"}
        assert set(found["error"]) == {"code", "message", "found", "where", "next"}
        return found["error"]


class Shell:
    """One folder, its store, and commands in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "my_models.py").write_text(MODELS)
        (folder / "my_tools.py").write_text(TOOLS)
        for name, tool in AGENTS.items():
            self.write(f"{name}.toml", AGENT.format(name=name, tool=tool))
        unwanted = {"PERDURE_STORE", "COLUMNS", "FORCE_COLOR", "PYTHONDONTWRITEBYTECODE"}
        self.environment = {name: value for name, value in os.environ.items() if name not in unwanted}

    def write(self, name: str, text: str) -> Path:
        """A file in the folder."""
        path = self.folder / name
        path.write_text(text)
        return path

    def read(self, name: str) -> list[str]:
        """The lines of a file; none when it is not there."""
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def __call__(
        self, *argv: str, check: int | None = None, file_modes_hold: bool = False, largest_file: int | None = None
    ) -> Result:
        """Runs `perdure` to its end; with `check`, that exit code is asserted. `file_modes_hold` makes file modes
        bind root as well; no file can grow over `largest_file` bytes."""

        def confine() -> None:
            if file_modes_hold:
                _obey_file_modes()
            if largest_file is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

        done = subprocess.run(
            [sys.executable, "-m", "perdure.cli", *argv],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
            check=False,
            preexec_fn=confine,
        )
        result = Result(argv, done.returncode, done.stdout.decode(), done.stderr.decode())
        assert "Traceback" not in result.err, result.err
        assert check is None or result.code == check, result
        return result

    def start(self, *argv: str) -> "subprocess.Popen[str]":
        """Starts `perdure` and returns at once. In a process group of its own, so that a signal to it is only its."""
        return subprocess.Popen(
            [sys.executable, "-m", "perdure.cli", *argv],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def hold(self) -> None:
        """From here on the booking tool keeps its answer back after its effect."""
        self.write("hold", "")

    def let_go(self) -> None:
        """The answers kept back come."""
        (self.folder / "hold").unlink()

    def history(self, run_id: str) -> str:
        """The whole journal, as `history --json` prints it."""
        return self("history", run_id, "--json", check=0).out

    def kinds(self, run_id: str) -> list[str]:
        """The kinds of a run's events."""
        return [json.loads(line)["kind"] for line in self.history(run_id).splitlines()]

    def killed_in_a_booking(self, run_id: str) -> None:
        """A run whose process was killed after the first booking's effect and before its answer."""
        self.hold()
        process = self.start("run", "booking.toml", "--input", "go", "--run-id", run_id)
        wait_until(lambda: self.read("effects") == ["one"])
        process.kill()
        ended(process)
        self.let_go()


def wait_until(met: Callable[[], bool], seconds: float = 30) -> None:
    """Returns once the condition is met."""
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)


def ended(process: "subprocess.Popen[str]") -> Result:
    """What a started command said in the end."""
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err, err
    code = process.returncode
    return Result(tuple(process.args), code if code >= 0 else 128 - code, out, err)


def signalled(process: "subprocess.Popen[str]", number: signal.Signals) -> None:
    """Sends a signal to a started command alone."""
    process.send_signal(number)


def _obey_file_modes() -> None:
    """Root may read and write any file, but not once it cannot have those capabilities. For others nothing changes."""
    for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
        ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
