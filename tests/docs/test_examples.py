"""The examples of the README, the tutorial and the how-tos do what they say."""

import re
import subprocess
import sys
from pathlib import Path

from tests.docs.conftest import Elsewhere

ROOT = Path(__file__).parents[2]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)


def run(argv: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def written(page: str, folder: Path) -> None:
    """The page's files, each named by its first line."""
    for language in ("python", "toml"):
        for block in blocks(page, language):
            name = block.splitlines()[0].removeprefix("# ")
            if name.endswith((".py", ".toml")):
                (folder / name).write_text(block, "utf-8")


def test_the_wheel_is_what_runs_elsewhere(elsewhere: Elsewhere, tmp_path: Path) -> None:
    told = elsewhere("perdure --version && python -c 'import perdure; print(perdure.__file__)'", tmp_path)
    assert told.returncode == 0, told.stderr
    assert str(ROOT) not in told.stdout


def test_the_readmes_agent_is_killed_and_resumed_with_one_order(elsewhere: Elsewhere, tmp_path: Path) -> None:
    """R-019, O17, H02: the README's files and commands verbatim, one shell session, outside the clone."""
    written("README.md", tmp_path)
    session = next(block for block in blocks("README.md", "sh") if "kill -9" in block)
    told = elsewhere(f"set -e\n{session}", tmp_path)
    assert told.returncode == 0, (told.stdout, told.stderr)
    assert "Seven more apples are coming." in told.stdout
    assert told.stdout.splitlines().count("7 apples") == 1
    assert told.stdout.count("drive_started") == 2
    assert "attempt_started" in told.stdout
    assert "proven: 1 run" in told.stdout
    assert len(list(tmp_path.glob("order-*"))) == 1
    shows_keys = re.findall(r"`(perdure history apples [^`]+)`", (ROOT / "README.md").read_text("utf-8"))
    recorded = elsewhere(shows_keys[0], tmp_path).stdout
    (key,) = re.findall(r'"key":"(\w+)"', recorded)
    assert (tmp_path / f"order-{key}").exists()


def test_the_readmes_python_prints_the_answer(elsewhere: Elsewhere, tmp_path: Path) -> None:
    """R-019, R-183."""
    written("README.md", tmp_path)
    told = elsewhere("python keep_shop.py", tmp_path)
    assert told.stdout == "completed - Seven more apples are coming.\n", told.stderr


KILLED = """
python keep_shop.py &
while kill -0 $! && [ -z "$(find . -name 'order-*')" ]; do sleep 0.1; done
kill -9 $!
perdure show monday --store sqlite:shop.db
"""


def test_the_readmes_python_run_is_killed_and_resumed_as_it_says(elsewhere: Elsewhere, tmp_path: Path) -> None:
    """R-019: by the README's own command, and by its own line of Python."""
    page = (ROOT / "README.md").read_text("utf-8")
    commands = re.findall(r"`(perdure resume [^`]+)`", page)
    lines = re.findall(r"`(run = await engine.resume\([^`]+)`", page)
    assert commands
    again = blocks("README.md", "python")[1]
    start = next(line for line in again.splitlines() if "engine.start" in line)
    for resume in (*commands, "python again.py"):
        folder = tmp_path / str(len(resume))
        folder.mkdir()
        written("README.md", folder)
        (folder / "again.py").write_text(again.replace(start.strip(), lines[0]), "utf-8")
        told = elsewhere(KILLED + resume, folder)
        assert "perdure resume monday --agent FILE_OR_MODULE:ATTRIBUTE" in told.stdout
        assert told.stdout.splitlines()[-1].endswith("Seven more apples are coming."), (told.stdout, told.stderr)
        assert len(list(folder.glob("order-*"))) == 1


def test_the_tutorials_agent_is_killed_settled_and_ends_with_one_line(elsewhere: Elsewhere, tmp_path: Path) -> None:
    """S-064, S-065, H02: the tutorial's commands as they stand, in one shell."""
    written("docs/tutorial.md", tmp_path)
    before, kill, settle = (block for block in blocks("docs/tutorial.md", "sh") if "demo" not in block)
    assert "setup" in before
    told = elsewhere(kill + settle, tmp_path)
    assert told.returncode == 0, (told.stdout, told.stderr)
    assert "needs_reconciliation" in told.stdout
    assert "run_completed" in told.stdout
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


def test_the_how_tos_unsafe_tool_is_named_in_the_very_words_it_shows(elsewhere: Elsewhere, tmp_path: Path) -> None:
    """O17: the page's files, its command, and all that it prints but for the numbers, which depend on the machine."""
    page = "docs/how-to/crash-test.md"
    written(page, tmp_path)
    command, *shown = blocks(page, "console")[0].splitlines()
    told = elsewhere(command.removeprefix("$ "), tmp_path)
    assert told.returncode == 1, told.stderr
    assert without_numbers(told.stderr.splitlines() + told.stdout.splitlines()) == without_numbers(shown)


def without_numbers(lines: list[str]) -> list[str]:
    return [re.sub(r"\d+(\.\d+)? *", "# ", line) for line in lines]
