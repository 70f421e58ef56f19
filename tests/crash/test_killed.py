"""A real process, killed with SIGKILL inside a call, and its run resumed by another."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.crash.killed import RUN, agent_over, model

from perdure import Engine
from perdure.errors import LeaseHeldError

ROOT = Path(__file__).resolve().parents[2]


def killed(directory: Path, effect: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.killed", str(directory), effect], cwd=ROOT, check=False, timeout=60
    )
    assert done.returncode == -signal.SIGKILL


def notes(directory: Path) -> list[list[str]]:
    return [line.split() for line in (directory / "notes").read_text().splitlines()]


async def test_an_idempotent_call_killed_after_its_effect_runs_again_with_the_same_key(tmp_path: Path) -> None:
    """H02, S-052, S-064, O17: the dead driver's lease is taken over at once; the later call has another key."""
    killed(tmp_path, "idempotent")
    async with Engine.open(f"sqlite:{tmp_path / 'perdure.db'}") as engine:
        assert (await engine.show(RUN))["open_calls"][0]["call"] == "1.0"
        agent = agent_over(tmp_path, "idempotent", kills=False)
        outcome = await (await engine.resume(RUN, agent, model=model())).wait()
    assert outcome.output == "Done."
    first, again, later = notes(tmp_path)
    assert first[1] == again[1] != later[1]
    assert [line[2] for line in (first, again, later)] == ["1", "2", "1"]


async def test_a_write_killed_after_its_effect_is_not_run_again(tmp_path: Path) -> None:
    """H02, S-064, O10: a person settles it, and the effect is there once."""
    killed(tmp_path, "write")
    async with Engine.open(f"sqlite:{tmp_path / 'perdure.db'}") as engine:
        agent = agent_over(tmp_path, "write", kills=False)
        outcome = await (await engine.resume(RUN, agent, model=model())).wait()
        assert outcome.park is not None
        assert (outcome.park.kind, outcome.park.call) == ("needs_reconciliation", "1.0")
        assert len(notes(tmp_path)) == 1
        await engine.resolve(RUN, "1.0", "happened", result="noted x")
        outcome = await (await engine.resume(RUN, agent, model=model())).wait()
    assert outcome.output == "Done."
    assert [line[2] for line in notes(tmp_path)] == ["1", "1"]


async def test_of_two_who_resume_a_dead_run_one_drives_it(tmp_path: Path) -> None:
    """H02: the other asks nothing."""
    killed(tmp_path, "idempotent")
    url, agent = f"sqlite:{tmp_path / 'perdure.db'}", agent_over(tmp_path, "idempotent", kills=False)
    async with Engine.open(url) as one, Engine.open(url) as other:
        run = await one.resume(RUN, agent, model=model(delay_ms=2000))
        idle = model()
        with pytest.raises(LeaseHeldError):
            await other.resume(RUN, agent, model=idle)
        assert (await run.wait()).output == "Done."
    assert idle.requests == []
