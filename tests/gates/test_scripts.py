"""The scripts themselves."""

import os
import subprocess
import sys
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


def clone(folder: Path) -> None:
    """A clone of the setup alone, and beside it a folder `tools` with all that it needs but a Python."""
    (folder / "scripts").mkdir()
    tools = folder / "tools"
    tools.mkdir()
    (folder / "scripts" / "setup").write_bytes((ROOT / "scripts" / "setup").read_bytes())
    for tool in ("bash", "readlink", "dirname", "cat", "ls", "sha256sum", "cut", "mktemp", "rm", "flock", "id"):
        found = subprocess.run(["which", tool], capture_output=True, text=True, check=True).stdout.strip()
        (tools / tool).symlink_to(found)
    for name in ("requirements.lock", "pyproject.toml"):
        (folder / name).write_text("")


def setup(folder: Path, version: str | None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [folder / "tools" / "bash", folder / "scripts" / "setup", *([version] if version else [])],
        env={"PATH": str(folder / "tools"), "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_python_that_is_not_there_is_told_apart_from_a_failure(tmp_path: Path) -> None:
    """A PATH on which no Python is found."""
    clone(tmp_path)
    for version, code in (("3.12", 3), (None, 2)):
        done = setup(tmp_path, version)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert "no Python" in done.stderr


@pytest.mark.parametrize("version", [None, f"{sys.version_info.major}.{sys.version_info.minor}"], ids=["any", "one"])
def test_an_environment_that_is_a_link_is_refused_and_what_it_leads_to_is_left_as_it_was(
    version: str | None, tmp_path: Path
) -> None:
    """Making it anew would empty the folder of somebody else."""
    clone(tmp_path)
    (tmp_path / "tools" / f"python{sys.version_info.major}.{sys.version_info.minor}").symlink_to(sys.executable)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "kept").write_text("theirs")
    link = tmp_path / (".venv" if version is None else f".venv-{version}")
    link.symlink_to("theirs")
    done = setup(tmp_path, version)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert f"{link} is a symbolic link; remove it" in done.stderr
    assert [path.name for path in (tmp_path / "theirs").iterdir()] == ["kept"]
    assert link.is_symlink()


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
