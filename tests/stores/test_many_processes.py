"""Many processes on one file: none fails for a lock that clears, and none waits without bound (H08)."""

import asyncio
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.stores.shapes import OpenStore, Start, spoken

from perdure import Agent, Engine, tool
from perdure.errors import StoreError
from perdure.journal.envelope import check_chain
from perdure.stores.verify import verify
from perdure.testing.conformance import begun, read
from perdure.testing.scripted import ScriptedModel, calls, text

PROCESSES = 8


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


async def eight_runs(start: Start, path: Path) -> None:
    """Eight processes open a store that is not there, at the same moment, each for a run of its own."""
    names = [f"run-{number}" for number in range(PROCESSES)]
    processes = [start("errand", path, name) for name in names]
    assert {line(process) for process in processes} == {"ready"}
    for process in processes:
        go(process)
    assert [spoken(process) for process in processes] == [["completed ended"]] * PROCESSES
    assert [process.returncode for process in processes] == [0] * PROCESSES
    assert sorted(Path(f"{path}.effects").read_text().splitlines()) == names
    report = await verify(path)
    assert (report.ok, report.runs, report.torn) == (True, PROCESSES, 0)


async def test_eight_processes_may_make_one_store_and_run_in_it_at_the_same_moment(start: Start, path: Path) -> None:
    """H08. One round; more of them below."""
    await eight_runs(start, path)


@pytest.mark.slow
async def test_eight_processes_may_do_so_again_and_again(start: Start, tmp_path: Path) -> None:
    """H08."""
    for number in range(5):
        await eight_runs(start, tmp_path / f"{number}.db")


@pytest.mark.soak
async def test_eight_processes_may_do_so_fifty_times(start: Start, tmp_path: Path) -> None:
    """H08."""
    for number in range(50):
        await eight_runs(start, tmp_path / f"{number}.db")


@pytest.mark.parametrize("error", ["constraint", "defect"])
async def test_an_error_inside_a_write_leaves_nothing_of_it_and_holds_no_other_process_up(
    open_store: OpenStore, start: Start, path: Path, error: str
) -> None:
    """H08. The failing process lives on; of the two errors the second stops its store."""
    failing = start("fail-inside-a-write", path, error)
    assert line(failing) == "store_error"
    store = await open_store()
    chain, lease = await asyncio.wait_for(begun(store), 5)
    for _ in range(5):
        await asyncio.wait_for(store.append(lease, chain.next(2), None), 5)
    assert failing.poll() is None
    assert (await read(store, "run-1")).envelopes == tuple(chain.sealed)
    assert await store._submit(lambda c: c.execute("select 1 from driver where driver_id = 'half'").get) is None
    go(failing)
    assert failing.wait(30) == 0


@pytest.mark.slow
async def test_a_read_that_stays_open_holds_no_writer_up_and_the_log_shrinks_once_it_ends(
    open_store: OpenStore, start: Start, path: Path
) -> None:
    """H08. For ten seconds nothing that was written after the read began can leave the log."""
    store = await open_store()
    chain, lease = await begun(store)
    reading = start("read-on", path)
    assert line(reading) == "2"
    until, longest = time.monotonic() + 10, 0.0
    while time.monotonic() < until:
        began = time.monotonic()
        await store.append(lease, chain.next(20), None)
        longest = max(longest, time.monotonic() - began)
    assert longest < 5
    grown = frames(path)
    assert grown > 1_000  # checkpoints were due, and came
    assert reading.poll() is None
    go(reading)
    assert spoken(reading) == ["2"]
    for _ in range(1_000):
        await store.append(lease, chain.next(20), None)
        if frames(path) < grown:
            break
    else:
        raise AssertionError("the log never began anew")
    check_chain("run-1", (await read(store, "run-1")).envelopes)
    assert len((await read(store, "run-1")).envelopes) == len(chain.sealed)


def frames(path: Path) -> int:
    """Of the log, as it is in use."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    connection.pragma("user_version")
    count, _ = connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
    connection.close()
    return count


def acting(before: Callable[[], Any]) -> tuple[Agent, ScriptedModel, list[str]]:
    """An agent whose one tool notes that it ran, and a model that calls it after `before`."""
    ran: list[str] = []

    @tool(effect="write")
    async def act() -> str:
        """Acts."""
        ran.append("act")
        return "done"

    def reply(request: Any) -> Any:
        before()
        return [calls(("act", {})), text("ended")][request.transcript.turns]

    return Agent(name="actor", tools=[act]), ScriptedModel(reply), ran


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before the run", "before the tool"])
async def test_a_lock_that_does_not_clear_is_a_clear_error_before_any_tool_acts(
    start: Start, path: Path, moment: str
) -> None:
    """H08. The other process holds the file's lock until it is killed; then the run goes on where it was."""
    holders: list[subprocess.Popen[str]] = []

    def lock() -> None:
        if not holders:
            holders.append(start("keep-the-lock", path))
            assert line(holders[0]) == "locked"

    agent, model, ran = acting(lock)
    async with Engine.open(f"sqlite:{path}") as engine:
        if moment == "before the run":
            lock()
        began = time.monotonic()
        with pytest.raises(StoreError, match="locked: another process held its lock") as refused:
            await (await engine.start(agent, "go", run_id="R", model=model)).wait()
        assert 9 < time.monotonic() - began < 60
        assert "end that process" in refused.value.next
        assert ran == []
        assert len(model.requests) == (moment == "before the tool")
        holders[0].kill()
        holders[0].wait()
        run = await (
            engine.start(agent, "go", run_id="R", model=model)
            if moment == "before the run"
            else engine.resume("R", agent, model=model)
        )
        assert (await run.wait()).output == "ended"
        assert ran == ["act"]
