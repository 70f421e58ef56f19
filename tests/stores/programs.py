"""Programs that the tests start as processes of their own: `python programs.py NAME ARGUMENTS...`."""

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import apsw

from perdure.clock import SystemClock, SystemEntropy
from perdure.errors import PerdureError
from perdure.stores.sqlite import SqliteStore
from perdure.testing.conformance import KEY, OPEN, Chain
from perdure.testing.disks import FailingDisk, tapped


async def opened(path: str, lease_seconds: float = 10.0, *, read_only: bool = False) -> SqliteStore:
    return await SqliteStore.open(
        path, clock=SystemClock(), entropy=SystemEntropy(), lease_seconds=lease_seconds, read_only=read_only
    )


def say(*words: object) -> None:
    print(*words, flush=True)


async def hold(path: str, lease_seconds: str) -> None:
    """Holds the run `held` and appends to it until that is refused."""
    store = await opened(path, float(lease_seconds))
    chain = Chain("held")
    lease = await store.create("held", KEY, chain.next(), OPEN)
    say("held")
    appended = 1
    try:
        while True:
            await store.confirm(lease)
            await store.append(lease, chain.next(), None)
            appended += 1
            await asyncio.sleep(0.01)
    except PerdureError as error:
        say(type(error).__name__, appended)
    await store.close()


async def drive(path: str, run_id: str, turns: str) -> None:
    """One short run."""
    store = await opened(path)
    chain = Chain(run_id)
    lease = await store.create(run_id, KEY, chain.next(), OPEN)
    for _ in range(int(turns)):
        await store.append(lease, chain.next(2), None)
    await store.close()


async def errand(path: str, run_id: str) -> None:
    """A short real run with a read and a write, begun at a moment that was agreed on."""
    from perdure import Agent, Engine, tool
    from perdure.testing.scripted import ScriptedModel, calls, text

    @tool(effect="read")
    async def look() -> str:
        """Looks."""
        return "seen"

    @tool(effect="write")
    async def act() -> str:
        """Acts, which is seen in a file beside the store."""
        with open(f"{path}.effects", "a") as effects:  # noqa: PTH123
            effects.write(f"{run_id}\n")
        return "done"

    model = ScriptedModel([calls(("look", {})), calls(("act", {})), text("ended")])
    say("ready")
    sys.stdin.readline()
    async with Engine.open(f"sqlite:{path}") as engine:
        run = await engine.start(Agent(name="errand", tools=[look, act]), "go", run_id=run_id, model=model)
        outcome = await run.wait()
    say(outcome.status, outcome.output)


async def fail_inside_a_write(path: str, error: str) -> None:
    """Writes a row, fails before the write is whole, and lives on."""
    store = await opened(path)
    await store.create("failing", KEY, Chain("failing").next(), OPEN)

    def work(connection: apsw.Connection) -> None:
        connection.execute("insert into driver(driver_id, beat, beat_at) values('half', 1, 1)")
        if error == "constraint":
            connection.execute("insert into driver(driver_id, beat, beat_at) values('half', 1, 1)")
        raise RuntimeError("a defect in the middle of a write")

    try:
        await store._submit(work)
    except PerdureError as failed:
        say(failed.code)
    sys.stdin.readline()
    await store.close()


async def read_on(path: str) -> None:
    """Keeps a read open until told."""
    connection = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY)
    connection.execute("begin")
    seen = connection.execute("select count(*) from event").get
    say(seen)
    sys.stdin.readline()
    say(connection.execute("select count(*) from event").get)
    connection.close()


async def keep_the_lock(path: str) -> None:
    """Keeps the file's lock until it is killed."""
    connection = apsw.Connection(path)
    connection.execute("begin immediate")
    say("locked")
    sys.stdin.readline()


async def contend(path: str, run_id: str) -> None:
    """Tries to take a run at a moment that was agreed on, and keeps it for a while."""
    store = await opened(path)
    say("ready")
    sys.stdin.readline()
    started = time.monotonic()
    try:
        await store.acquire(run_id)
        say("took")
        sys.stdin.readline()
    except PerdureError as error:
        say(type(error).__name__, time.monotonic() - started)
    await store.close()


async def leave(path: str) -> None:
    """Ends without closing anything, while it holds a run and a read is under way."""
    store = await opened(path)
    await store.create("left", KEY, Chain("left").next(), OPEN)
    store._reader.read(lambda _: time.sleep(60)).send(None)
    say("leaving")


async def write_until_it_fails(path: str, *, linger: bool = False) -> None:
    """Appends until the store fails; says how, and how many events were confirmed before."""
    store = await opened(path)
    chain = Chain("full")
    confirmed = 1
    try:
        lease = await store.create("full", KEY, chain.next(), OPEN)
        while True:
            await store.append(lease, chain.next(20), None)
            confirmed += 20
    except PerdureError as error:
        say(confirmed, error.code, error)
    if linger:
        sys.stdin.readline()
    try:
        await store.create("later", KEY, Chain("later").next(), OPEN)
        say("went on")
    except PerdureError as error:
        say("later:", error.code)
    await store.close()


async def write_with_limited_files(path: str) -> None:
    """Fails at a write: the system refuses to let a file grow."""
    import resource

    await drive(path, "before", "1")
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
    await write_until_it_fails(path)


async def write_on_a_failing_disk(path: str, operation: Any, error: str, after: str, linger: bool = False) -> None:
    """Fails at the n-th write or sync of the log, as a full or a broken disk does."""
    await drive(path, "before", "1")
    with tapped(FailingDisk(operation, getattr(apsw, error), after=int(after))):
        await write_until_it_fails(path, linger=linger)


async def fail_and_wait(path: str) -> None:
    """Lives on with its failed store."""
    await write_on_a_failing_disk(path, "sync", "IOError", "10", linger=True)


async def use_read_only(path: str, *, as_user: str) -> None:
    """Opens a store that this user cannot write, for writing and for reading."""
    if os.geteuid() == 0:  # whom no permission stops
        with suppress(PerdureError):
            await opened(path, read_only=True)
        # Everything is imported by now; afterwards this user may read no library.
        os.setgid(int(as_user))
        os.setuid(int(as_user))
    for read_only in (False, True):
        try:
            store = await opened(path, read_only=read_only)
            stored = await store.read("before")
            say("opened", stored and len(stored.envelopes))
            await store.close()
        except PerdureError as error:
            say(error.code, error)


PROGRAMS: dict[str, Callable[..., Awaitable[None]]] = {
    "hold": hold,
    "drive": drive,
    "errand": errand,
    "fail-inside-a-write": fail_inside_a_write,
    "read-on": read_on,
    "keep-the-lock": keep_the_lock,
    "contend": contend,
    "leave": leave,
    "limited-files": write_with_limited_files,
    "failing-disk": write_on_a_failing_disk,
    "failing-disk-and-wait": fail_and_wait,
    "until-it-fails": write_until_it_fails,
    "read-only": lambda path: use_read_only(path, as_user="65534"),
}

if __name__ == "__main__":
    sys.path.pop(0)
    asyncio.run(PROGRAMS[sys.argv[1]](*sys.argv[2:]))
