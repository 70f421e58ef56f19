"""Runs that were started in Python, with an agent built in code: what the command line says of them and needs."""

import subprocess
import sys

import pytest
from tests.cli.shell import Shell

KEEPER = """
import asyncio
import sys

from my_models import asking
from my_tools import ask
from perdure import Agent, Engine

agent = Agent(name="asking", model=asking, tools=[ask])


async def main() -> None:
    async with Engine.open("sqlite:perdure.db") as engine:
        run = await engine.start(agent, "go", run_id="R")
        if "--idle" in sys.argv:
            engine.stop()
        await run.wait()
"""
GUARDED = KEEPER + '\n\nif __name__ == "__main__":\n    asyncio.run(main())\n'
ASKING = 'name = "asking"\nmodel = "my_models:asking"\ntools = ["my_tools:ask"]\n'
NAMED = "perdure resume R --agent FILE_OR_MODULE:ATTRIBUTE"
UNNAMED = (
    f"error: run R: the run does not say where its agent is\n  next: {NAMED}; in Python: engine.resume(run_id, agent)\n"
)
YES = '{"yes": true}'


def started_in_python(shell: Shell, *arguments: str) -> None:
    """A run that waits for an answer, or with `--idle` one that nobody drives."""
    shell.write("keeper.py", GUARDED)
    shell.write("asking.toml", ASKING)
    command = [sys.executable, "keeper.py", *arguments]
    subprocess.run(command, cwd=shell.folder, env=shell.environment, timeout=60, check=True)


def test_a_run_without_a_reference_is_shown_with_a_command_that_names_its_agent(shell: Shell) -> None:
    started_in_python(shell, "--idle")
    assert f"next     {NAMED}\n" in shell("show", "R", check=0).out
    assert shell("resume", "R", check=2).err == UNNAMED
    parked = shell("resume", "R", "--agent", "keeper:agent", check=3)
    assert f"next: perdure answer R 1.0 JSON; then {NAMED}\n" in parked.out


def test_a_run_without_a_reference_that_waits_is_settled_first_and_resumed_with_its_agent(shell: Shell) -> None:
    started_in_python(shell)
    assert f"next       perdure answer R 1.0 JSON; then {NAMED}\n" in shell("show", "R", check=0).out
    refused = shell("answer", "R", "1.0", YES, "--resume", check=2)
    assert "next: leave out --resume; then perdure resume R --agent" in refused.err
    shell("answer", "R", "1.0", YES, check=0)
    assert shell("resume", "R", "--agent", "keeper:agent", check=0).out == "published\n"


@pytest.mark.parametrize("part", ["agent", "tools", "model"])
def test_a_module_that_starts_its_run_when_it_is_imported_is_told_where_that_belongs(part: str, shell: Shell) -> None:
    shell.write("keeper.py", KEEPER + "\n\nasyncio.run(main())\n")
    shell.write("tools.toml", ASKING.replace("my_tools:ask", "keeper:ask"))
    shell.write("model.toml", ASKING.replace("my_models:asking", "keeper:asking"))
    refused = shell("run", {"agent": "keeper:agent"}.get(part, f"{part}.toml"), "--input", "x", check=2)
    assert "asyncio.run() cannot be called from a running event loop" in refused.err
    assert 'next: put the call under `if __name__ == "__main__":` in keeper\n' in refused.err
    assert "Warning" not in refused.err
    assert len(refused.err.splitlines()) == 2


def test_a_crash_test_of_such_a_module_starts_no_run_either(shell: Shell) -> None:
    shell.write("keeper.py", KEEPER + "\n\nasyncio.run(main())\n")
    refused = shell("crash-test", "keeper:agent", "--input", "x", check=2)
    assert "put the call under" in refused.err
    assert not (shell.folder / "perdure.db").exists()


def test_a_run_whose_model_was_an_object_goes_on_with_the_client_its_agent_file_names(shell: Shell) -> None:
    started_in_python(shell)
    shell("answer", "R", "1.0", YES, check=0)
    assert shell("resume", "R", "--agent", "asking.toml", check=0).out == "published\n"
    assert "model_bound" not in shell.kinds("R")


def test_a_run_whose_model_was_an_object_that_no_name_leads_to_asks_for_a_model(shell: Shell) -> None:
    started_in_python(shell)
    shell("answer", "R", "1.0", YES, check=0)
    shell.write("asking.toml", ASKING.replace("my_models:asking", "my_models:other"))
    models = (shell.folder / "my_models.py").read_text()
    other = "\nother = ScriptedModel([text('other')])\nother.target = 'scripted:other'\n"
    shell.write("my_models.py", models + other)
    refused = shell("resume", "R", "--agent", "asking.toml", check=2)
    assert "there is no provider and no module 'scripted'" in refused.err
    assert "name the model anew: `perdure resume ... --model MODULE:ATTRIBUTE`" in refused.err
    argv = ("resume", "R", "--agent", "asking.toml", "--model", "my_models:asking")
    assert shell(*argv, check=0).out == "published\n"
