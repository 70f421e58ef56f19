"""Perdure as its users have it: the built wheel in an environment outside the clone."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Elsewhere:
    """A shell in which `perdure` and `python` are those of an environment with the wheel."""

    def __init__(self, environment: Path) -> None:
        self._bin = environment / "bin"

    def __call__(self, script: str, folder: Path, *, seconds: float = 120) -> "subprocess.CompletedProcess[str]":
        """Runs a script as one shell session in the folder."""
        known = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
        path = f"{self._bin}:{os.environ.get('PATH', '')}"
        return subprocess.run(
            ["bash", "-c", script], cwd=folder, env=known | {"PATH": path}, capture_output=True, text=True,
            timeout=seconds, check=False,
        )  # fmt: skip


def quietly(argv: list[str]) -> None:
    """Runs a command that must succeed."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Elsewhere:
    """The environment. What Perdure depends on comes from the project's own, as the lock file has it, so that no index
    is needed; the project itself is not reachable from there."""
    folder = tmp_path_factory.mktemp("elsewhere")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    quietly(build)
    wheel = next(folder.glob("*.whl"))
    environment = folder / "environment"
    quietly([sys.executable, "-m", "venv", "--without-pip", str(environment)])
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(environment / "bin" / "python")]
    quietly([*pip, "install", "-q", "--no-index", "--no-deps", str(wheel)])
    site = next((environment / "lib").glob("python*/site-packages"))
    # The names in a folder that is added so are importable, but its own such files (ours among them) are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    return Elsewhere(environment)
