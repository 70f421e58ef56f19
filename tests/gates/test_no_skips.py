"""The plugin that makes a skip a failure, in sessions of its own."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def session(tmp_path: Path, program: str, *options: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "test_it.py").write_text(program)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, tmp_path],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        check=False,
    )


SKIP = "import pytest\n\ndef test_one(): pass\n\ndef test_two(): pytest.skip('no strace')\n"
SKIP_MODULE = "import pytest\npytest.skip('no kernel', allow_module_level=True)\n"
GOOD = "import pytest\n\ndef test_one(): pass\n\n@pytest.mark.xfail\ndef test_two(): assert False\n"


def test_a_skipped_test_fails_the_session_and_is_named(tmp_path: Path) -> None:
    done = session(tmp_path, SKIP, "-p", "no_skips", "-n", "2")
    assert done.returncode == 1
    assert "test_two" in done.stdout
    assert "no strace" in done.stdout
    assert "1 passed, 1 skipped" in done.stdout.splitlines()[-1]


def test_without_the_plugin_a_skip_passes(tmp_path: Path) -> None:
    assert session(tmp_path, SKIP).returncode == 0


def test_a_skipped_module_fails_the_session_beside_others_that_run(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("def test_fine(): pass\n")
    done = session(tmp_path, SKIP_MODULE, "-p", "no_skips", "-n", "2")
    assert done.returncode == 1
    assert "no kernel" in done.stdout


def test_a_session_without_skips_passes(tmp_path: Path) -> None:
    assert session(tmp_path, GOOD, "-p", "no_skips").returncode == 0
