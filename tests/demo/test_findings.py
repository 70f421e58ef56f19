"""What the demo concludes from journal, service and model log."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perdure.examples.job_recovery.findings import Findings, Journal, gather, shortfalls
from perdure.examples.job_recovery.jobs import Jobs
from perdure.examples.job_recovery.stage import Stage
from perdure.examples.job_recovery.world import draw_world


def journal(*events: tuple[str, dict[str, Any]]) -> Journal:
    return Journal(tuple({"kind": kind, "payload": payload} for kind, payload in events))


MODEL_1 = (("model_call_requested", {"call": "m1"}), ("model_call_completed", {"call": "m1"}))
MODEL_2 = (("model_call_requested", {"call": "m2"}), ("model_call_completed", {"call": "m2"}))
RETRY = ("tool_call_requested", {"call": "t1", "tool": "job_retry"})
RETRIED = ("tool_call_completed", {"call": "t1"})
BEFORE = journal(*MODEL_1, RETRY)
AFTER = journal(*MODEL_1, RETRY, ("drive_started", {}), ("attempt_started", {"call": "t1"}), RETRIED, *MODEL_2)
SHOWN = {"status": "completed", "terminal_reason": "final", "output": {"status": "completed", "total_cents": 1}}


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """A stage on which the retry was asked for twice under one key."""
    world = draw_world(4, "transient")
    stage = Stage(tmp_path, 4, "transient", world, "http://127.0.0.1:1", "http://127.0.0.1:2")
    Jobs(tmp_path / "service.db").create(world)
    for _ in range(2):
        stage.jobs.retry(world.job_id, "E_1", "k")
    return stage


def asked(stage: Stage, *turns: int) -> None:
    stage.requests.write_text("".join(json.dumps({"reply": turn}) + "\n" for turn in turns))


def found(stage: Stage) -> Findings:
    return gather(stage, "r", 9, BEFORE, 1, AFTER, SHOWN)


def test_the_findings_are_the_keys_of_the_public_line_in_their_order(stage: Stage) -> None:
    asked(stage, 0, 1)
    assert found(stage) == Findings(
        "r", 4, "transient", 9, "job_retry", 2, 0, 2, 1, 1, "completed", "final", "completed"
    )


def test_a_completed_model_call_that_is_asked_again_is_counted(stage: Stage) -> None:
    asked(stage, 0, 0, 1)
    assert found(stage).model_calls_repeated == 1


def test_nothing_open_is_said_as_nothing(stage: Stage) -> None:
    asked(stage, 0)
    assert gather(stage, "r", 9, journal(*MODEL_1), 1, AFTER, SHOWN).dangling_at_kill is None
    assert gather(stage, "r", 9, journal(MODEL_1[0]), 1, AFTER, SHOWN).dangling_at_kill == "model"


def test_the_right_end_has_no_shortfall_and_each_wrong_fact_has_one(stage: Stage) -> None:
    asked(stage, 0, 1)
    report = {"status": "completed", "total_cents": stage.world.total_cents}
    right = found(stage)
    assert shortfalls(stage, right, report) == []
    wrong: list[dict[str, Any]] = [
        {"exit_signal": None},
        {"dangling_at_kill": "model"},
        {"model_calls_repeated": 1},
        {"effects": 2},
        {"distinct_keys": 2},
        {"status": "parked"},
        {"report_status": None},
    ]
    for change in wrong:
        assert len(shortfalls(stage, replace(right, **change), report)) == 1, change
    assert len(shortfalls(stage, right, report | {"total_cents": 1})) == 1


def test_a_touched_other_job_is_a_shortfall(stage: Stage) -> None:
    asked(stage, 0, 1)
    right, report = found(stage), {"status": "completed", "total_cents": stage.world.total_cents}
    stage.jobs.retry(stage.world.other_job_id, "E_1", None)
    assert [line.split(":")[0] for line in shortfalls(stage, right, report)] == ["jobs touched"]
