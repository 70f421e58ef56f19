"""Wrappers that keep the marks of a driver: a store, a model and tools that do what they stand before, and say so on
the page."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from perdure.calls import CallContext
from perdure.contracts.contract import JsonObject
from perdure.journal.envelope import Envelope
from perdure.ports import BoundCall, IndexRow, Lease, ModelClient, ModelEvent, Store, Tool
from perdure.prompting.request import ModelRequest
from perdure.testing.killing.marks import Marks


class MarkedStore:
    """Marks commits, and how many events are known to be durable; else the store it stands before."""

    def __init__(self, store: Store, marks: Marks) -> None:
        self._store, self._marks = store, marks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def create(self, run_id: str, key: bytes, envelopes: Sequence[Envelope], index: IndexRow) -> Lease:
        """As `Store.create`."""
        self._marks.committing(1)
        try:
            lease = await self._store.create(run_id, key, envelopes, index)
        finally:
            self._marks.committing(-1)
        self._marks.durable = len(envelopes)
        return lease

    async def acquire(self, run_id: str) -> Lease:
        """As `Store.acquire`."""
        self._marks.committing(1)
        try:
            lease = await self._store.acquire(run_id)
        finally:
            self._marks.committing(-1)
        return lease

    def append(self, lease: Lease, envelopes: Sequence[Envelope], index: IndexRow | None) -> "asyncio.Future[None]":
        """As `Store.append`."""
        self._marks.committing(1)
        stored = self._store.append(lease, envelopes, index)
        last, ends = envelopes[-1].seq, index is not None and index.phase not in ("open", "parked")

        def settled(future: "asyncio.Future[None]") -> None:
            self._marks.committing(-1)
            if not future.cancelled() and future.exception() is None:
                self._marks.durable = last + 1
                if ends:
                    self._marks.live = False

        stored.add_done_callback(settled)
        return stored


class MarkedModel:
    """Marks the calls of a model."""

    def __init__(self, model: ModelClient, marks: Marks, asked: Callable[[int], None]) -> None:
        """`asked` is told the number of assistant turns in each request."""
        self._model, self._marks, self._asked = model, marks, asked

    @property
    def target(self) -> str:
        """As `ModelClient.target`."""
        return self._model.target

    @property
    def strict(self) -> bool:
        """As `ModelClient.strict`."""
        return self._model.strict

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """As `ModelClient.stream`."""
        self._asked(request.transcript.turns)
        self._marks.in_model(1)
        try:
            async for event in self._model.stream(request):
                yield event
        finally:
            self._marks.in_model(-1)

    async def close(self) -> None:
        """As `ModelClient.close`."""
        await self._model.close()


class ToolWatch(Protocol):
    """Is told when a tool's function runs."""

    def began(self, tool: str, call: CallContext) -> None:
        """It is about to run."""

    def ended(self, tool: str, call: CallContext, value: object, error: BaseException | None) -> None:
        """It has returned a value, or raised."""


class WatchedTool:
    """A tool whose function is watched."""

    def __init__(self, tool: Tool, watch: ToolWatch) -> None:
        self._tool, self._watch = tool, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tool, name)

    def bind(self, arguments: JsonObject) -> BoundCall:
        """As `Tool.bind`."""
        bound, name = self._tool.bind(arguments), self._tool.descriptor.name

        async def watched(call: CallContext) -> object:
            self._watch.began(name, call)
            try:
                value = await bound(call)
            except BaseException as error:
                self._watch.ended(name, call, None, error)
                raise
            self._watch.ended(name, call, value, None)
            return value

        return watched


class MarkedEffects:
    """A watch that marks the runs of functions."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    def began(self, tool: str, call: CallContext) -> None:
        """As `ToolWatch.began`."""
        self._marks.in_effect(1)

    def ended(self, tool: str, call: CallContext, value: object, error: BaseException | None) -> None:
        """As `ToolWatch.ended`."""
        self._marks.in_effect(-1)
