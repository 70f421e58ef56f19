"""How figures become medians, ratios and verdicts."""

import pytest
from bench import startup, w1, w2, w3
from bench.disk import Figures, Pair
from bench.targets import Target


def figures(turns: int, seconds: float, **more: float) -> Figures:
    made = {"turns": turns, "seconds": seconds, "cpu_seconds": seconds / 2, "commits": 2.0 * turns + 4}
    return made | {"store_bytes": 1000.0 * turns, "peak_bytes": 5e7} | more


def test_a_ratio_is_the_median_of_the_ratios_of_pairs_and_not_a_ratio_of_medians() -> None:
    rounds = [
        [(figures(10, floor), figures(10, run)), (figures(20, floor), figures(20, run))]
        for floor, run in ((1.0, 2.0), (10.0, 30.0), (2.0, 10.0))
    ]
    found = w1.summary([10, 20], rounds, None)
    assert [row["times_floor"] for row in found["sizes"]] == [3.0, 3.0]
    # 2.0 s, 30.0 s and 10.0 s for ten turns.
    assert found["sizes"][0]["ms_per_turn"] == 1000.0


def test_a_disk_that_became_slow_within_a_round_does_not_count_as_growth() -> None:
    rounds = [[(figures(10, 1.0), figures(10, 3.0)), (figures(10, 4.0), figures(20, 26.0))]]
    assert w1.summary([10, 20], rounds, None)["growth_of_a_turn"] == pytest.approx(13 / 12)


def test_what_a_run_costs_once_is_not_shared_out_over_its_turns() -> None:
    rounds = [[(figures(10, 1.0), figures(10, 1.0)), (figures(30, 1.0), figures(30, 1.0))]]
    found = w1.summary([10, 30], rounds, 2.02)
    assert found["growth"] == [{"from": 10, "to": 30, "store_bytes_per_turn": 1000.0, "commits_per_turn": 2.0}]
    assert [target.verdict for target in w1.targets(found)] == ["ok"] * 6


def test_a_figure_beyond_its_bound_is_a_miss_and_one_that_was_not_taken_is_neither() -> None:
    assert Target("x", 2.2, 2.1).verdict == "miss"
    assert Target("x", 2.1, 2.1).verdict == "ok"
    assert Target("x", 2.1, 2.1, side="at least").verdict == "ok"
    assert Target("x", 2.0, 2.1, side="at least").verdict == "miss"
    assert Target("x", None, 2.1).verdict == "not measured"


def test_every_target_of_w1_can_be_missed() -> None:
    row = {"turns": 1000, "times_floor": 4.1, "peak_mb": 61.0}
    step = {"store_bytes_per_turn": 1801.0, "commits_per_turn": 3.0}
    found = {"sizes": [row, row], "growth": [step], "syncs_per_turn": 2.2, "growth_of_a_turn": 1.3}
    assert [target.verdict for target in w1.targets(found)] == ["miss"] * 6


def w2_round(commit: float, seconds: float, cpu: float) -> list[Pair]:
    floor = figures(500, 1000 * commit)
    return [(floor, figures(1000, 1.0)), (floor, figures(2000, seconds, cpu_seconds=cpu, runs=200))]


def test_w2_is_judged_as_it_stands_where_a_commit_is_quick() -> None:
    """CPU: 0.5 ms a turn of W1 beside it, so 1.3 ms for 2,000 turns are just allowed."""
    found = w2.summary([w2_round(0.00011, 0.6, 1.3)], 0.2)
    assert found["least_runs_per_second"] == pytest.approx(300)
    assert [target.verdict for target in w2.targets(found)] == ["ok", "ok", "ok"]
    missed = w2.summary([w2_round(0.00011, 0.7, 1.31)], 0.21)
    assert [target.verdict for target in w2.targets(missed)] == ["miss", "miss", "miss"]


def test_w2_may_be_later_on_a_slow_disk_by_the_syncs_it_is_allowed_and_no_more() -> None:
    """A commit of 1.11 ms is 1 ms later; two syncs a run of ten turns make 2 ms over 3.33."""
    assert w2.least_runs_a_second(0.00111, 10) == pytest.approx(1 / (1 / 300 + 0.002))
    assert w2.least_runs_a_second(0.00005, 10) == pytest.approx(300)


def w3_pair(turns: int, floor: float, replay: float) -> Pair:
    return figures(turns, floor, events=4 * turns), figures(turns, replay)


def test_w3_is_judged_by_its_dearest_length_and_by_its_growth() -> None:
    found = w3.summary([1000, 10_000], [[w3_pair(1000, 1.0, 3.0), w3_pair(10_000, 12.0, 36.0)]])
    assert [target.verdict for target in w3.targets(found)] == ["ok", "ok"]
    slow = w3.summary([1000, 10_000], [[w3_pair(1000, 1.0, 3.1), w3_pair(10_000, 14.0, 38.0)]])
    assert [target.value for target in w3.targets(slow)] == [pytest.approx(3.1), pytest.approx(3.8 / 3.1)]
    assert [target.verdict for target in w3.targets(slow)] == ["miss", "miss"]


def test_start_up_is_judged_by_the_ratios_within_a_round() -> None:
    """A round in which the whole machine was slow changes nothing."""
    once = {startup.INTERPRETER: 0.1, startup.PYDANTIC: 1.0, startup.IMPORT: 2.5, startup.HELP: 3.0}
    slow = {name: 10 * seconds for name, seconds in once.items()}
    found = startup.summary([once, slow, once])
    assert [target.verdict for target in startup.targets(found)] == ["ok", "ok"]
    late = once | {startup.IMPORT: 2.6, startup.HELP: 3.1}
    assert [target.verdict for target in startup.targets(startup.summary([late]))] == ["miss", "miss"]
