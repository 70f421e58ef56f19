"""Limits over real kills: what was used stays used, whatever becomes of the process."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.crash.metered import LIMIT, RUN, TURNS, Metered, agent_over

from perdure import Engine, Outcome

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def driven(directory: Path, asked: int, where: str) -> int:
    """Drives the run in a process that dies in or after so many model calls; how that ended."""
    argv = [sys.executable, "-m", "tests.crash.metered", str(directory), str(asked), where]
    return subprocess.run(argv, cwd=ROOT, check=False, timeout=120).returncode


def asked_in_all(directory: Path) -> int:
    return len((directory / "asked").read_text().splitlines())


async def resumed(engine: Engine, directory: Path) -> tuple[Outcome, int]:
    """Drives the run on in this process; where it stands, and how often its model was asked."""
    model = Metered(directory)
    return await (await engine.resume(RUN, agent_over(model), model=model)).wait(), model.asked


@pytest.mark.parametrize("where", ["in the call", "after the call"])
async def test_a_limit_of_ten_model_calls_holds_over_six_kills_and_follows_its_changes(
    where: str, tmp_path: Path
) -> None:
    """H19, C3, C5, C28, O3: killed after six, then after each further one; lowered it stops, raised it goes on."""
    assert driven(tmp_path, 6, where) == -signal.SIGKILL
    assert asked_in_all(tmp_path) == 6
    for further in range(1, 5):
        assert driven(tmp_path, 1, where) == -signal.SIGKILL
        assert asked_in_all(tmp_path) == 6 + further
    assert driven(tmp_path, 1, where) == 3
    assert asked_in_all(tmp_path) == LIMIT
    async with Engine.open(f"sqlite:{tmp_path / 'perdure.db'}") as engine:
        parked = await engine.outcome(RUN)
        assert parked.park is not None
        assert parked.park.detail == {"limit": "max_model_turns", "max": 10, "used": 10, "need": 1}
        await engine.limit(RUN, max_model_turns=5)
        lowered, asked = await resumed(engine, tmp_path)
        assert (lowered.status, lowered.usage.model_turns, asked) == ("parked", 10, 0)
        await engine.limit(RUN, max_model_turns=12)
        raised, asked = await resumed(engine, tmp_path)
        assert (raised.status, raised.usage.model_turns, asked) == ("parked", 12, 2)
        await engine.limit(RUN, max_model_turns="+20")
        ended, asked = await resumed(engine, tmp_path)
        assert ended.output == "Done."
        journal = await engine.journal(RUN)
        again, asked_again = await resumed(engine, tmp_path)
        assert (again.usage, asked_again) == (ended.usage, 0)
        assert await engine.journal(RUN) == journal
    assert ended.usage.model_turns == asked_in_all(tmp_path) == 12 + asked
    answered = sum(envelope.kind == "model_call_completed" for envelope in journal)
    assert answered == TURNS  # no answer was paid for twice


async def test_a_limit_lowered_below_what_a_killed_run_has_used_parks_it_at_once(tmp_path: Path) -> None:
    """H19, C28: six are used and five allowed; the six are read back for nothing."""
    assert driven(tmp_path, 6, "after the call") == -signal.SIGKILL
    async with Engine.open(f"sqlite:{tmp_path / 'perdure.db'}") as engine:
        await engine.limit(RUN, max_model_turns=5)
        outcome, asked = await resumed(engine, tmp_path)
        assert outcome.park is not None
        assert (outcome.park.detail["max"], outcome.park.detail["used"], asked) == (5, 6, 0)
        assert outcome.usage.model_turns == 6
        await engine.limit(RUN, max_model_turns=7)
        outcome, asked = await resumed(engine, tmp_path)
        assert (outcome.status, outcome.usage.model_turns, asked) == ("parked", 7, 1)
    assert asked_in_all(tmp_path) == 7
