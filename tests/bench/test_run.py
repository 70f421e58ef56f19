"""That the benchmark measures what it says; the figures themselves are no test's business but of the one marked so."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from bench.run import Target, UnfitPlaceError, file_system, place, summary, targets

ROOT = Path(__file__).resolve().parents[2]
MEMORY = Path("/dev/shm")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "bench" / "run.py", *arguments], capture_output=True, text=True, check=False
    )


def figures(turns: int, seconds: float, **more: float) -> dict[str, float]:
    made = {"turns": turns, "seconds": seconds, "cpu_seconds": seconds / 2, "commits": 2.0 * turns + 4}
    return made | {"store_bytes": 1000.0 * turns, "peak_bytes": 5e7} | more


def test_a_ratio_is_the_median_of_the_ratios_of_pairs_and_not_a_ratio_of_medians() -> None:
    rounds = [
        [(figures(10, floor), figures(10, w1)), (figures(20, floor), figures(20, w1))]
        for floor, w1 in ((1.0, 2.0), (10.0, 30.0), (2.0, 10.0))
    ]
    report = summary([10, 20], rounds, None, "ext4")
    assert [row["times_floor"] for row in report["sizes"]] == [3.0, 3.0]
    # 2.0 s, 30.0 s and 10.0 s for ten turns.
    assert report["sizes"][0]["ms_per_turn"] == 1000.0


def test_a_disk_that_became_slow_within_a_round_does_not_count_as_growth() -> None:
    rounds = [[(figures(10, 1.0), figures(10, 3.0)), (figures(10, 4.0), figures(20, 26.0))]]
    assert summary([10, 20], rounds, None, "ext4")["growth_of_a_turn"] == pytest.approx(13 / 12)


def test_what_a_run_costs_once_is_not_shared_out_over_its_turns() -> None:
    rounds = [[(figures(10, 1.0), figures(10, 1.0)), (figures(30, 1.0), figures(30, 1.0))]]
    report = summary([10, 30], rounds, 2.02, "ext4")
    assert report["growth"] == [{"from": 10, "to": 30, "store_bytes_per_turn": 1000.0, "commits_per_turn": 2.0}]
    assert {target["name"]: target["verdict"] for target in report["targets"]} == {
        "commits a turn": "ok",
        "syncs a turn": "ok",
        "times the floor": "ok",
        "growth of a turn": "ok",
        "store a turn": "ok",
        "peak memory": "ok",
    }


def test_a_figure_over_its_target_is_a_miss_and_one_that_was_not_taken_is_neither() -> None:
    assert Target("x", 2.2, 2.1).verdict == "miss"
    assert Target("x", 2.1, 2.1).verdict == "ok"
    assert Target("x", None, 2.1).verdict == "not measured"


def test_every_target_can_be_missed() -> None:
    row = {"turns": 1000, "times_floor": 4.1, "peak_mb": 61.0}
    step = {"store_bytes_per_turn": 1801.0, "commits_per_turn": 3.0}
    assert {target.verdict for target in targets([row, row], [step], 2.2, 1.3)} == {"miss"}


@pytest.mark.skipif(not MEMORY.is_dir() or file_system(MEMORY) != "tmpfs", reason="no tmpfs to refuse here")
def test_a_file_system_in_memory_is_refused(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        done = bench("--dir", folder, "--rounds", "1", "--turns", "5,6", "--json", str(tmp_path / "report.json"))
        assert (done.returncode, done.stdout) == (2, "")
        assert f"{folder} lies on tmpfs" in done.stderr
        assert [*Path(folder).iterdir(), *tmp_path.iterdir()] == []


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnfitPlaceError, match="is no folder"):
        place(tmp_path / "none")


@pytest.mark.parametrize("sizes", ["10", "20,10", "0,10", "ten,20"])
def test_sizes_between_which_no_growth_can_be_measured_are_a_usage_error(sizes: str) -> None:
    done = bench("--turns", sizes)
    assert done.returncode == 2
    assert "--turns" in done.stderr


@pytest.mark.slow
def test_the_benchmark_runs_and_leaves_nothing_behind() -> None:
    with tempfile.TemporaryDirectory(dir=place(None)) as folder:
        done = bench("--dir", folder, "--rounds", "1", "--turns", "5,40", "--json", "-")
        assert list(Path(folder).iterdir()) == []
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [row["turns"] for row in report["sizes"]] == [5, 40]
    assert report["growth"][0]["commits_per_turn"] == pytest.approx(2.0, abs=0.1)
    assert report["syncs_per_turn"] is None or 2.0 <= report["syncs_per_turn"] < 2.5
    assert {target["name"] for target in report["targets"]} >= {"commits a turn", "times the floor", "peak memory"}


@pytest.mark.bench
def test_a_turn_costs_no_more_than_was_promised() -> None:
    """The whole benchmark with its real sizes."""
    done = bench("--strict")
    assert done.returncode == 0, done.stdout + done.stderr
