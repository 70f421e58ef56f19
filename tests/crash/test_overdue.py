"""A real process, killed while a write of it is past its time limit, and its run resumed by another."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.crash.overdue import RUN, agent_over, model

from perdure import Engine
from perdure.journal import events as ev

ROOT = Path(__file__).resolve().parents[2]


def lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize(
    ("when", "paid", "reason"),
    [
        ("before the effect", 0, "outcome_unknown"),
        ("before the late result", 1, "outcome_unknown"),
        ("after the late result", 1, "ended_late"),
    ],
)
async def test_a_write_past_its_limit_in_a_process_that_is_killed_is_not_repeated(
    when: str, paid: int, reason: str, tmp_path: Path
) -> None:
    """H26, H02, O2, O10, O17: the model asks for it again, and is told what is known."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.overdue", str(tmp_path), when], cwd=ROOT, check=False, timeout=120
    )
    assert done.returncode == -signal.SIGKILL
    async with Engine.open(f"sqlite:{tmp_path / 'perdure.db'}") as engine:
        run = await engine.resume(RUN, agent_over(tmp_path, when, None), model=model())
        assert (await run.wait()).output == "Done."
        events = [ev.decode(envelope) for envelope in await engine.journal(RUN)]
    assert (lines(tmp_path / "began"), lines(tmp_path / "paid")) == (1, paid)
    failed = [event for event in events if isinstance(event, ev.ToolCallFailed)]
    assert [(event.call, event.reason) for event in failed] == [("1.0", "unknown")]
    refused = [event for event in events if isinstance(event, ev.ToolCallRefused)]
    assert [(event.call, event.reason) for event in refused] == [("3.0", reason)]
    assert ("receipt 7" in refused[0].observation) == (reason == "ended_late")
