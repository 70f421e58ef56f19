"""The lock file: every pin hashed, nothing of the machine that wrote it."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCK = (ROOT / "requirements.lock").read_text("utf-8")


def entries() -> dict[str, str]:
    """Each pin's own text, continuation lines joined, by normalized name."""
    joined = re.sub(r"\s*\\\n\s*", " ", LOCK)
    lines = [line for line in joined.splitlines() if line and not line.startswith("#")]
    return {normalized(re.split(r"[=\s\[]", line)[0]): line for line in lines}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_line_of_the_lock_is_an_exact_pin_with_hashes() -> None:
    bad = [line[:60] for line in entries().values() if not re.match(r"^[\w.\-]+==\S+ (;[^-]* )?--hash=sha256:", line)]
    assert bad == []
    assert all(re.fullmatch(r"[0-9a-f]{64}", found) for found in re.findall(r"--hash=sha256:(\S+)", LOCK))


def test_the_lock_names_no_address_and_no_option_of_an_installer() -> None:
    assert "://" not in LOCK
    assert " @ " not in LOCK
    assert re.findall(r"(?m)^\s*(?!--hash=)-\S+", LOCK) == []


def test_the_lock_holds_everything_the_project_declares() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    declared = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *[name for extra in project["project"]["optional-dependencies"].values() for name in extra],
        *project["dependency-groups"]["dev"],
    ]
    names = {normalized(re.split(r"[<>=!~\s\[;]", requirement)[0]) for requirement in declared}
    assert names - entries().keys() == set()


def test_every_direct_dependency_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    page = (ROOT / "docs" / "dependencies.md").read_text("utf-8")
    direct = [
        *project["project"]["dependencies"],
        *project["dependency-groups"]["dev"],
        *[name for extra in project["project"]["optional-dependencies"].values() for name in extra],
    ]
    names = [re.split(r"[<>=!~\s\[;]", requirement)[0] for requirement in direct]
    assert [name for name in names if f"| {name} " not in page] == []
