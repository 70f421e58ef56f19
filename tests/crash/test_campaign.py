"""The campaign: thousands of kills in soak, some dozens here, and controls that it must find."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure.testing.killing.campaign import Tally
from perdure.testing.killing.errand import Line, actions, doubled
from perdure.testing.killing.marks import PHASES, Marks


def campaign(*arguments: str, timeout_s: float = 300) -> tuple[int, dict[str, Any], str]:
    """The exit code, the last line, and what was said on standard error. A process of its own: it forks."""
    argv = [sys.executable, "-m", "perdure.testing.killing.campaign", *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    lines = done.stdout.splitlines()
    return done.returncode, json.loads(lines[-1]) if lines else {}, done.stderr


@pytest.mark.slow
def test_runs_killed_at_random_moments_and_at_syncs_double_nothing_and_lose_nothing(tmp_path: Path) -> None:
    """S-074, O17: reads, keyed and unkeyed writes; real processes, one store."""
    code, found, said = campaign("--kills", "60", "--lanes", "2", "--dir", str(tmp_path / "soak"))
    assert code == 0, said
    assert found["kills"] >= 60
    assert sum(found["by_phase"].values()) == found["kills"]
    assert (found["duplicates"], found["lost"], found["wedged"]) == (0, 0, 0), said


@pytest.mark.slow
@pytest.mark.parametrize("sabotage", ["late-intent", "rerun-writes"])
def test_a_campaign_finds_a_broken_promise(tmp_path: Path, sabotage: str) -> None:
    """S-074: the control. An intent that is not durable when its call starts; a write in doubt that is done again."""
    code, found, said = campaign(
        "--kills", "120", "--lanes", "2", "--sabotage", sabotage, "--dir", str(tmp_path / "soak")
    )
    assert code == 1
    assert found["duplicates"] > 0, said


@pytest.mark.soak
def test_three_thousand_kills_meet_every_phase_and_break_nothing() -> None:
    """S-074, O17."""
    code, found, said = campaign("--kills", "3000", "--minutes", "45", timeout_s=3600)
    assert code == 0, (found, said)
    assert found["kills"] >= 3000
    assert min(found["by_phase"].values()) >= 300


def test_a_folder_that_holds_something_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "perdure.db").write_bytes(b"somebody's runs")
    code, found, said = campaign("--kills", "1", "--dir", str(tmp_path))
    assert (code, found) == (2, {})
    assert "it is not empty" in said
    assert [path.name for path in tmp_path.iterdir()] == ["perdure.db"]
    assert (tmp_path / "perdure.db").read_bytes() == b"somebody's runs"


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf", "soon"])
def test_a_time_in_which_nothing_can_be_tried_is_refused(tmp_path: Path, minutes: str) -> None:
    code, found, said = campaign("--minutes", minutes, "--dir", str(tmp_path / "soak"))
    assert (code, found) == (2, {})
    assert f"'{minutes}' is no number of minutes" in said


@pytest.mark.parametrize("control", [[], ["--sabotage", "rerun-writes"]])
def test_a_campaign_that_killed_nothing_has_failed(tmp_path: Path, control: list[str]) -> None:
    """Its controls as well: exit 0 would say that they had been tried."""
    code, found, said = campaign("--minutes", "0.000001", "--dir", str(tmp_path / "soak"), *control)
    assert (code, found["kills"], found["duplicates"]) == (1, 0, 0)
    assert "no kill met a live run: nothing was tried" in said


def test_a_campaign_cut_short_by_the_clock_says_so(tmp_path: Path) -> None:
    code, found, said = campaign("--minutes", "0.01", "--lanes", "1", "--dir", str(tmp_path / "soak"))
    assert code == 0, said
    assert 0 < found["kills"] < 3000
    assert f"only {found['kills']} of 3000 kills were made before it stopped (--minutes 0.01)" in said


def test_a_campaign_with_a_phase_that_was_hardly_met_has_failed() -> None:
    tally = Tally()
    tally.by_phase.update({"model": 400, "effect": 400, "committing": 199, "between": 1})
    assert tally.problems() == ["only 1 of 1000 kills met the phase between"]


def test_a_keyed_write_that_comes_again_under_its_own_key_is_no_duplicate() -> None:
    what = actions(0)
    assert what == ("order", "paint")
    order, other = Line("r", "order", 0, "1.2", "k1"), Line("r", "order", 0, "1.2", "k2")
    paint = Line("r", "paint", 0, "1.3", None)
    assert doubled([order, order, paint]) == []
    assert doubled([order, other]) == ["order 0 happened 2 times"]
    assert doubled([paint, paint]) == ["paint 0 happened 2 times"]


def test_a_finished_model_call_that_is_asked_again_counts() -> None:
    asked = [Line("r", "asked", number, "", None) for number in (0, 1, 1, 2, 1)]
    assert doubled(asked) == ["model call 1 was asked again after 2"]


def test_marks_are_read_after_the_death_of_who_made_them(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from perdure.testing.killing.marks import Marks\n"
        "marks = Marks(Path(sys.argv[1])); marks.live = True; marks.durable = 7\n"
        "marks.in_model(1); marks.committing(1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "page")], check=False)
    assert done.returncode == -signal.SIGKILL
    with Marks(tmp_path / "page") as marks:
        assert (marks.live, marks.durable, marks.phase) == (True, 7, "committing")
        marks.committing(-1)
        assert marks.phase == "model"
        marks.clear()
        assert (marks.live, marks.durable, marks.phase) == (False, 7, "between")
    assert set(PHASES) == {"model", "effect", "committing", "between"}


def test_a_process_that_was_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    """H27: a child, and one in a session of its own."""
    program = """
import os, subprocess, sys, time
from pathlib import Path
from perdure.testing.killing.processes import adopt_orphans, fork

def work():
    for own in (False, True):
        subprocess.Popen(["sleep", "300"], start_new_session=own)
    print("started", flush=True)
    time.sleep(300)

adopt_orphans()
output = Path(sys.argv[1])
process = fork(work, output)
while not (output.exists() and output.read_text()):
    time.sleep(0.01)
process.kill()
print(process.wait())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "output")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "Ended(code=-9, left_behind=2)\n"


def test_a_process_with_threads_is_not_forked(tmp_path: Path) -> None:
    program = """
import sys, threading, time
from pathlib import Path
from perdure.errors import UsageError
from perdure.testing.killing.processes import fork

threading.Thread(target=time.sleep, args=(30,), name="pool-1", daemon=True).start()
try:
    fork(lambda: 0, Path(sys.argv[1]))
except UsageError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "output")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "pool-1" in done.stdout
    assert not (tmp_path / "output").exists()
