"""The reference job service, over real sockets and its own SQLite file."""

import http.client
import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from perdure.examples.job_recovery.jobs import Counts, Jobs
from perdure.examples.job_recovery.service import JobServer, Switches
from perdure.examples.job_recovery.world import World, draw_world


class Running:
    """A served world and a client for it."""

    def __init__(self, folder: Path, scenario: str = "transient") -> None:
        self.world: World = draw_world(7, scenario)
        self.database = folder / "service.db"
        self.jobs = Jobs(self.database)
        self.jobs.create(self.world)
        self.switches = folder / "switches"
        self.switches.mkdir()
        self.server = JobServer(self.jobs, Switches(self.switches))

    def ask(self, method: str, path: str, body: Any = None, key: str | None = None) -> tuple[int, str]:
        headers = {} if key is None else {"Idempotency-Key": key}
        with closing(http.client.HTTPConnection("127.0.0.1", self.server.server_address[1], timeout=10)) as connection:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def retry(self, key: str | None, reason: str = "E_1") -> tuple[int, Any]:
        status, text = self.ask("POST", f"/jobs/{self.world.job_id}/retry", {"reason": reason}, key)
        return status, json.loads(text)


@contextmanager
def served(folder: Path, scenario: str = "transient") -> Iterator[Running]:
    running = Running(folder, scenario)
    thread = threading.Thread(target=running.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield running
    finally:
        running.server.shutdown()
        thread.join()
        running.server.server_close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Running]:
    with served(tmp_path) as running:
        yield running


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.005)


def test_a_job_is_told_with_its_state_its_log_and_no_result_while_it_failed(service: Running) -> None:
    job = service.world.job_id
    status, text = service.ask("GET", f"/jobs/{job}")
    assert (status, json.loads(text)["state"]) == (200, "failed")
    assert json.loads(service.ask("GET", f"/jobs/{job}/logs")[1])["lines"] == list(service.world.logs)
    assert service.ask("GET", f"/jobs/{job}/result")[0] == 409
    assert service.ask("GET", "/jobs/none")[0] == 404
    assert service.ask("GET", "/elsewhere")[0] == 404


def test_a_retried_job_runs_completes_and_has_a_result_that_adds_up(service: Running) -> None:
    assert service.retry("k")[0] == 202
    states = [json.loads(service.ask("GET", f"/jobs/{service.world.job_id}")[1])["state"] for _ in range(5)]
    assert states == ["running"] * service.world.looks + ["completed"] * (5 - service.world.looks)
    status, text = service.ask("GET", f"/jobs/{service.world.job_id}/result")
    amounts = [line.split(",")[2] for line in text.splitlines()[1:]]
    assert status == 200
    assert sum(int(amount.replace(".", "")) for amount in amounts) == service.world.total_cents


def test_the_same_key_and_request_give_the_stored_receipt_and_no_second_effect(service: Running) -> None:
    """D-022."""
    first, again = service.retry("k"), service.retry("k")
    assert first == again
    assert service.jobs.counts() == Counts(2, 1, 1, (service.world.job_id,))


def test_the_same_key_with_another_request_is_a_conflict_without_effect(service: Running) -> None:
    service.retry("k")
    status, answer = service.retry("k", reason="something else")
    assert status == 409
    assert "k" in answer["error"]
    assert (service.jobs.counts().posts, service.jobs.counts().effects) == (2, 1)


def test_a_key_belongs_to_one_job(service: Running) -> None:
    service.retry("k")
    status, _ = service.ask("POST", f"/jobs/{service.world.other_job_id}/retry", {"reason": "E_1"}, "k")
    assert status == 409
    assert service.jobs.counts().effects == 1
    assert service.world.other_job_id in service.jobs.counts().jobs_touched


def test_without_a_key_each_request_is_an_effect(service: Running) -> None:
    assert service.retry(None)[1]["receipt"] != service.retry(None)[1]["receipt"]
    assert service.jobs.counts() == Counts(2, 0, 2, (service.world.job_id,))


@pytest.mark.parametrize("table", ["effect", "receipt", "post"])
def test_effect_receipt_and_record_are_stored_together_or_not_at_all(tmp_path: Path, table: str) -> None:
    """D-022."""
    jobs, world = Jobs(tmp_path / "service.db"), draw_world(7, "transient")
    jobs.create(world)
    with closing(sqlite3.connect(tmp_path / "service.db")) as connection, connection:
        connection.execute(
            f"CREATE TRIGGER broken BEFORE INSERT ON {table} BEGIN SELECT RAISE(ABORT, 'disk'); END"  # one part fails
        )
    with pytest.raises(sqlite3.IntegrityError, match="disk"):
        jobs.retry(world.job_id, "E_1", "k")
    with closing(sqlite3.connect(tmp_path / "service.db")) as connection:
        rows = [
            connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in ("effect", "receipt", "post")
        ]
    assert rows == [0, 0, 0]
    assert jobs.look(world.job_id)["state"] == "failed"


def test_a_lost_response_has_its_effect_and_the_key_finds_it_again(service: Running) -> None:
    """D-023."""
    (service.switches / "lose_response").touch()
    with pytest.raises(http.client.RemoteDisconnected):
        service.retry("k")
    assert service.jobs.counts().effects == 1
    assert service.retry("k")[0] == 202
    assert service.jobs.counts() == Counts(2, 1, 1, (service.world.job_id,))


@pytest.mark.parametrize("name", ["after_commit", "logs", "result"])
def test_a_held_answer_is_announced_after_the_work_and_goes_when_it_is_released(tmp_path: Path, name: str) -> None:
    with served(tmp_path, "completed" if name == "result" else "transient") as service:
        (service.switches / f"hold_{name}").write_text("30")
        path = f"/jobs/{service.world.job_id}/"
        requests = {"after_commit": ("POST", path + "retry", {"reason": "E_1"}), "logs": ("GET", path + "logs", None)}
        answers: list[tuple[int, str]] = []
        asking = threading.Thread(
            target=lambda: answers.append(service.ask(*requests.get(name, ("GET", path + "result", None))))
        )
        asking.start()
        wait_for(service.switches / f"held_{name}")
        assert service.jobs.counts().effects == (1 if name == "after_commit" else 0)
        assert answers == []
        assert service.ask("GET", path + "logs")[0] == 200  # only one answer is held
        (service.switches / f"held_{name}").unlink()
        asking.join()
    assert answers[0][0] in (200, 202)


def test_a_hold_ends_by_itself_after_its_time(service: Running) -> None:
    (service.switches / "hold_after_commit").write_text("0.05")
    assert service.retry("k")[0] == 202
    assert list(service.switches.iterdir()) == []


def test_a_broken_request_is_refused_without_a_record(service: Running) -> None:
    path = f"/jobs/{service.world.job_id}/retry"
    assert service.ask("POST", path, ["no object"])[0] == 400
    assert service.ask("POST", path, {"reason": 1})[0] == 400
    assert service.ask("POST", path, {"reason": "x" * 70_000})[0] == 400
    assert service.ask("POST", "/jobs/none/retry", {"reason": "E_1"})[0] == 404
    assert service.jobs.counts() == Counts(0, 0, 0, ())


def test_an_existing_database_is_served_as_it_is(service: Running) -> None:
    service.retry("k")
    service.jobs.create(draw_world(8, "permanent"))
    assert service.jobs.counts().effects == 1
    assert service.ask("GET", f"/jobs/{service.world.job_id}")[0] == 200
