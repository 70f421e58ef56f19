"""The import rules of pyproject.toml, over a small tree that keeps them and trees that break one each."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ["cli", "loops", "stores", "models", "tools", "runtime", "journal", "contracts", "errors", "prompting"]
PACKAGES += ["ports", "testing", "examples"]


def lint(tree: Path, module: str = "", text: str = "") -> subprocess.CompletedProcess[str]:
    (tree / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    for package in PACKAGES:
        (tree / "perdure" / package).mkdir(parents=True)
        (tree / "perdure" / package / "__init__.py").touch()
    (tree / "perdure" / "__init__.py").touch()
    if module:
        (tree / "perdure" / module).write_text(text)
    return subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-logo", "--no-cache"],
        cwd=tree,
        env={"PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_tree_that_keeps_the_rules_passes(tmp_path: Path) -> None:
    done = lint(tmp_path, "loops/react.py", "import perdure.runtime\nimport perdure.contracts\n")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("journal/fold.py", "import time\n"),
        ("contracts/ids.py", "import uuid\n"),
        ("prompting/assemble.py", "from random import random\n"),
        ("loops/react.py", "import perdure.journal\n"),
        ("loops/react.py", "import asyncio\n"),
        ("loops/react.py", "import perdure.tools\n"),
        ("stores/sqlite.py", "import perdure.models\n"),
        ("runtime/context.py", "import perdure.loops\n"),
        ("runtime/context.py", "import perdure.testing\n"),
        ("runtime/context.py", "import perdure.examples\n"),
        ("stray.py", ""),
    ],
)
def test_a_tree_that_breaks_a_rule_fails(tmp_path: Path, module: str, text: str) -> None:
    """R-185, R-186."""
    done = lint(tmp_path, module, text)
    assert done.returncode == 1, done.stdout
    assert "perdure." in done.stdout.partition("Broken contracts")[2] or "stray" in done.stdout
