"""A store that dies: crash sweeps cut a run after each of its events."""

import asyncio
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from perdure.errors import PerdureError, StoreError
from perdure.journal.envelope import Envelope
from perdure.ports import IndexRow, Lease, RunSummary, Store, StoredRun


class StoreCrashedError(StoreError):
    """The process this store belongs to counts as dead."""


@runtime_checkable
class Abandonable(Protocol):
    """A store that can end as a killed process does."""

    async def abandon(self) -> None:
        """Ends without giving any lease back."""


class CrashingStore:
    """Passes everything on until `after` events were stored through it, counted over all runs; then it is dead.

    The piece that reaches the count is cut there: what lies before the cut is stored, what lies behind it is not, and
    whoever waits for the piece never learns that any of it is durable. From then on nothing reaches the inner store
    and every call fails with StoreCrashedError. With `after` zero not even the first event is stored.
    """

    def __init__(self, inner: Store, after: int) -> None:
        self._inner, self._room = inner, after
        self._last: asyncio.Future[None] | None = None
        self.crashed = False

    @property
    def identity(self) -> str:
        """Not the inner store's: what dies with this store stands for another process than the one that goes on."""
        return f"crashing {id(self)} over {self._inner.identity}"

    async def create(self, run_id: str, key: bytes, envelopes: Sequence[Envelope], index: IndexRow) -> Lease:
        """See `Store.create`."""
        self._require_alive()
        kept = self._take(envelopes)
        if not kept:
            raise _dead()
        lease = await self._inner.create(run_id, key, kept, index)
        self._require_alive()
        return lease

    def append(self, lease: Lease, envelopes: Sequence[Envelope], index: IndexRow | None) -> "asyncio.Future[None]":
        """See `Store.append`."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.crashed:
            answer.set_exception(_dead())
            return answer
        kept = self._take(envelopes)
        if not self.crashed:
            return self._inner.append(lease, kept, index)
        # A row that tells of events behind the cut must not be stored before them.
        self._last = self._inner.append(lease, kept, index if len(kept) == len(envelopes) else None)
        self._last.add_done_callback(lambda stored: _answer(answer, stored))
        return answer

    async def acquire(self, run_id: str) -> Lease:
        """See `Store.acquire`."""
        self._require_alive()
        return await self._inner.acquire(run_id)

    async def release(self, lease: Lease) -> None:
        """See `Store.release`."""
        self._require_alive()
        await self._inner.release(lease)

    async def confirm(self, lease: Lease) -> None:
        """See `Store.confirm`."""
        self._require_alive()
        await self._inner.confirm(lease)

    async def read(self, run_id: str, from_seq: int = 0, most: int | None = None) -> StoredRun | None:
        """See `Store.read`."""
        self._require_alive()
        return await self._inner.read(run_id, from_seq, most)

    async def runs(
        self, run_id: str | None = None, *, problems: dict[str, PerdureError] | None = None
    ) -> list[RunSummary]:
        """See `Store.runs`."""
        self._require_alive()
        return await self._inner.runs(run_id, problems=problems)

    async def put_artifact(self, run_id: str, data: bytes) -> str:
        """See `Store.put_artifact`."""
        self._require_alive()
        return await self._inner.put_artifact(run_id, data)

    async def get_artifact(self, run_id: str, digest: str) -> bytes | None:
        """See `Store.get_artifact`."""
        self._require_alive()
        return await self._inner.get_artifact(run_id, digest)

    async def close(self) -> None:
        """Closes the inner store; after the crash it ends as a killed process does, where it can."""
        if self._last is not None:
            await asyncio.wait([self._last])
        if self.crashed and isinstance(self._inner, Abandonable):
            await self._inner.abandon()
        else:
            await self._inner.close()

    def _take(self, envelopes: Sequence[Envelope]) -> Sequence[Envelope]:
        kept = envelopes[: self._room]
        self._room -= len(kept)
        self.crashed = self._room == 0
        return kept

    def _require_alive(self) -> None:
        if self.crashed:
            raise _dead()


def _answer(answer: "asyncio.Future[None]", stored: "asyncio.Future[None]") -> None:
    if not answer.done():
        failed = None if stored.cancelled() else stored.exception()
        answer.set_exception(failed or _dead())


def _dead() -> StoreCrashedError:
    return StoreCrashedError("the store crashed where the test wanted it to", next="open the store anew and resume")
