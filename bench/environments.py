"""Virtual environments for what the project itself does not depend on: the peers, and the library that draws curves.

Made on first use from a file of pinned and hashed requirements, and again when that file or the interpreter changes.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

INSTALL_SECONDS = 300
STAMP = ".installed"


class NotInstalledError(Exception):
    """An environment could not be made; the message says why."""


def environment(folder: Path, requirements: Path) -> Path:
    """The interpreter of the environment in `folder`, which holds what `requirements` pins.

    Raises:
        NotInstalledError: it could not be made.
    """
    python = folder / "bin" / "python"
    # An environment knows its own path and its interpreter: a moved clone or another version is another one.
    wanted = f"{hashlib.sha256(requirements.read_bytes()).hexdigest()} {sys.version_info[:2]} {folder}"
    stamp = folder / STAMP
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted and python.exists():
        return python
    print(f"bench: installing {requirements.name} into {folder} (once; needs the package index)", file=sys.stderr)
    _step("make the environment", [sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
    _step("install", [*pip, "--require-hashes", "-r", str(requirements)])
    # Last, so that one that was interrupted is made anew.
    stamp.write_text(wanted, encoding="utf-8")
    return python


def _step(what: str, command: list[str]) -> None:
    # The project's own code must not be what the environment finds.
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False, env=clean)
    except subprocess.TimeoutExpired:
        raise NotInstalledError(f"could not {what} within {INSTALL_SECONDS} s") from None
    except OSError as error:
        raise NotInstalledError(f"could not {what}: {error}") from None
    if done.returncode != 0:
        # The line that says most comes last, and its address is this machine's business.
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise NotInstalledError(f"could not {what}: {said[-1].strip() if said else done.returncode}")
