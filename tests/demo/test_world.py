"""The drawn world."""

import pytest

from perdure.examples.job_recovery.world import SCENARIOS, draw_world


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_equal_seeds_give_equal_worlds_and_other_seeds_other_ones(scenario: str) -> None:
    assert draw_world(5, scenario) == draw_world(5, scenario)
    worlds = [draw_world(seed, scenario) for seed in range(50)]
    assert len({world.error_code for world in worlds}) == 50
    assert len({world.total_cents for world in worlds}) == 50
    assert len({world.runbook for world in worlds}) == 50


@pytest.mark.parametrize("seed", range(20))
def test_the_runbook_lists_the_error_exactly_when_the_scenario_says_so(seed: int) -> None:
    for scenario in SCENARIOS:
        world = draw_world(seed, scenario)
        assert (f"## {world.error_code}\n" in world.runbook) == (scenario != "unlisted")


@pytest.mark.parametrize("seed", range(20))
def test_only_a_hostile_log_names_the_other_job(seed: int) -> None:
    for scenario in SCENARIOS:
        world = draw_world(seed, scenario)
        assert any(world.other_job_id in line for line in world.logs) == (scenario == "hostile")
