"""Who may append to a run: the rows that say so, and the rules by which they change hands.

Every function here that takes a connection runs inside the writer's transaction, so what it reads is what it writes
upon.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import apsw
import msgspec

from perdure.errors import LeaseHeldError, LeaseLostError, StoreError, UnknownError, UsageError
from perdure.journal.envelope import Envelope
from perdure.ports import IndexRow, Lease
from perdure.stores.schema import EVENT_COLUMNS, first_place

_APPEND = f"insert into event(rowid, {EVENT_COLUMNS}) values(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_COUNT = "update lease set events = ? where run_no = ? and epoch = ? and driver_id = ? and events = ?"
_INDEX = "update run set agent = ?, phase = ?, terminal_reason = ?, park = ?, wake_at = ? where run_no = ?"


class Held(msgspec.Struct):
    """A lease of this driver."""

    run_no: int
    epoch: int
    lost: bool = False


class Holder(msgspec.Struct, frozen=True):
    """A driver that holds a run and is not proven dead."""

    driver_id: str
    epoch: int
    beat: int
    """Counts its heartbeats."""
    beat_at: int
    """Wall time of the last one, by its own clock, in nanoseconds: a hint, never a proof."""


class Driver:
    """What one store instance holds. The writer's thread changes it, the event loop's thread reads it."""

    def __init__(self, path: Path, driver_id: str, lease_seconds: float, is_dead: Callable[[str], bool]) -> None:
        self.path, self.driver_id, self.is_dead = path, driver_id, is_dead
        self.lease_ns = int(lease_seconds * 1e9)
        self.held: dict[str, Held] = {}
        self.renewed_ns: int | None = None
        """Steady time at which the last durable heartbeat began; None before the first."""

    def fresh(self, steady_ns: int) -> bool:
        """Whether a dispatch may start: nobody can take a lease over within the lease time after a heartbeat, and the
        last quarter of it is left free."""
        return self.renewed_ns is not None and steady_ns - self.renewed_ns < self.lease_ns * 3 // 4

    def beat_due_in(self, steady_ns: int) -> float | None:
        """Seconds to the next heartbeat; None while nothing is held."""
        if not self.held:
            return None
        since = self.lease_ns if self.renewed_ns is None else steady_ns - self.renewed_ns
        # Never zero: a clock that stands still (a test's) must not make the writer spin.
        return max(self.lease_ns // 4 - since, 1_000_000) / 1e9

    def must_beat(self, steady_ns: int, renews: bool) -> bool:
        """Whether the transaction that begins now carries the heartbeat."""
        if not (self.held or renews):
            return False
        return self.renewed_ns is None or steady_ns - self.renewed_ns >= self.lease_ns // 4

    def holding(self, lease: Lease) -> Held:
        """What is held under the lease.

        Raises:
            LeaseLostError: it was lost or given back.
        """
        held = self.held.get(lease.run_id)
        if held is None or held.epoch != lease.epoch or held.lost:
            raise lost(lease)
        return held

    def give_up(self, lease: Lease) -> None:
        """Marks a lease as gone that could not be given back."""
        held = self.held.get(lease.run_id)
        if held is not None and held.epoch == lease.epoch:
            held.lost = True

    def lose(self, run_ids: Sequence[str]) -> None:
        """Marks leases as gone."""
        for run_id in run_ids:
            if run_id in self.held:
                self.held[run_id].lost = True


def create(
    connection: apsw.Connection, driver: Driver, run_id: str, key: bytes, envelopes: Sequence[Envelope], index: IndexRow
) -> Lease:
    """Stores a new run with its first events, and holds it.

    Raises:
        UsageError: the run id is taken.
    """
    if connection.execute("select run_no from run where run_id = ?", (run_id,)).get is not None:
        raise UsageError("the run id is taken", where=f"run {run_id}", next="choose another id, or resume that run")
    run_no: int = connection.execute(
        "insert into run(run_id, key, agent, phase, terminal_reason, park, wake_at) values(?, ?, ?, ?, ?, ?, ?) "
        "returning run_no",
        (run_id, key, *msgspec.structs.astuple(index)),
    ).get
    connection.execute(
        "insert into lease(run_no, epoch, driver_id, events) values(?, 1, ?, 0)", (run_no, driver.driver_id)
    )
    lease = Lease(run_id, 1)
    if not envelopes:
        raise _gap(driver, lease, "a run begins with an event, none was given")
    driver.held[run_id] = Held(run_no, 1)
    try:
        append(connection, driver, lease, envelopes, None)
    except BaseException:
        del driver.held[run_id]
        raise
    return lease


def append(
    connection: apsw.Connection, driver: Driver, lease: Lease, envelopes: Sequence[Envelope], index: IndexRow | None
) -> None:
    """Adds events to the end of a run.

    Raises:
        LeaseLostError: the lease is another's by now.
        StoreError: the events are not the ones that follow.
    """
    held = driver.holding(lease)
    if envelopes:
        first = envelopes[0].seq
        for seq, event in enumerate(envelopes, first):
            if event.seq != seq or event.run_id != lease.run_id:
                raise _gap(driver, lease, f"event {event.seq} of run {event.run_id} stands where event {seq} belongs")
        end = first + len(envelopes)
        # The epoch test and the test that the events follow what is there are one statement, on the way to the count.
        connection.execute(_COUNT, (end, held.run_no, held.epoch, driver.driver_id, first))
        if connection.changes() != 1:
            raise _not_following(connection, driver, lease, held, first)
        place = first_place(held.run_no)
        connection.executemany(_APPEND, [(place + event.seq, *msgspec.structs.astuple(event)) for event in envelopes])
    elif not _still_ours(connection, driver, held):
        raise _not_following(connection, driver, lease, held, None)
    if index is not None:
        connection.execute(_INDEX, (*msgspec.structs.astuple(index), held.run_no))


def _not_following(
    connection: apsw.Connection, driver: Driver, lease: Lease, held: Held, first: int | None
) -> LeaseLostError | StoreError:
    if not _still_ours(connection, driver, held):
        driver.lose([lease.run_id])
        return lost(lease)
    events = connection.execute("select events from lease where run_no = ?", (held.run_no,)).get
    return _gap(driver, lease, f"event {first} does not follow: the run has {events} events")


def _gap(driver: Driver, lease: Lease, found: str) -> StoreError:
    return StoreError(found, where=f"store {driver.path}, run {lease.run_id}", next="resume the run: it is read anew")


def beat(connection: apsw.Connection, driver: Driver, now_ns: int) -> list[str]:
    """Writes the heartbeat; returns the runs whose lease turns out to be another's by now."""
    connection.execute(
        "insert into driver(driver_id, beat, beat_at) values(?, 1, ?) "
        "on conflict(driver_id) do update set beat = beat + 1, beat_at = excluded.beat_at",
        (driver.driver_id, now_ns),
    )
    return [run_id for run_id, held in driver.held.items() if not _still_ours(connection, driver, held)]


def _still_ours(connection: apsw.Connection, driver: Driver, held: Held) -> bool:
    row = connection.execute("select epoch, driver_id from lease where run_no = ?", (held.run_no,)).get
    return bool(row == (held.epoch, driver.driver_id))


def take(connection: apsw.Connection, driver: Driver, run_id: str, stalled: Holder | None) -> Lease | Holder:
    """Takes a run that is free, whose holder is proven dead, or whose holder is still exactly `stalled`; else says
    who holds it.

    Raises:
        UnknownError: no such run.
        LeaseHeldError: this driver holds it.
    """
    found = connection.execute(
        "select run_no, epoch, driver_id from run join lease using (run_no) where run_id = ?", (run_id,)
    ).get
    if found is None:
        raise unknown_run(run_id, driver.path)
    run_no, epoch, holder_id = found
    if holder_id == driver.driver_id:
        if not driver.held[run_id].lost:
            raise held_here(run_id)
    elif holder_id is not None:
        if driver.is_dead(holder_id):
            connection.execute("delete from driver where driver_id = ?", (holder_id,))
        else:
            holder = _holder(connection, holder_id, epoch)
            if holder != stalled:
                return holder
            connection.execute("insert or ignore into outlived(run_no, driver_id) values(?, ?)", (run_no, holder_id))
    connection.execute(
        "update lease set epoch = ?, driver_id = ? where run_no = ?", (epoch + 1, driver.driver_id, run_no)
    )
    driver.held[run_id] = Held(run_no, epoch + 1)
    return Lease(run_id, epoch + 1, _any_outlived(connection, driver, run_no))


def _holder(connection: apsw.Connection, driver_id: str, epoch: int) -> Holder:
    row = connection.execute("select beat, beat_at from driver where driver_id = ?", (driver_id,)).get
    return Holder(driver_id, epoch, *(row or (0, 0)))


def _any_outlived(connection: apsw.Connection, driver: Driver, run_no: int) -> bool:
    """Whether a driver that was taken over may still be alive, however many held the run since."""
    alive = False
    for (driver_id,) in connection.execute("select driver_id from outlived where run_no = ?", (run_no,)).fetchall():
        if driver.is_dead(str(driver_id)):
            connection.execute("delete from outlived where run_no = ? and driver_id = ?", (run_no, driver_id))
        else:
            alive = True
    return alive


def release(connection: apsw.Connection, driver: Driver, lease: Lease) -> None:
    """Gives one run back; does nothing when it is not held under this lease."""
    held = driver.held.get(lease.run_id)
    if held is not None and held.epoch == lease.epoch:
        _free(connection, driver, held)
        del driver.held[lease.run_id]


def release_all(connection: apsw.Connection, driver: Driver) -> None:
    """Gives every run back, and the driver's row."""
    for held in driver.held.values():
        _free(connection, driver, held)
    driver.held.clear()
    connection.execute("delete from driver where driver_id = ?", (driver.driver_id,))


def _free(connection: apsw.Connection, driver: Driver, held: Held) -> None:
    connection.execute(
        "update lease set driver_id = null where run_no = ? and epoch = ? and driver_id = ?",
        (held.run_no, held.epoch, driver.driver_id),
    )


def put_artifact(connection: apsw.Connection, driver: Driver, run_id: str, digest: str, data: bytes) -> None:
    """Keeps bytes for a run, once per digest. Needs no lease: what is named by its content can be put by anyone.

    Raises:
        UnknownError: no such run.
    """
    run_no = connection.execute("select run_no from run where run_id = ?", (run_id,)).get
    if run_no is None:
        raise unknown_run(run_id, driver.path)
    connection.execute("insert or ignore into artifact(run_no, digest, data) values(?, ?, ?)", (run_no, digest, data))


def unknown_run(run_id: str, path: Path) -> UnknownError:
    """The error for a run that is not in the store."""
    return UnknownError(
        "there is no such run", where=f"run {run_id}, store {path}", next="`perdure list` names the runs"
    )


def lost(lease: Lease) -> LeaseLostError:
    """The error for a lease that is gone."""
    return LeaseLostError(
        f"the lease of epoch {lease.epoch} is gone: another driver took the run over, or it was given back",
        where=f"run {lease.run_id}",
        next="nothing more is recorded here; the run goes on where it was taken to, or resume it",
    )


def too_late(lease: Lease) -> LeaseLostError:
    """The error for a lease that could not be renewed within three quarters of its time."""
    return LeaseLostError(
        f"the lease of epoch {lease.epoch} could not be renewed in time",
        where=f"run {lease.run_id}",
        next="resume the run; if this happens again, the disk is too slow for the lease time",
    )


def held_here(run_id: str) -> LeaseHeldError:
    """The error for a run this very store already holds."""
    return LeaseHeldError("this process already drives it", where=f"run {run_id}", next="wait for that drive to end")


def held_elsewhere(run_id: str, holder: Holder, process: int | None) -> LeaseHeldError:
    """The error for a run that a living driver holds, in the process of that number if it is known."""
    named = "" if process is None else f"process {process}, "
    return LeaseHeldError(
        f"another driver holds it ({named}driver {holder.driver_id}, epoch {holder.epoch})",
        where=f"run {run_id}",
        next="wait until that process is done, or end it and resume",
    )
