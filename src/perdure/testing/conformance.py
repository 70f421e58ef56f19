"""What every store must do, as checks over the port alone: one suite for each kind of store."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from perdure.errors import LeaseHeldError, LeaseLostError, PerdureError, StoreError, UnknownError, UsageError
from perdure.journal.envelope import FIRST_PREVIOUS, SALT_BYTES, Envelope, check_chain, seal
from perdure.ports import IndexRow, Lease, Store, StoredRun

OpenStore = Callable[[], Awaitable[Store]]
"""Opens one more store, a driver of its own, over the same data."""

Check = Callable[[OpenStore], Awaitable[None]]

KEY = bytes(range(32))
OPEN = IndexRow("agent", "open", None, None, None)
PARKED = IndexRow("agent", "parked", None, "sleeping", 1_700_000_000_000_000_000)
ENDED = IndexRow("agent", "completed", "final", None, None)


class Chain:
    """Seals events of one run, one after the other."""

    def __init__(self, run_id: str, started_at: int = 1_700_000_000_000_000_000) -> None:
        self.run_id, self._at = run_id, started_at
        self._previous = FIRST_PREVIOUS
        self.sealed: list[Envelope] = []

    def next(self, count: int = 1) -> list[Envelope]:
        """The next events."""
        made = []
        for _ in range(count):
            seq = len(self.sealed)
            payload = b'{"text":"\xc3\xa9vent %d","nothing":null}' % seq
            salt = bytes([seq % 256]) * SALT_BYTES
            event = seal(
                self._previous, self.run_id, seq, f"kind_{seq % 3}", self._at + seq, seq * 1_000, salt, payload
            )
            self._previous = event.digest
            self.sealed.append(event)
            made.append(event)
        return made


@contextmanager
def refused(*errors: type[PerdureError]) -> Iterator[None]:
    """The block must raise one of the errors."""
    try:
        yield
    except errors:
        return
    raise AssertionError(f"nothing was refused, expected {' or '.join(error.__name__ for error in errors)}")


async def read(store: Store, run_id: str, from_seq: int = 0) -> StoredRun:
    """The run, which must be there."""
    stored = await store.read(run_id, from_seq)
    assert stored is not None, f"run {run_id} is not there"
    return stored


async def begun(store: Store, run_id: str = "run-1", count: int = 2) -> tuple[Chain, Lease]:
    """A new run with its first events, held by the store."""
    chain = Chain(run_id)
    return chain, await store.create(run_id, KEY, chain.next(count), OPEN)


async def _a_new_run_reads_back_from_every_store(open_store: OpenStore) -> None:
    one, two = await open_store(), await open_store()
    chain, lease = await begun(one)
    assert (lease.run_id, lease.previous_alive) == ("run-1", False)
    for store in (one, two):
        stored = await read(store, "run-1")
        assert (stored.run_id, stored.key, stored.envelopes, stored.torn) == ("run-1", KEY, tuple(chain.sealed), 0)


async def _all_stores_over_the_same_data_have_one_identity(open_store: OpenStore) -> None:
    one, two = await open_store(), await open_store()
    assert one.identity == two.identity != ""


async def _an_unknown_run_reads_as_nothing_and_cannot_be_acquired(open_store: OpenStore) -> None:
    store = await open_store()
    assert await store.read("nobody") is None
    with refused(UnknownError):
        await store.acquire("nobody")
    with refused(UnknownError):
        await store.put_artifact("nobody", b"x")
    assert await store.runs() == []


async def _a_taken_run_id_is_refused_and_the_run_stays_as_it_was(open_store: OpenStore) -> None:
    one, two = await open_store(), await open_store()
    chain, _ = await begun(one)
    for store in (one, two):
        with refused(UsageError):
            await store.create("run-1", bytes(32), Chain("run-1").next(5), ENDED)
    assert (await read(two, "run-1")).envelopes == tuple(chain.sealed)
    assert (await two.runs())[0].index == OPEN


async def _appended_events_read_back_byte_for_byte_from_any_seq(open_store: OpenStore) -> None:
    store = await open_store()
    chain, lease = await begun(store)
    for count in (1, 3, 2):
        await store.append(lease, chain.next(count), None)
    for from_seq in range(len(chain.sealed) + 2):
        stored = await read(store, "run-1", from_seq)
        assert stored.envelopes == tuple(chain.sealed[from_seq:])
        for most in (1, 3, 1000):
            some = await store.read("run-1", from_seq, most)
            assert some is not None
            assert some.envelopes == tuple(chain.sealed[from_seq : from_seq + most])
    assert check_chain("run-1", (await read(store, "run-1")).envelopes) == chain.sealed[-1].digest


async def _events_without_payload_read_back(open_store: OpenStore) -> None:
    store = await open_store()
    chain = Chain("run-1")
    (first,) = chain.next()
    erased = msgspec.structs.replace(first, salt=None, payload=None)
    await store.create("run-1", KEY, [erased], OPEN)
    assert (await read(store, "run-1")).envelopes == (erased,)


async def _pieces_queued_without_waiting_are_stored_in_order(open_store: OpenStore) -> None:
    store = await open_store()
    chain, lease = await begun(store)
    await asyncio.gather(*[store.append(lease, chain.next(2), None) for _ in range(20)])
    assert (await read(store, "run-1")).envelopes == tuple(chain.sealed)


async def _a_durable_piece_is_there_for_another_store(open_store: OpenStore) -> None:
    one, two = await open_store(), await open_store()
    chain, lease = await begun(one)
    for _ in range(5):
        await one.append(lease, chain.next(2), None)
        assert (await read(two, "run-1")).envelopes == tuple(chain.sealed)


async def _events_that_do_not_follow_are_refused_whole(open_store: OpenStore) -> None:
    store = await open_store()
    chain, lease = await begun(store)
    stored = tuple(chain.sealed)
    third, fourth, fifth, sixth = chain.next(4)
    for piece in ([fourth, fifth], [third, fifth], [third, third], [stored[1], third], [third, fifth, fourth, sixth]):
        with refused(StoreError):
            await store.append(lease, piece, ENDED)
        assert (await read(store, "run-1")).envelopes == stored
    assert (await store.runs())[0].index == OPEN
    await store.append(lease, [third, fourth, fifth, sixth], None)
    assert (await read(store, "run-1")).envelopes == tuple(chain.sealed)


async def _events_of_another_run_are_refused(open_store: OpenStore) -> None:
    store = await open_store()
    chain, lease = await begun(store)
    other = Chain("run-2")
    other.next(2)
    with refused(StoreError):
        await store.append(lease, other.next(), None)
    with refused(StoreError):
        await store.create("run-3", KEY, Chain("run-4").next(), OPEN)
    with refused(StoreError):
        await store.create("run-3", KEY, [], OPEN)
    assert (await read(store, "run-1")).envelopes == tuple(chain.sealed)
    assert await store.read("run-3") is None


async def _a_refused_piece_fails_alone(open_store: OpenStore) -> None:
    store = await open_store()
    runs = [await begun(store, f"run-{number}") for number in range(6)]
    bad_chain = runs[3][0]
    bad_chain.next()
    bad_run = asyncio.ensure_future(store.create("run-7", KEY, Chain("run-8").next(), OPEN))
    pieces = [store.append(lease, chain.next(2), None) for chain, lease in runs]
    *done, created = await asyncio.gather(*pieces, bad_run, return_exceptions=True)
    assert [isinstance(result, StoreError) for result in done] == [chain is bad_chain for chain, _ in runs]
    assert isinstance(created, StoreError)
    assert await store.read("run-7") is None
    for chain, lease in runs:
        expected = chain.sealed[:2] if chain is bad_chain else chain.sealed
        assert (await read(store, lease.run_id)).envelopes == tuple(expected)


async def _the_list_shows_every_run_by_its_start(open_store: OpenStore) -> None:
    one, two = await open_store(), await open_store()
    late, early = Chain("late", 2_000), Chain("early", 1_000)
    late_lease = await one.create("late", KEY, late.next(3), OPEN)
    early_lease = await one.create("early", KEY, early.next(2), OPEN)
    await one.append(early_lease, early.next(), PARKED)
    await one.append(late_lease, late.next(), ENDED)
    await one.append(late_lease, late.next(), None)
    await one.release(late_lease)
    for store in (one, two):
        shown = await store.runs()
        assert [(run.run_id, run.index, run.events, run.held) for run in shown] == [
            ("early", PARKED, 3, True),
            ("late", ENDED, 5, False),
        ]
        assert [(run.started_at, run.updated_at, run.epoch) for run in shown] == [(1_000, 1_002, 1), (2_000, 2_004, 1)]


async def _an_index_row_alone_can_be_stored(open_store: OpenStore) -> None:
    store = await open_store()
    _, lease = await begun(store)
    await store.append(lease, [], PARKED)
    assert (await store.runs())[0].index == PARKED


async def _a_run_that_a_living_driver_holds_is_refused_to_all_others(open_store: OpenStore) -> None:
    one, two = await open_store(), await open_store()
    chain, lease = await begun(one)
    for store in (one, two):
        with refused(LeaseHeldError):
            await store.acquire("run-1")
    await one.append(lease, chain.next(), None)
    await one.confirm(lease)


async def _a_run_given_back_is_taken_under_a_later_epoch(open_store: OpenStore) -> None:
    one, two = await open_store(), await open_store()
    chain, first = await begun(one)
    await one.release(first)
    second = await two.acquire("run-1")
    assert (second.epoch > first.epoch, second.previous_alive) == (True, False)
    await two.append(second, chain.next(), None)
    await two.release(second)
    third = await one.acquire("run-1")
    assert third.epoch > second.epoch
    assert [run.epoch for run in await one.runs()] == [third.epoch]
    await one.append(third, chain.next(), None)
    assert (await read(two, "run-1")).envelopes == tuple(chain.sealed)


async def _a_stale_lease_appends_nothing_and_confirms_nothing(open_store: OpenStore) -> None:
    one, two = await open_store(), await open_store()
    chain, stale = await begun(one)
    await one.release(stale)
    lease = await two.acquire("run-1")
    piece = chain.next(2)
    with refused(LeaseLostError):
        await one.append(stale, piece, ENDED)
    with refused(LeaseLostError):
        await one.confirm(stale)
    assert len((await read(one, "run-1")).envelopes) == 2
    assert (await one.runs())[0].index == OPEN
    await one.release(stale)
    await two.confirm(lease)
    await two.append(lease, piece, None)


async def _giving_back_twice_is_harmless(open_store: OpenStore) -> None:
    one, two = await open_store(), await open_store()
    _, lease = await begun(one)
    await one.release(lease)
    await one.release(lease)
    other = await two.acquire("run-1")
    await one.release(lease)
    await two.confirm(other)
    with refused(LeaseHeldError):
        await one.acquire("run-1")


async def _closing_gives_every_lease_back(open_store: OpenStore) -> None:
    one, two = await open_store(), await open_store()
    for number in range(3):
        await begun(one, f"run-{number}")
    await one.close()
    await one.close()
    assert not any(run.held for run in await two.runs())
    for number in range(3):
        assert not (await two.acquire(f"run-{number}")).previous_alive


async def _one_of_many_contenders_gets_the_run(open_store: OpenStore) -> None:
    first = await open_store()
    _, lease = await begun(first)
    stores = [await open_store() for _ in range(4)]
    await first.release(lease)
    taken = await asyncio.gather(*[store.acquire("run-1") for store in stores], return_exceptions=True)
    assert [type(result) for result in taken].count(Lease) == 1
    assert all(isinstance(result, Lease | LeaseHeldError) for result in taken)


async def _artifacts_are_kept_once_per_run_and_read_back(open_store: OpenStore) -> None:
    one, two = await open_store(), await open_store()
    await begun(one, "run-1")
    await begun(one, "run-2")
    data = bytes(range(256)) * 300
    digest = await one.put_artifact("run-1", data)
    assert await one.put_artifact("run-1", data) == digest
    assert await two.get_artifact("run-1", digest) == data
    assert await two.get_artifact("run-2", digest) is None
    assert await two.get_artifact("nobody", digest) is None
    assert await one.put_artifact("run-2", b"") != digest


async def _a_reader_sees_whole_pieces_only(open_store: OpenStore) -> None:
    one, two = await open_store(), await open_store()
    chain, lease = await begun(one)
    writing = asyncio.gather(*[one.append(lease, chain.next(5), None) for _ in range(30)])
    while not writing.done():
        assert len((await read(two, "run-1")).envelopes) % 5 == 2
    await writing


async def _many_runs_at_once_lose_nothing(open_store: OpenStore) -> None:
    stores = [await open_store() for _ in range(2)]

    async def drive(store: Store, run_id: str) -> Chain:
        chain, lease = await begun(store, run_id)
        for _ in range(5):
            await store.append(lease, chain.next(2), None)
        await store.release(lease)
        return chain

    drives = [drive(store, f"run-{place}-{number}") for place, store in enumerate(stores) for number in range(20)]
    for chain in await asyncio.gather(*drives):
        assert (await read(stores[0], chain.run_id)).envelopes == tuple(chain.sealed)
    assert len(await stores[1].runs()) == len(drives)


CHECKS: Sequence[Check] = (
    _a_new_run_reads_back_from_every_store,
    _all_stores_over_the_same_data_have_one_identity,
    _an_unknown_run_reads_as_nothing_and_cannot_be_acquired,
    _a_taken_run_id_is_refused_and_the_run_stays_as_it_was,
    _appended_events_read_back_byte_for_byte_from_any_seq,
    _events_without_payload_read_back,
    _pieces_queued_without_waiting_are_stored_in_order,
    _a_durable_piece_is_there_for_another_store,
    _events_that_do_not_follow_are_refused_whole,
    _events_of_another_run_are_refused,
    _a_refused_piece_fails_alone,
    _the_list_shows_every_run_by_its_start,
    _an_index_row_alone_can_be_stored,
    _a_run_that_a_living_driver_holds_is_refused_to_all_others,
    _a_run_given_back_is_taken_under_a_later_epoch,
    _a_stale_lease_appends_nothing_and_confirms_nothing,
    _giving_back_twice_is_harmless,
    _closing_gives_every_lease_back,
    _one_of_many_contenders_gets_the_run,
    _artifacts_are_kept_once_per_run_and_read_back,
    _a_reader_sees_whole_pieces_only,
    _many_runs_at_once_lose_nothing,
)


def claim_of(check: Check) -> str:
    """What the check claims, as a sentence."""
    return check.__name__.strip("_").replace("_", " ")


async def store_conformance(fresh: Callable[[], OpenStore], checks: Sequence[Check] = CHECKS) -> None:
    """Runs every check, each over data of its own: `fresh` gives a way to open stores over new, empty data.

    Raises:
        AssertionError: a store does otherwise than the port says.
    """
    for check in checks:
        stores: list[Store] = []
        open_inner = fresh()

        async def open_store(stores: list[Store] = stores, open_inner: OpenStore = open_inner) -> Store:
            stores.append(await open_inner())
            return stores[-1]

        try:
            await check(open_store)
        except AssertionError as error:
            raise AssertionError(f"{claim_of(check)}: {error}") from error
        finally:
            for store in stores:
                await store.close()
