"""That each workload measures what it says. How large the figures are is no test's business here."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest
from bench import startup, w1, w2, w3
from bench.disk import Disk, MeasurementError, TooSlowError, each, place


@pytest.fixture
def disk() -> Iterator[Disk]:
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=place(None)) as folder:
        yield Disk(Path(folder))


@pytest.mark.slow
def test_w1_counts_two_commits_and_two_syncs_a_turn(disk: Disk) -> None:
    found = w1.measure(disk, [5, 40], 1)
    assert [row["turns"] for row in found["sizes"]] == [5, 40]
    assert found["growth"][0]["commits_per_turn"] == pytest.approx(2.0, abs=0.1)
    assert found["syncs_per_turn"] is None or 2.0 <= found["syncs_per_turn"] < 2.5


@pytest.mark.slow
def test_w2_shares_commits_among_the_runs(disk: Disk) -> None:
    """Alone, each turn makes two; 20 runs at once make a fraction of that, and as many syncs as commits."""
    found = w2.measure(disk, 20, 5, 10, 1)
    assert (found["runs"], found["turns_per_run"], found["w1_turns"]) == (20, 5, 10)
    assert 0 < found["commits_per_turn"] < 1
    # The traced runs are others than the counted ones: slower syncs gather more into one commit.
    assert found["syncs_per_turn"] is None or 0 < found["syncs_per_turn"] < 1
    assert found["ms_per_turn"] * found["runs_per_second"] == pytest.approx(1000 / 5)
    assert found["cpu_times_w1"] > 0


@pytest.mark.slow
def test_w3_times_a_resume_that_asks_the_model_once(disk: Disk) -> None:
    """Over copies: each round finds the run as it was killed."""
    found = w3.measure(disk, [5, 50], 2)
    assert [row["turns"] for row in found["sizes"]] == [5, 50]
    # Reading, proving and decoding is a part of replaying, so the floor lies below it.
    assert all(row["times_floor"] > 1 for row in found["sizes"])
    assert list(disk.folder.iterdir()) == []


@pytest.mark.slow
def test_w3_refuses_a_journal_that_is_not_what_its_floor_should_read(disk: Disk) -> None:
    store = disk.killed("measured.w3_cut", 5)
    with pytest.raises(MeasurementError, match="are too few for 50 turns"):
        disk.run("measured.w3_floor", 50, over=store)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("payload = cast(replace(cast(payload as text), 'observation', 'perturbation') as blob)", "its commitment"),
        ("active_ns = active_ns + 1", "the chain breaks"),
    ],
)
def test_the_floor_of_w3_proves_what_it_reads(disk: Disk, damage: str, said: str) -> None:
    """Else it would be too low."""
    store = disk.killed("measured.w3_cut", 5)
    connection = apsw.Connection(str(store / "bench.db"))
    connection.execute(f"update event set {damage} where kind = 'tool_call_completed'")
    connection.close()
    with pytest.raises(MeasurementError, match=said):
        disk.run("measured.w3_floor", 5, over=store)


@pytest.mark.slow
def test_start_up_times_whole_processes_against_pydantic() -> None:
    found = startup.measure(1)
    times = {row["command"]: row["times_pydantic"] for row in found["commands"]}
    assert times[startup.PYDANTIC] == 1.0
    assert times.keys() == startup.commands().keys()
    assert all(row["ms"] > 0 for row in found["commands"])


def test_a_command_that_fails_is_no_measurement(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="ended with 3"):
        startup.seconds_of([sys.executable, "-c", "raise SystemExit(3)"], str(tmp_path))


@pytest.mark.slow
def test_what_takes_longer_than_it_may_is_killed_and_said(disk: Disk) -> None:
    with pytest.raises(TooSlowError, match="over 0.2 s"):
        disk.run("measured.w1", 1_000_000, seconds=0.2)
    assert list(disk.folder.iterdir()) == []


def test_a_floor_stands_on_both_sides_of_what_is_measured(disk: Disk) -> None:
    asked = []
    (first, _), (second, _) = disk.beside_floors([lambda: asked.append(1) or {"turns": 1.0}] * 2)
    assert len(asked) == 2
    assert each(first, "seconds") > 0
    assert each(second, "seconds") > 0


def test_a_module_that_does_not_die_by_the_kill_is_no_cut_run(disk: Disk) -> None:
    with pytest.raises(MeasurementError, match="ended with 0"):
        disk.killed("measured.floor", 1)
