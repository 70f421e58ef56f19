"""The README's and the how-to's examples do what they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PERDURE = [sys.executable, "-m", "perdure.cli"]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)


def run(argv: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A folder with the README's files, each named by its first line."""
    for language in ("python", "toml"):
        for block in blocks("README.md", language):
            name = block.splitlines()[0].removeprefix("# ")
            (tmp_path / name).write_text(block, "utf-8")
    return tmp_path


def test_the_readmes_commands_run_the_readmes_agent(shop: Path) -> None:
    """R-019: the engine is the product entry, here through its command line."""
    commands = [line.removeprefix("$ perdure ") for line in blocks("README.md", "console")[0].splitlines()]
    assert len(commands) == 4
    for command in commands:
        ended = run(["sh", "-c", f"{sys.executable} -m perdure.cli {command}"], shop)
        assert ended.returncode == 0, (command, ended.stdout, ended.stderr)


def test_the_readmes_python_prints_the_answer(shop: Path) -> None:
    """R-019, R-183."""
    ended = run([sys.executable, "keep_shop.py"], shop)
    assert ended.stdout == "completed - There were 3 apples; 7 more are on their way.\n", ended.stderr


def test_the_tutorials_agent_is_killed_settled_and_ends_with_one_line(tmp_path: Path) -> None:
    """S-064, S-065, H02: the tutorial's commands as they stand, in one shell."""
    for language in ("python", "toml"):
        for block in blocks("docs/tutorial.md", language):
            name = block.splitlines()[0].removeprefix("# ")
            if name.startswith("notes."):
                (tmp_path / name).write_text(block, "utf-8")
    before, kill, settle = (block for block in blocks("docs/tutorial.md", "sh") if "demo" not in block)
    assert "setup" in before
    program = f'perdure() {{ {sys.executable} -m perdure.cli "$@"; }}\n'
    # As a user would, it waits until the line is there; a fixed pause would make a loaded machine fail.
    run_, _, rest = kill.partition("sleep 3")
    waits = "while ! [ -s notes.txt ]; do sleep 0.05; done #"
    # The function is a shell of its own in the background, so the program is started as itself.
    started = run_.replace("perdure run", f"{sys.executable} -m perdure.cli run")
    ended = run(["bash", "-c", program + started + waits + rest + settle], tmp_path)
    assert ended.returncode == 0, (ended.stdout, ended.stderr)
    assert "needs_reconciliation" in ended.stdout
    assert "run_completed" in ended.stdout
    assert (tmp_path / "notes.txt").read_text("utf-8") == "buy apples\n"


def test_the_loop_of_the_how_to_runs_parks_and_ends(tmp_path: Path) -> None:
    """S-001: a loop written outside has what the built-in one has."""
    loop = blocks("docs/how-to/own-loop.md", "python")[0]
    (tmp_path / "rates.py").write_text(
        loop
        + """

import asyncio
from perdure import Agent, Engine
from perdure.testing import ManualClock, ScriptedModel, text


def fetch_rate(currency: str) -> float:
    return 1.25


async def main() -> None:
    agent = Agent(name="rates", model=ScriptedModel([text("a rate")]), loop=my_loop)
    clock = ManualClock()
    async with Engine.open("sqlite:rates.db", clock=clock) as engine:
        outcome = await (await engine.start(agent, "go", run_id="r")).wait()
        assert outcome.park.kind == "suspended", outcome
        await engine.answer("r", outcome.park.call, True)
        outcome = await (await engine.resume("r", agent)).wait()
        assert outcome.park.kind == "sleeping", outcome
        clock.advance(6 * 3600)
        outcome = await (await engine.resume("r", agent)).wait()
        print(outcome.answer)


asyncio.run(main())
""",
        "utf-8",
    )
    ended = run([sys.executable, "rates.py"], tmp_path)
    assert ended.stdout == "a rate\n", ended.stderr


def test_every_page_the_docs_link_to_is_there() -> None:
    """Design: docs are for users first; a dead link is an error."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
            assert "://" in target or (page.parent / target).exists(), (page.name, target)


def test_the_how_tos_unsafe_tool_is_named(tmp_path: Path) -> None:
    """O17: the page's files, its command, and the lines it shows."""
    page = "docs/how-to/crash-test.md"
    for block in (blocks(page, "python")[0], blocks(page, "toml")[0]):
        (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block, "utf-8")
    command, *shown = blocks(page, "console")[0].splitlines()
    ended = run(["sh", "-c", command.replace("$ perdure", f"{sys.executable} -m perdure.cli")], tmp_path)
    assert ended.returncode == 1, ended.stderr
    for line in shown[3:]:
        assert line in ended.stdout.splitlines()
    assert shown[1].split() in [line.split() for line in ended.stdout.splitlines()]
