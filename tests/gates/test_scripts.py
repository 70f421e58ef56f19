"""The scripts themselves."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["setup", "demo", "check", "test", "bench", "soak", "lock", "requirements"]
PROGRAMS = [*(ROOT / "scripts" / name for name in NAMES), ROOT / ".ci" / "run"]
SHELL = [path for path in [*PROGRAMS, ROOT / "scripts" / "gates"] if path.name != "requirements"]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_a_script_is_executable_and_names_its_interpreter(path: Path) -> None:
    assert os.access(path, os.X_OK)
    assert path.read_text("utf-8").startswith("#!/usr/bin/env ")


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_a_shell_script_parses(path: Path) -> None:
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_version_that_cannot_be_is_a_usage_error() -> None:
    done = subprocess.run([ROOT / "scripts" / "setup", "2.7"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "usage" in done.stderr
    assert done.stdout == ""


def test_a_python_that_is_not_there_is_told_apart_from_a_failure(tmp_path: Path) -> None:
    """A clone of the scripts alone, and a PATH on which no Python is found."""
    (tmp_path / "scripts").mkdir()
    tools = tmp_path / "tools"
    tools.mkdir()
    (tmp_path / "scripts" / "setup").write_bytes((ROOT / "scripts" / "setup").read_bytes())
    for tool in ("bash", "readlink", "dirname", "cat", "ls", "sha256sum", "cut", "mktemp", "rm", "flock"):
        found = subprocess.run(["which", tool], capture_output=True, text=True, check=True).stdout.strip()
        (tools / tool).symlink_to(found)
    for name in ("requirements.lock", "pyproject.toml"):
        (tmp_path / name).write_text("")
    for version, code in (("3.12", 3), (None, 2)):
        done = subprocess.run(
            [tools / "bash", tmp_path / "scripts" / "setup", *([version] if version else [])],
            env={"PATH": str(tools), "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert "no Python" in done.stderr


def gates(tmp_path: Path, *commands: str) -> subprocess.CompletedProcess[str]:
    program = "\n".join(["set -euo pipefail", f"root={tmp_path}", f". {ROOT}/scripts/gates", *commands, "verdict"])
    return subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)


def test_all_gates_run_although_one_fails_and_the_verdict_names_it(tmp_path: Path) -> None:
    done = gates(tmp_path, "gate one true", "gate two sh -c 'echo because; exit 3'", "gate three echo fine")
    assert done.returncode == 1
    assert [line.split()[:2] for line in done.stdout.splitlines() if line.startswith(("ok", "FAILED"))] == [
        ["ok", "one"],
        ["FAILED", "two"],
        ["ok", "three"],
    ]
    assert "because" in done.stdout
    assert done.stderr == "failed: two\n"


def test_gates_that_all_pass_make_a_good_verdict(tmp_path: Path) -> None:
    assert gates(tmp_path, "gate one true", "gate two true").returncode == 0
