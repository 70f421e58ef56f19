"""The agent's tools and the stand-in together, over the real service, without an engine between them."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from perdure import CallContext, ToolFailed
from perdure.examples.job_recovery import tools
from perdure.examples.job_recovery.jobs import Counts, Jobs
from perdure.examples.job_recovery.service import JobServer, Switches
from perdure.examples.job_recovery.standin import decide
from perdure.examples.job_recovery.world import SCENARIOS, World, draw_world

TOOLS = ("job_status", "job_logs", "runbook_search", "job_result")


class Place:
    """A served world, found by the tools through the environment."""

    def __init__(self, folder: Path, seed: int, scenario: str) -> None:
        self.scenario = scenario
        self.world: World = draw_world(seed, scenario)
        self.jobs = Jobs(folder / "service.db")
        self.jobs.create(self.world)
        self.switches = folder / "switches"
        self.switches.mkdir()
        (folder / "runbook.md").write_text(self.world.runbook, encoding="utf-8")
        self.server = JobServer(self.jobs, Switches(self.switches))


@pytest.fixture
def place(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    place = Place(tmp_path, *getattr(request, "param", (3, "transient")))
    monkeypatch.setenv("PERDURE_DEMO_ORIGIN", place.server.origin)
    monkeypatch.setenv("PERDURE_DEMO_RUNBOOK", str(tmp_path / "runbook.md"))
    monkeypatch.delenv("PERDURE_DEMO_NO_KEY", raising=False)
    thread = threading.Thread(target=place.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield place
    place.server.shutdown()
    thread.join()
    place.server.server_close()


def context(key: str = "key-1") -> CallContext:
    return CallContext("run", "0.1", 1, 1, key, None)


def play(job_id: str) -> dict[str, Any]:
    """Asks the stand-in and runs its tools until it answers."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Recover job {job_id}"}]
    for number in range(20):
        (call,) = decide({"messages": messages}).calls
        assert isinstance(call.arguments, dict)
        if call.name == "answer":
            return call.arguments
        given = {"call": context()} if call.name == "job_retry" else {}
        result = asdict(getattr(tools, call.name)(**call.arguments, **given))
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        messages.append({"role": "assistant", "tool_calls": [{"id": f"c{number}", "function": function}]})
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": json.dumps(result)})
    raise AssertionError("no answer after 20 turns")


@pytest.mark.parametrize(
    "place",
    [(seed, scenario) for scenario in SCENARIOS for seed in range(5)],
    indirect=True,
    ids=lambda p: f"{p[1]}-{p[0]}",
)
def test_tools_and_stand_in_bring_each_scenario_to_its_right_end(place: Place) -> None:
    """D-020, D-026."""
    right = SCENARIOS[place.scenario]
    report = tools.Report.model_validate(play(place.world.job_id))
    assert report.status == right.report_status
    assert report.total_cents == (place.world.total_cents if right.report_status == "completed" else None)
    assert place.jobs.counts() == Counts(
        right.effects, right.effects, right.effects, (place.world.job_id,) if right.effects else ()
    )


def test_a_retry_hands_its_key_on_and_the_control_sends_none(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    job = place.world.job_id
    first = tools.job_retry(job, "E_1", context())
    assert tools.job_retry(job, "E_1", context()) == first
    assert place.jobs.counts() == Counts(2, 1, 1, (job,))
    monkeypatch.setenv("PERDURE_DEMO_NO_KEY", "1")
    assert tools.job_retry(job, "E_1", context()) != first
    assert place.jobs.counts() == Counts(3, 1, 2, (job,))


def test_a_lost_response_is_no_failure_of_the_job_but_a_lost_connection(place: Place) -> None:
    """D-023."""
    (place.switches / "lose_response").touch()
    with pytest.raises(ConnectionError, match="no answer from the job service"):
        tools.job_retry(place.world.job_id, "E_1", context())
    assert tools.job_retry(place.world.job_id, "E_1", context()).run == 2
    assert place.jobs.counts().effects == 1


def test_what_the_service_refuses_is_a_failure_the_model_can_read(place: Place) -> None:
    with pytest.raises(ToolFailed, match="404.*no job"):
        tools.job_status("../none/x")
    with pytest.raises(ToolFailed, match="409.*has no result"):
        tools.job_result(place.world.job_id)


def test_the_runbook_is_found_by_every_word_and_only_then(place: Place) -> None:
    (section,) = tools.runbook_search(place.world.error_code.lower()).sections
    assert section.startswith(f"## {place.world.error_code}")
    assert tools.runbook_search(f"{place.world.error_code} no such words").sections == []
    assert tools.runbook_search("  ").sections == []
    assert len(tools.runbook_search("action").sections) == 3


def test_a_missing_setting_is_named_with_the_way_to_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERDURE_DEMO_ORIGIN", raising=False)
    with pytest.raises(ToolFailed, match="PERDURE_DEMO_ORIGIN is not set.*perdure demo --serve"):
        tools.job_status("Q1")


def test_the_service_as_a_process_ends_in_good_order_when_told_to(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "perdure.examples.job_recovery.service", "--db", str(tmp_path / "service.db")]
    with subprocess.Popen([*argv, "--seed", "1", "--scenario", "completed"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["origin"].startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_a_server_ends_when_its_parent_is_gone(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, time\n"
        "process = subprocess.Popen([sys.executable, '-m', 'perdure.examples.job_recovery.tether', *sys.argv[1:]],"
        " stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "print(process.stdout.readline().decode().strip(), flush=True)\n"
        "time.sleep(60)"
    )
    service = ["perdure.examples.job_recovery.service", "--db", str(tmp_path / "service.db"), "--seed", "1"]
    argv = [sys.executable, "-c", program, *service, "--scenario", "transient"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        port = int(json.loads(parent.stdout.readline())["origin"].rsplit(":", 1)[1])
        os.kill(parent.pid, signal.SIGKILL)
    for _ in range(500):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
        try:
            connection.request("GET", "/jobs/x")
            connection.getresponse().read()
        except OSError:
            return
        except http.client.HTTPException:
            pass  # it is ending while it answers
        finally:
            connection.close()
    raise AssertionError("the service outlived its parent")
