"""A run on a small file system that fills up: python -m tests.crash.full_disk DIRECTORY, in a mount namespace of its
own. Prints one line of JSON."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

from tests.crash.test_disks import World, started

from perdure import Engine
from perdure.errors import StoreError


def mount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)


async def main(folder: Path) -> None:
    """Runs until the disk is full, makes room, and goes on in another engine."""
    mount(folder, "size=2m")
    url, world = f"sqlite:{folder / 'perdure.db'}", World(padding=100_000)
    first, failed_at = "", 0
    async with Engine.open(url) as engine:
        run = await started(engine, world, "r")
        try:
            await run.wait()
        except StoreError as error:
            first, failed_at = error.found.partition(" (")[0], time.monotonic_ns()
        await asyncio.sleep(0.2)
        late = [what for at, what in world.acts if at > failed_at]
    mount(folder, "remount,size=64m")
    await world.to_the_end(url, "r")
    world.complete("r")
    print(json.dumps({"first": first, "acts_after_failure": late, "complete": True}))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
