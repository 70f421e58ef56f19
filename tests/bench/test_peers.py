"""How other runtimes are installed, measured and compared with. The peers here are small programs of the tests' own."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.curves import as_text, series_of
from bench.disk import Disk, place
from bench.environments import NotInstalledError, environment
from bench.peers import contest
from bench.peers.contest import PEERS, US, Contestant, Sizes, compared, measure, row, targets

TINY = Sizes((5, 20), 3, 2, (5, 10), 60.0)
BROKEN = Contestant("broken", None, ("measured.none",), "measured.none", waits=True, syncs=True)


@pytest.fixture
def disk() -> Iterator[Disk]:
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=place(None)) as folder:
        yield Disk(Path(folder), strace=False)


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)


def pair(turns: int, seconds: float) -> tuple[dict[str, float], dict[str, float]]:
    run = {"turns": turns, "seconds": seconds, "runs": 3, "store_bytes": 100.0 * turns, "peak_bytes": 5e7}
    return {"turns": 1, "seconds": 0.001}, run


def taken(seconds: float) -> list[contest.Round]:
    return [{100: pair(100, seconds), 1000: pair(1000, 10 * seconds), contest.TOGETHER: pair(20, seconds)}]


@pytest.mark.slow
@pytest.mark.usefixtures("no_index")
def test_a_peer_that_cannot_be_installed_is_not_measured_and_one_reason_serves_all_its_settings(
    disk: Disk, tmp_path: Path
) -> None:
    durabl = [peer for peer in PEERS if peer.environment == "durabl"]
    found = measure(disk, TINY, 1, tmp_path, [US, *durabl])
    ours, *others = found["contestants"]
    assert ours["not_measured"] is None
    assert [length["turns"] for length in ours["lengths"]] == [5, 20]
    assert len(others) == 2
    assert all("could not install: ERROR" in one["not_measured"] for one in others)
    (target,) = targets(found)
    assert (target.verdict, target.note) == (
        "not measured",
        "no peer as durable was measured; without durabl 0.1.0, FULL",
    )
    assert sum("not measured" in line for line in contest.table(found)) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("no_index")
def test_an_environment_that_failed_is_made_anew_and_one_that_stands_is_left(tmp_path: Path) -> None:
    unknown, nothing = tmp_path / "unknown.txt", tmp_path / "nothing.txt"
    unknown.write_text("durabl==0.1.0 --hash=sha256:" + 64 * "0" + "\n", encoding="utf-8")
    nothing.write_text("# pins nothing\n", encoding="utf-8")
    with pytest.raises(NotInstalledError, match="could not install"):
        environment(tmp_path / "made", unknown)
    python = environment(tmp_path / "made", nothing)
    made = python.lstat().st_ctime_ns
    assert environment(tmp_path / "made", nothing).lstat().st_ctime_ns == made


@pytest.mark.slow
def test_a_contestant_that_fails_is_told_with_its_reason_and_the_others_are_measured(
    disk: Disk, tmp_path: Path
) -> None:
    found = measure(disk, TINY, 2, tmp_path, [BROKEN, US])
    broken, ours = found["contestants"]
    assert all("No module named bench.measured.none" in length["not_measured"] for length in broken["lengths"])
    assert "No module named" in broken["together_not_measured"]
    assert [length["rounds"] for length in ours["lengths"]] == [2, 2]
    assert ours["runs_per_second"] > 0


def test_what_is_slow_is_measured_once_and_what_failed_is_not_tried_again() -> None:
    first: contest.Round = {
        5: pair(5, contest.ONCE_SECONDS),
        20: pair(20, contest.ONCE_SECONDS + 0.1),
        "together": "no",
    }
    assert [contest._is_worth_it([], what) for what in first] == [True, True, True]
    assert [contest._is_worth_it([first], what) for what in first] == [True, False, False]


def test_only_a_peer_that_waits_for_a_sync_a_step_counts_as_durable() -> None:
    full, normal, sync, asynchronous, tasks = PEERS
    syncs = {full: 5.0, normal: 0.0, sync: 4.1, asynchronous: 4.1, tasks: 2.0}
    rows = {peer.name: row(peer, taken(1.0), count) for peer, count in syncs.items()}
    assert [name for name, one in rows.items() if one["survives_power_cut"]] == [full.name, sync.name]
    assert [name for name, one in rows.items() if one["survives_kill"]] == [full.name, normal.name, sync.name]


def test_what_was_counted_goes_before_what_a_setting_promises() -> None:
    full = PEERS[0]
    assert row(full, taken(1.0), None)["survives_power_cut"] is True
    assert row(full, taken(1.0), 1.9)["survives_power_cut"] is False


def test_the_verdict_is_against_the_nearest_durable_peer_at_any_length() -> None:
    full, normal, sync, *_ = PEERS
    measured = {US.name: taken(1.0), full.name: taken(0.9), normal.name: taken(0.1), sync.name: taken(5.0)}
    measured[full.name][0][1000] = pair(1000, 20.0)
    rows = [row(one, measured[one.name], 0.0 if one is normal else 2.0) for one in (US, full, normal, sync)]
    found = {"contestants": rows, "compared": compared(rows, measured)}
    (target,) = targets(found)
    assert target.value == pytest.approx(1.0 / 0.9)
    assert (target.verdict, full.name in target.note, "100 turns" in target.note) == ("miss", True, True)
    measured[full.name][0][100] = pair(100, 1.1)
    (target,) = targets(found | {"compared": compared(rows, measured)})
    assert (target.verdict, target.value) == ("ok", pytest.approx(1.0 / 1.1))


def test_the_pins_are_exact_hashed_and_name_no_index() -> None:
    files = [contest.HERE / name for name in {peer.requirements for peer in PEERS if peer.requirements}]
    for file in [*files, contest.HERE.parent / "requirements-curves.txt"]:
        lines = file.read_text(encoding="utf-8").splitlines()
        pins = [line for line in lines if not line.startswith((" ", "#"))]
        assert pins
        assert all("==" in pin and pin.endswith("\\") for pin in pins), file
        assert not any("://" in line or line.lstrip().startswith(("--index", "--extra", "--find")) for line in lines)


def test_growth_curves_show_ours_from_w1_and_bars_of_equal_factors() -> None:
    ours = {"sizes": [{"turns": 10, "ms_per_turn": 1.0, "store_bytes_per_turn": 10.0, "peak_mb": 1.0}]}
    rows = [row(peer, taken(1.0), 2.0) for peer in (US, PEERS[0])]
    series = series_of({"w1": ours, "peers": {"contestants": rows}})
    assert list(series) == ["perdure", PEERS[0].name]
    assert [point["turns"] for point in series["perdure"]] == [10]
    first, *bars = as_text(series).split("\n\n")[0].splitlines()
    assert first.startswith("ms a turn")
    # 1 ms against 10 ms: a decade longer.
    assert [bar.count("#") for bar in bars] == [1, 11, 11]


def test_what_was_not_measured_has_no_curve() -> None:
    assert series_of({"startup": {}, "peers": {"contestants": [{"name": "x", "not_measured": "why"}]}}) == {}
