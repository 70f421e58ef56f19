"""A run on a small file system that fills up: python -m tests.crash.full_disk DIRECTORY, in a mount namespace of its
own. Prints one line of JSON."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.crash.test_disks import World, started

from perdure import Engine
from perdure.clock import SystemClock, SystemEntropy
from perdure.errors import StoreError
from perdure.stores.url import open_store


def mount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)


class NotingStore:
    """Notes when the store first failed to make something durable."""

    def __init__(self, store: Any) -> None:
        self._store, self.failed_at_ns = store, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def append(self, *piece: Any) -> Any:
        stored = self._store.append(*piece)
        stored.add_done_callback(self._noted)
        return stored

    async def put_artifact(self, *what: Any) -> Any:
        try:
            return await self._store.put_artifact(*what)
        except StoreError:
            self._failed()
            raise

    def _noted(self, stored: Any) -> None:
        if stored.exception() is not None:
            self._failed()

    def _failed(self) -> None:
        self.failed_at_ns = self.failed_at_ns or time.monotonic_ns()


async def main(folder: Path) -> None:
    """Runs until the disk is full, makes room, and goes on in another engine."""
    mount(folder, "size=2m")
    url, world, first = f"sqlite:{folder / 'perdure.db'}", World(padding=100_000), ""
    clock, entropy = SystemClock(), SystemEntropy()
    noting = NotingStore(await open_store(url, clock=clock, entropy=entropy))
    store: Any = noting
    async with Engine(store, clock, entropy) as engine:
        run = await started(engine, world, "r")
        try:
            await run.wait()
        except StoreError as error:
            first = error.found.partition(" (")[0]
        await asyncio.sleep(0.2)
    late = [what for at, what in world.acts if noting.failed_at_ns and at > noting.failed_at_ns]
    mount(folder, "remount,size=64m")
    await world.to_the_end(url, "r")
    world.complete("r")
    print(json.dumps({"first": first, "acts_after_failure": late, "failed": noting.failed_at_ns > 0, "complete": True}))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
