"""A run of more than a hundred events, killed after each of them and resumed. The same tests over ReAct and over a loop
written outside with the public API."""

from pathlib import Path

import pytest
from tests.crash.errands import ANSWERS, LOOPS, Town

from perdure.testing.scripted import ScriptedModel
from perdure.testing.sweeping import SweepReport, sweep

PARTS = 6
LIVE_PARTS = 20

loops = pytest.mark.parametrize("loop", LOOPS)


async def swept(loop: str, directory: Path, *, live: bool = False, part: int = 0, parts: int = 1) -> SweepReport:
    make_agent, script = LOOPS[loop]
    town = Town()
    return await sweep(
        make_agent(town),
        lambda: ScriptedModel(script, chunk=0),
        "Do the errand",
        town,
        directory=directory,
        answers=ANSWERS,
        live=live,
        part=part,
        parts=parts,
    )


@loops
@pytest.mark.parametrize("part", [pytest.param(n, marks=() if n == 0 else pytest.mark.slow) for n in range(PARTS)])
async def test_a_run_cut_after_any_event_ends_as_if_it_had_never_been_cut(loop: str, part: int, tmp_path: Path) -> None:
    """S-001, S-014 to S-016, S-052, S-063, S-064, S-074, S-079, R-019, O1, O2, O12, O17, C1, C5, C12."""
    report = await swept(loop, tmp_path, part=part, parts=PARTS)
    assert not report.problems, "\n".join(report.problems)
    assert len(report.recording.envelopes) >= 100


@loops
@pytest.mark.slow
async def test_a_run_whose_store_dies_under_it_ends_as_if_it_had_never_been_cut(loop: str, tmp_path: Path) -> None:
    """S-063, S-074, O1, O17."""
    report = await swept(loop, tmp_path, live=True, part=3, parts=LIVE_PARTS)
    assert not report.problems, "\n".join(report.problems)


@pytest.mark.soak
@loops
@pytest.mark.parametrize("part", range(4))
async def test_a_run_whose_store_dies_after_any_event_ends_as_if_it_had_never_been_cut(
    loop: str, part: int, tmp_path: Path
) -> None:
    """S-074, O17."""
    report = await swept(loop, tmp_path, live=True, part=part, parts=4)
    assert not report.problems, "\n".join(report.problems)
