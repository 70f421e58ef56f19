"""The stage in the background: what it prints, and that it ends as a whole."""

import http.client
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from perdure.errors import PerdureError
from perdure.examples.job_recovery.stage import DemoError, set_stage

PROGRAM = (
    "from perdure.examples.job_recovery.demo import DemoOptions, run_demo; import sys;"
    " sys.exit(run_demo(DemoOptions(serve=True, seed=5, no_key='--no-key' in sys.argv)))"
)


def eval_serve(folder: Path, *arguments: str, **more: str) -> dict[str, str]:
    """The environment of a shell after `eval "$(... --serve)"`; that it returns shows that its output is closed."""
    script = 'eval "$("$PYTHON" -c "$PROGRAM" "$@")" && env -0'
    environment = os.environ | {"PYTHON": sys.executable, "PROGRAM": PROGRAM, "TMPDIR": str(folder), **more}
    done = subprocess.run(
        ["bash", "-c", script, "bash", *arguments], env=environment, capture_output=True, timeout=60, check=True
    )
    pairs = [line.partition("=") for line in done.stdout.decode().split("\0") if line]
    return {name: value for name, _, value in pairs}


def answers(origin: str) -> bool:
    place = urlsplit(origin)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=5)
    try:
        connection.request("GET", "/")
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_ending_the_named_process_ends_both_servers(tmp_path: Path, number: signal.Signals) -> None:
    names = eval_serve(tmp_path)
    origins = (names["PERDURE_DEMO_ORIGIN"], names["OPENAI_BASE_URL"])
    assert all(answers(origin) for origin in origins)
    os.kill(int(names["PERDURE_DEMO_PID"]), number)
    deadline = time.monotonic() + 10
    while any(answers(origin) for origin in origins) or (number != signal.SIGKILL and list(tmp_path.iterdir())):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_it_exports_what_a_run_needs_and_nothing_of_the_control_unless_asked(tmp_path: Path) -> None:
    names = eval_serve(tmp_path, no_proxy="example.org")
    os.kill(int(names["PERDURE_DEMO_PID"]), signal.SIGTERM)
    assert names["OPENAI_API_KEY"]
    assert names["NO_PROXY"] == "example.org,127.0.0.1,localhost"
    assert Path(names["PERDURE_DEMO_RUNBOOK"]).name == "runbook.md"
    assert names["PERDURE_DEMO_JOB"][1:].isdigit()
    assert "PERDURE_DEMO_NO_KEY" not in names
    control = eval_serve(tmp_path, "--no-key")
    os.kill(int(control["PERDURE_DEMO_PID"]), signal.SIGTERM)
    assert control["PERDURE_DEMO_NO_KEY"] == "1"


def test_the_first_retry_is_held_for_the_seconds_asked_for(tmp_path: Path) -> None:
    names = eval_serve(tmp_path, PERDURE_DEMO_HOLD="2.5")
    switch = Path(names["PERDURE_DEMO_FOLDER"]) / "switches" / "hold_after_commit"
    assert switch.read_text() == "2.5"
    os.kill(int(names["PERDURE_DEMO_PID"]), signal.SIGTERM)


def test_a_server_that_does_not_start_is_told_with_what_it_said(tmp_path: Path) -> None:
    (tmp_path / "service.db").write_text("this is no database, whatever it is called, and no program will read it")
    with (
        pytest.raises(DemoError, match="file is not a database") as raised,
        set_stage(tmp_path, 1, "transient", stand_in=True, hold_s=0),
    ):
        raise AssertionError("the stage stands")
    assert isinstance(raised.value, PerdureError)
    assert raised.value.where.endswith("service.log")
