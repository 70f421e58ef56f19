"""The whole demo, as a user starts it: servers, runs and kills are real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from perdure.examples.job_recovery.jobs import Counts, Jobs
from perdure.examples.job_recovery.world import SCENARIOS, draw_world

OPEN = {"after_commit": "job_retry", "logs": "job_logs", "result": "job_result"}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Nothing of the machine's own settings for models; temporary folders below ours, so that leftovers are seen."""
    (tmp_path / "tmp").mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "PERDURE_"))}
    return kept | {"TMPDIR": str(tmp_path / "tmp")}


def argv(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "perdure.cli", *arguments]


def demo(environment: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        argv("demo", *arguments), env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def leftovers(folder: Path) -> list[str]:
    """Living processes that have our temporary folder in their environment: all that a demo of ours started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            ours = f"TMPDIR={folder}".encode() in (entry / "environ").read_bytes()
            if ours and "\nState:\tZ" not in (entry / "status").read_text():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


def nothing_left(folder: Path) -> bool:
    deadline = time.monotonic() + 5
    while leftovers(folder) and time.monotonic() < deadline:
        time.sleep(0.02)
    return leftovers(folder) == []


def check_right_end(environment: dict[str, str], seed: int, scenario: str) -> None:
    right = SCENARIOS[scenario]
    done = demo(environment, "--json", "--seed", str(seed), "--scenario", scenario)
    assert done.returncode == 0, done.stderr
    line: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    calls = line.pop("model_calls")
    assert calls >= 3
    assert line == {
        "run_id": f"demo-{scenario}-{seed}",
        "seed": seed,
        "scenario": scenario,
        "exit_signal": 9,
        "dangling_at_kill": OPEN[right.hold],
        "model_calls_repeated": 0,
        "service_posts": 2 * right.effects,
        "distinct_keys": right.effects,
        "effects": right.effects,
        "status": "completed",
        "terminal_reason": "final",
        "report_status": right.report_status,
    }


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(name, marks=() if name == "transient" else pytest.mark.slow) for name in SCENARIOS],
)
def test_a_killed_run_comes_to_the_right_end_with_the_right_number_of_effects(
    environment: dict[str, str], tmp_path: Path, scenario: str
) -> None:
    """D-020, D-022, D-026, S-064."""
    check_right_end(environment, 11, scenario)
    assert nothing_left(tmp_path)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_twenty_seeds_over_all_scenarios_end_right(environment: dict[str, str], seed: int) -> None:
    """D-020, D-022, D-026."""
    check_right_end(environment, seed, tuple(SCENARIOS)[seed % len(SCENARIOS)])


@pytest.mark.slow
def test_without_a_key_the_crash_costs_a_second_effect_and_the_demo_says_so(environment: dict[str, str]) -> None:
    done = demo(environment, "--json", "--seed", "11", "--no-key")
    line = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1
    assert (line["service_posts"], line["distinct_keys"], line["effects"]) == (2, 0, 2)
    assert "effects in the service's database: 2, expected 1" in done.stderr
    (kept,) = Path(environment["TMPDIR"]).iterdir()
    assert str(kept) in done.stderr


@pytest.mark.slow
def test_the_story_is_plain_text_when_piped_and_tells_every_part(environment: dict[str, str]) -> None:
    done = demo(environment, "--seed", "11")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    world = draw_world(11, "transient")
    for part in (
        f"Scenario transient, seed 11: {SCENARIOS['transient'].story}",
        f"Job {world.job_id}",
        "Killed by signal 9, after the service committed the retry, before its answer arrived",
        "Open: job_retry",
        "Replayed from the journal, nothing of it run again: model 4x",
        "Tried again: job_retry",
        "2 request(s) to retry, 1 key(s), 1 effect(s).",
        f'"total_cents": {world.total_cents}',
        "History",
        "run_completed",
    ):
        assert part in done.stdout


@pytest.mark.slow
def test_a_drawn_seed_is_printed_and_gives_the_same_demo_again(environment: dict[str, str]) -> None:
    first = json.loads(demo(environment, "--json").stdout.splitlines()[-1])
    again = json.loads(demo(environment, "--json", "--seed", str(first["seed"])).stdout.splitlines()[-1])
    assert again == first


def test_an_unknown_scenario_is_a_usage_error_that_names_the_known_ones(environment: dict[str, str]) -> None:
    done = demo(environment, "--scenario", "no-such")
    assert done.returncode == 2
    assert "no-such" in done.stderr
    assert "transient" in done.stderr


@pytest.mark.slow
def test_a_proxy_of_the_machine_is_not_asked_for_loopback(environment: dict[str, str]) -> None:
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    dead = dict.fromkeys(names, "http://127.0.0.1:9")
    assert demo(environment | dead, "--json", "--seed", "11").returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_demo_ended_half_way_leaves_no_process_behind(
    environment: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    process = subprocess.Popen(argv("demo", "--json"), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("tmp/*/run.log")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert nothing_left(tmp_path)
    if number != signal.SIGKILL:
        assert list((tmp_path / "tmp").iterdir()) == []


class Served:
    """`perdure demo --serve` in a shell's environment, and commands beside it."""

    def __init__(self, environment: dict[str, str], folder: Path, *arguments: str) -> None:
        shell = f'eval "$({" ".join(argv("demo", "--serve", *arguments))})" && env -0'
        done = subprocess.run(["bash", "-c", shell], env=environment, capture_output=True, timeout=60, check=True)
        pairs = [line.partition("=") for line in done.stdout.decode().split("\0") if line]
        store = {"PERDURE_STORE": f"sqlite:{folder / 'runs.db'}"}
        self.names: dict[str, str] = {name: value for name, _, value in pairs} | store
        self.jobs = Jobs(Path(self.names["PERDURE_DEMO_FOLDER"]) / "service.db")

    def start(self) -> "subprocess.Popen[bytes]":
        agent = Path(__file__).parents[2] / "examples" / "job_recovery" / "agent.toml"
        task = f"Recover job {self.names['PERDURE_DEMO_JOB']}"
        command = argv("run", str(agent), "--input", task, "--run-id", "R")
        return subprocess.Popen(command, env=self.names, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def show(self) -> dict[str, Any]:
        done = subprocess.run(argv("show", "R", "--json"), env=self.names, capture_output=True, check=False, timeout=30)
        return json.loads(done.stdout) if done.returncode == 0 else {"status": None}

    def end(self) -> None:
        os.kill(int(self.names["PERDURE_DEMO_PID"]), signal.SIGTERM)


@pytest.mark.slow
def test_serve_says_on_standard_error_what_runs_and_what_ends_it(environment: dict[str, str], tmp_path: Path) -> None:
    """And on standard output nothing but lines for a shell."""
    with (tmp_path / "said").open("wb") as said:
        done = subprocess.run(argv("demo", "--serve"), env=environment, stdout=subprocess.PIPE, stderr=said, check=True)
    lines, hint = done.stdout.decode().splitlines(), (tmp_path / "said").read_text().strip()
    pid = next(line.partition("=")[2] for line in lines if line.startswith("export PERDURE_DEMO_PID="))
    try:
        assert all(line.startswith("export ") for line in lines)
        before, _, command = hint.partition(": ")
        assert before == "both servers run in the background until"
        subprocess.run(["bash", "-c", command], env={"PERDURE_DEMO_PID": pid}, check=True)
        assert nothing_left(tmp_path)
        assert list((tmp_path / "tmp").iterdir()) == []
    except BaseException:
        os.kill(int(pid), signal.SIGTERM)
        raise


@pytest.mark.slow
def test_by_hand_a_run_is_killed_while_one_call_is_open_and_resumed(
    environment: dict[str, str], tmp_path: Path
) -> None:
    served = Served(environment | {"PERDURE_DEMO_HOLD": "50"}, tmp_path, "--seed", "11")
    run = served.start()
    deadline = time.monotonic() + 30
    while (shown := served.show())["status"] != "running" or [c["tool"] for c in shown["open_calls"]] != ["job_retry"]:
        assert time.monotonic() < deadline, shown
    run.kill()
    run.communicate()
    resumed = subprocess.run(argv("resume", "R"), env=served.names, capture_output=True, check=False, timeout=60)
    assert resumed.returncode == 0, resumed.stderr
    assert served.jobs.counts() == Counts(2, 1, 1, (served.names["PERDURE_DEMO_JOB"],))
    served.end()
    assert nothing_left(tmp_path)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.slow
def test_a_lost_response_in_the_middle_of_a_run_costs_no_second_effect(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """D-023."""
    served = Served(environment | {"PERDURE_DEMO_HOLD": "0"}, tmp_path, "--seed", "11")
    (Path(served.names["PERDURE_DEMO_FOLDER"]) / "switches" / "lose_response").touch()
    run = served.start()
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 0, output
    assert served.jobs.counts() == Counts(2, 1, 1, (served.names["PERDURE_DEMO_JOB"],))
    served.end()
    assert nothing_left(tmp_path)
