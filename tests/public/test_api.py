"""The public surface is a list someone decided, and importing it costs nothing."""

import subprocess
import sys
from pathlib import Path

import perdure

ROOT = Path(__file__).parents[2]


def test_the_public_api_is_exactly_what_was_decided() -> None:
    """Style 12: `__all__` is the API."""
    assert perdure.__all__ == (ROOT / "docs/public-api.txt").read_text("utf-8").split()


def test_every_public_name_is_there() -> None:
    """Style 12."""
    for name in perdure.__all__:
        assert getattr(perdure, name) is not None


def test_importing_perdure_opens_nothing_and_loads_no_library() -> None:
    """D-004: importing is silent and light."""
    code = (
        "import sys, os; before = set(os.listdir('/proc/self/fd')); import perdure; "
        "libraries = {'pydantic', 'apsw', 'openai', 'typer', 'rich', 'jsonschema', 'asyncio', 'sqlite3'}; "
        "heavy = libraries & set(sys.modules); "
        "assert not heavy, heavy; assert set(os.listdir('/proc/self/fd')) == before"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_an_agent_engine_and_tool_load_neither_a_provider_nor_a_store() -> None:
    """D-004: what is not used is not loaded."""
    code = (
        "import sys; from perdure import Agent, Engine, tool; "
        "heavy = {'apsw', 'openai', 'typer', 'rich', 'jsonschema'} & set(sys.modules); assert not heavy, heavy"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
