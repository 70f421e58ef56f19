"""The store that dies in the middle."""

from pathlib import Path

import pytest
from tests.stores.shapes import OpenStore

from perdure.errors import StoreError
from perdure.testing.conformance import ENDED, KEY, OPEN, PARKED, Chain
from perdure.testing.crashing import CrashingStore, StoreCrashedError

PIECES = (2, 1, 3, 2)
"""Events of each piece; the first is the run's creation."""


async def drive(store: CrashingStore, chain: Chain) -> int:
    """Drives a run until the store crashes; returns how many events were confirmed."""
    confirmed = 0
    try:
        lease = await store.create("run-1", KEY, chain.next(PIECES[0]), OPEN)
        confirmed += PIECES[0]
        for count in PIECES[1:]:
            await store.append(lease, chain.next(count), ENDED if confirmed else PARKED)
            confirmed += count
    except StoreCrashedError:
        assert store.crashed
    return confirmed


@pytest.mark.parametrize("cut", range(sum(PIECES) + 2))
async def test_exactly_the_events_before_the_cut_are_stored_and_none_of_the_cut_piece_is_confirmed(
    open_store: OpenStore, cut: int
) -> None:
    """O17."""
    crashing, chain = CrashingStore(await open_store(), cut), Chain("run-1")
    confirmed = await drive(crashing, chain)
    whole = [sum(PIECES[:count]) for count in range(len(PIECES) + 1)]
    assert confirmed == max(total for total in whole if total < cut or total == 0)
    await crashing.close()
    after = await open_store()
    stored = await after.read("run-1")
    assert (() if stored is None else stored.envelopes) == tuple(chain.sealed[:cut])
    if 0 < cut <= sum(PIECES):
        assert not (await after.acquire("run-1")).previous_alive


async def test_a_dead_store_answers_nothing(open_store: OpenStore) -> None:
    inner = await open_store()
    crashing, chain = CrashingStore(inner, 3), Chain("run-1")
    lease = await crashing.create("run-1", KEY, chain.next(2), OPEN)
    await crashing.confirm(lease)
    with pytest.raises(StoreCrashedError):
        await crashing.append(lease, chain.next(2), ENDED)
    with pytest.raises(StoreCrashedError):
        await crashing.append(lease, chain.next(1), ENDED)
    for call in (
        crashing.confirm(lease),
        crashing.release(lease),
        crashing.read("run-1"),
        crashing.runs(),
        crashing.acquire("run-1"),
        crashing.put_artifact("run-1", b""),
        crashing.get_artifact("run-1", ""),
        crashing.create("run-2", KEY, Chain("run-2").next(), OPEN),
    ):
        with pytest.raises(StoreCrashedError):
            await call
    assert [(run.events, run.index, run.held) for run in await inner.runs()] == [(3, OPEN, True)]


async def test_a_crash_leaves_the_lease_as_a_killed_process_does(open_store: OpenStore, path: Path) -> None:
    crashing, chain = CrashingStore(await open_store(), 2), Chain("run-1")
    with pytest.raises(StoreError):
        await crashing.create("run-1", KEY, chain.next(2), OPEN)
    other = await open_store()
    assert [run.held for run in await other.runs()] == [True]
    await crashing.close()
    await crashing.close()
    assert [(run.held, run.epoch) for run in await other.runs()] == [(False, 1)]
    assert (await other.acquire("run-1")).epoch == 2
