"""Stores over one file, and processes of their own."""

import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.stores.shapes import OpenStore, Start

from perdure.clock import SystemClock, SystemEntropy
from perdure.ports import Clock
from perdure.stores.sqlite import SqliteStore

PROGRAMS = Path(__file__).with_name("programs.py")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
async def open_store(path: Path) -> AsyncIterator[OpenStore]:
    """Opens stores over one file; each is a driver of its own, closed at the end."""
    stores: list[SqliteStore] = []

    async def open_one(clock: Clock | None = None, lease_seconds: float = 10.0, **options: bool) -> SqliteStore:
        store = await SqliteStore.open(
            path, clock=clock or SystemClock(), entropy=SystemEntropy(), lease_seconds=lease_seconds, **options
        )
        stores.append(store)
        return store

    yield open_one
    for store in stores:
        await store.close()


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a program of `programs.py`; whatever is left of it is killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def start_one(*arguments: object) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, str(PROGRAMS), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def public_directory() -> Iterator[Path]:
    """A directory that another user can read."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)
