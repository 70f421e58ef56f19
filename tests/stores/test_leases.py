"""Who drives a run: living, killed and stopped holders, in processes of their own."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import apsw
import pytest
from tests.stores.shapes import OpenStore, Start

from perdure.clock import SystemClock
from perdure.errors import LeaseHeldError, LeaseLostError
from perdure.ports import Lease
from perdure.stores.driver_lock import DriverLock, driver_is_dead
from perdure.stores.leases import Holder
from perdure.stores.sqlite import SqliteStore
from perdure.testing.clocks import ManualClock
from perdure.testing.conformance import KEY, OPEN, PARKED, Chain, begun


class LateClock(SystemClock):
    """A wall clock that is a day ahead, so that every heartbeat looks old; the steady clock is right."""

    def now_ns(self) -> int:
        return super().now_ns() + 86_400 * 10**9


class SkewedClock(ManualClock):
    """The steady time of another clock, and a wall clock of its own. Who sleeps lets something happen first."""

    def __init__(self, shared: ManualClock) -> None:
        super().__init__()
        self._shared = shared
        self.meanwhile: Callable[[], Awaitable[object]] = _nothing

    def steady_ns(self) -> int:
        return self._shared.steady_ns()

    async def sleep(self, seconds: float) -> None:
        self._shared.advance(seconds)
        await self.meanwhile()


async def _nothing() -> None:
    """What happens meanwhile, unless a test says more."""


JUMPS = pytest.mark.parametrize("hours", [12, -1])


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def stop(process: "subprocess.Popen[str]", path: Path) -> None:
    """Stops the process, but not in the middle of a commit: there it would keep the file's own lock, from everybody."""
    probe = apsw.Connection(str(path))
    while True:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        try:
            probe.execute("begin immediate; rollback")
            break
        except apsw.BusyError:
            process.send_signal(signal.SIGCONT)
            time.sleep(0.003)
    probe.close()


async def events(store: SqliteStore, run_id: str) -> int:
    stored = await store.read(run_id)
    assert stored is not None
    return len(stored.envelopes)


async def test_the_run_of_a_killed_holder_is_taken_over_at_once(
    open_store: OpenStore, start: Start, path: Path
) -> None:
    """H05, O17."""
    holder = start("hold", path, 10)
    assert line(holder) == "held"
    store = await open_store()
    with pytest.raises(LeaseHeldError, match="another driver holds it"):
        await store.acquire("held")
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    began = time.monotonic()
    lease = await store.acquire("held")
    assert (lease.epoch, lease.previous_alive) == (2, False)
    assert time.monotonic() - began < 1


async def test_a_contender_of_a_living_holder_is_refused_at_once(
    open_store: OpenStore, start: Start, path: Path
) -> None:
    """H05."""
    assert line(start("hold", path, 10)) == "held"
    store = await open_store()
    began = time.monotonic()
    with pytest.raises(LeaseHeldError):
        await store.acquire("held")
    assert time.monotonic() - began < 1


async def test_a_heartbeat_that_moves_keeps_the_run_though_the_wall_clock_says_it_is_old(
    open_store: OpenStore, start: Start, path: Path
) -> None:
    """H05."""
    assert line(start("hold", path, 1)) == "held"
    store = await open_store(LateClock(), 1)
    began = time.monotonic()
    with pytest.raises(LeaseHeldError):
        await store.acquire("held")
    assert 0.02 < time.monotonic() - began < 1


async def test_a_stopped_holder_is_outlasted_and_can_append_nothing_once_it_wakes(
    open_store: OpenStore, start: Start, path: Path
) -> None:
    """H05."""
    holder = start("hold", path, 1)
    assert line(holder) == "held"
    stop(holder, path)
    store = await open_store(None, 1)
    with pytest.raises(LeaseHeldError):
        await store.acquire("held")  # it beat a moment ago
    await asyncio.sleep(1)
    began = time.monotonic()
    lease = await store.acquire("held")
    assert lease.previous_alive
    assert time.monotonic() - began >= 1
    before = await events(store, "held")
    holder.send_signal(signal.SIGCONT)
    assert line(holder).split()[0] == "LeaseLostError"
    assert await events(store, "held") == before
    await store.confirm(lease)


async def test_a_driver_that_was_outlasted_counts_as_possibly_alive_whoever_held_the_run_since(
    open_store: OpenStore, start: Start, path: Path
) -> None:
    """H05."""
    holder = start("hold", path, 0.4)
    assert line(holder) == "held"
    stop(holder, path)
    second, third = await open_store(LateClock(), 0.4), await open_store()
    assert (await second.acquire("held")).previous_alive
    await second.close()
    lease = await third.acquire("held")
    assert lease.previous_alive
    await third.release(lease)
    holder.kill()
    holder.wait()
    assert not (await third.acquire("held")).previous_alive


async def test_of_two_processes_that_resume_at_once_one_gets_the_run_and_the_other_ends_at_once(
    open_store: OpenStore, start: Start, path: Path
) -> None:
    """H05."""
    store = await open_store()
    for number in range(2):
        run_id = f"run-{number}"
        _, lease = await begun(store, run_id)
        await store.release(lease)
        contenders = [start("contend", path, run_id) for _ in range(2)]
        assert [line(one) for one in contenders] == ["ready", "ready"]
        for one in contenders:
            assert one.stdin is not None
            one.stdin.write("\n")
            one.stdin.flush()
        lost, took = sorted(line(one).split() for one in contenders)
        assert (lost[0], took[0]) == ("LeaseHeldError", "took")
        assert float(lost[1]) < 1


async def test_a_process_that_ends_without_closing_is_not_held_back_and_holds_nothing(
    open_store: OpenStore, start: Start, path: Path
) -> None:
    process = start("leave", path)
    assert line(process) == "leaving"
    assert process.wait(timeout=10) == 0
    store = await open_store()
    assert not (await store.acquire("left")).previous_alive


async def test_the_heartbeat_goes_on_while_nothing_is_appended(open_store: OpenStore) -> None:
    one, two = await open_store(None, 0.4), await open_store(LateClock(), 0.4)
    _, lease = await begun(one)
    await asyncio.sleep(1)
    with pytest.raises(LeaseHeldError):
        await two.acquire("run-1")
    await one.confirm(lease)


async def test_confirming_costs_nothing_while_the_lease_is_fresh_and_renews_it_after_three_quarters(
    open_store: OpenStore,
) -> None:
    """H05."""
    clock = ManualClock(passing=False)
    store = await open_store(clock, 100)
    _, lease = await begun(store)
    renewed = store._driver.renewed_ns
    clock.advance(74)
    await store.confirm(lease)
    assert store._driver.renewed_ns == renewed
    clock.advance(1)
    await store.confirm(lease)
    assert store._driver.renewed_ns == clock.steady_ns()


async def test_a_lease_that_was_outlasted_unseen_is_found_lost_at_the_next_confirmation(open_store: OpenStore) -> None:
    """H05. The holder's writer is kept from beating by a clock that stands still, as if the process were stopped."""
    standing, other_clock = ManualClock(passing=False), ManualClock()
    one, two = await open_store(standing, 100), await open_store(other_clock, 100)
    chain, lease = await begun(one)
    other_clock.jump(1_000)
    taken = await two.acquire("run-1")
    assert taken.previous_alive
    standing.advance(1_000)
    with pytest.raises(LeaseLostError):
        await one.confirm(lease)
    with pytest.raises(LeaseLostError):
        await one.append(lease, chain.next(), None)
    await two.append(taken, chain.sealed[2:], None)
    standing.jump_to(other_clock.now_ns())
    with pytest.raises(LeaseHeldError, match="another driver"):
        await one.acquire("run-1")


async def test_an_append_under_a_lease_that_was_outlasted_unseen_writes_nothing_and_fails_alone(
    open_store: OpenStore,
) -> None:
    """H05. No heartbeat comes in between: the append itself is refused."""
    other_clock = ManualClock()
    one, two = await open_store(ManualClock(passing=False), 100), await open_store(other_clock, 100)
    chain, lost = await begun(one, "lost")
    kept_chain, kept = await begun(one, "kept")
    other_clock.jump(1_000)
    taken = await two.acquire("lost")
    piece = chain.next(2)
    refused, stored = one.append(lost, piece, PARKED), one.append(kept, kept_chain.next(2), None)
    with pytest.raises(LeaseLostError):
        await refused
    await stored
    assert await events(two, "lost") == 2
    assert [run.index for run in await two.runs()] == [OPEN, OPEN]
    await two.append(taken, piece, None)


async def test_who_outlasts_a_holder_takes_over_only_from_exactly_the_one_that_stood_still(
    open_store: OpenStore,
) -> None:
    """H05. The holder comes back between the last look and the take-over."""
    clock = ManualClock(passing=False)
    one, two = await open_store(clock, 100), await open_store()
    await begun(one)
    seen = await two._take("run-1", None)
    assert isinstance(seen, Holder)
    clock.advance(50)
    await one.put_artifact("run-1", b"any write carries the heartbeat that is due")
    found = await two._take("run-1", seen)
    assert isinstance(found, Holder)
    assert found.beat > seen.beat
    assert isinstance(await two._take("run-1", found), Lease)


async def test_a_heartbeat_finds_the_leases_that_are_gone(open_store: OpenStore) -> None:
    standing, other_clock = ManualClock(passing=False), ManualClock()
    one, two = await open_store(standing, 100), await open_store(other_clock, 100)
    _, lost = await begun(one, "lost")
    _, kept = await begun(one, "kept")
    other_clock.jump(1_000)
    await two.acquire("lost")
    standing.advance(30)
    await one.put_artifact("kept", b"any write carries the heartbeat that is due")
    await one.confirm(kept)
    with pytest.raises(LeaseLostError):
        await one.confirm(lost)


@JUMPS
@pytest.mark.parametrize("who", ["the holder", "the contender", "the contender while it watches"])
async def test_no_jump_of_the_wall_clock_takes_a_run_from_a_driver_that_lives(
    open_store: OpenStore, hours: int, who: str
) -> None:
    """H28. Here the tests before this one have only a contender whose clock was always ahead."""
    shared = ManualClock()
    holding, contending = SkewedClock(shared), SkewedClock(shared)
    holder, contender = await open_store(holding, 100), await open_store(contending, 100)
    chain, lease = await begun(holder)

    async def live() -> None:
        if who == "the contender while it watches":
            contending.jump(hours * 3600)
        await holder.put_artifact("run-1", b"any write carries the heartbeat that is due")

    contending.meanwhile = live
    if who == "the contender while it watches":
        shared.advance(50)
        contending.jump(150)  # the last heartbeat looks old, so it does watch
    else:
        (holding if who == "the holder" else contending).jump(hours * 3600)
    for _ in range(3):
        with pytest.raises(LeaseHeldError):
            await contender.acquire("run-1")
        await holder.confirm(lease)
        await holder.append(lease, chain.next(), None)
        shared.advance(20)
    assert await events(contender, "run-1") == len(chain.sealed)


@JUMPS
@pytest.mark.parametrize("who", ["the holder", "the contender", "the contender while it watches"])
async def test_a_holder_that_stands_still_is_outlasted_in_exactly_the_lease_time_whatever_the_wall_clocks_say(
    open_store: OpenStore, hours: int, who: str
) -> None:
    """H28. A heartbeat from the future does not hold a run for hours, and one from long ago shortens nothing."""
    shared = ManualClock()
    holding, contending = SkewedClock(shared), SkewedClock(shared)
    if who == "the holder":
        holding.jump(hours * 3600)
    holder, contender = await open_store(holding, 100), await open_store(contending, 100)
    chain, lease = await begun(holder)
    if who == "the contender":
        contending.jump(hours * 3600)
    if who == "the contender while it watches":
        contending.jump(150)
        jumps = [hours * 3600]

        async def jump() -> None:
            contending.jump(jumps.pop() if jumps else 0)

        contending.meanwhile = jump
    began = shared.steady_ns()
    taken = await contender.acquire("run-1")
    assert taken.previous_alive
    assert 100 <= (shared.steady_ns() - began) / 1e9 < 110
    with pytest.raises(LeaseLostError):
        await holder.append(lease, chain.next(), None)


@JUMPS
async def test_a_jump_of_the_wall_clock_makes_no_lease_older_or_younger_for_its_holder(
    open_store: OpenStore, hours: int
) -> None:
    """H28."""
    clock = ManualClock(passing=False)
    store = await open_store(clock, 100)
    _, lease = await begun(store)
    renewed = store._driver.renewed_ns
    clock.advance(74)
    clock.jump(hours * 3600)
    await store.confirm(lease)
    assert store._driver.renewed_ns == renewed
    clock.advance(1)
    clock.jump(hours * 3600)
    await store.confirm(lease)
    assert store._driver.renewed_ns == clock.steady_ns()


async def test_a_cancelled_taker_leaves_the_run_free(open_store: OpenStore) -> None:
    one, two = await open_store(), await open_store()
    _, lease = await begun(one)
    await one.release(lease)
    taking = asyncio.create_task(one.acquire("run-1"))
    await asyncio.sleep(0)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    for _ in range(100):
        try:
            assert isinstance(await two.acquire("run-1"), Lease)
            break
        except LeaseHeldError:
            await asyncio.sleep(0.01)
    else:
        raise AssertionError("the run stayed held")


async def test_creating_with_a_taken_id_leaves_nothing_held(open_store: OpenStore) -> None:
    one, two = await open_store(), await open_store()
    _, lease = await begun(one)
    await one.release(lease)
    with pytest.raises(Exception, match="taken"):
        await two.create("run-1", KEY, Chain("run-1").next(), OPEN)
    assert (await two.acquire("run-1")).epoch == 2


def test_two_who_probe_a_dead_driver_at_once_both_find_it_dead(tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "dead").touch()
    prober = os.open(tmp_path / "dead", os.O_RDONLY)
    fcntl.flock(prober, fcntl.LOCK_SH)
    assert driver_is_dead(tmp_path, "dead")
    os.close(prober)
    assert driver_is_dead(tmp_path, "gone")


def test_a_new_driver_removes_the_files_of_the_dead_and_leaves_those_of_the_living(tmp_path: Path) -> None:
    living, new = DriverLock(tmp_path, "living"), DriverLock(tmp_path, "new")
    living.take()
    (tmp_path / "dead").touch()
    new.take()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["living", "new"]
    assert not driver_is_dead(tmp_path, "living")
    living.let_go(remove=False)
    assert driver_is_dead(tmp_path, "living")
    new.let_go()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["living"]
