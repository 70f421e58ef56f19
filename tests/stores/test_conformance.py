"""The store port's contract, over the SQLite store."""

from pathlib import Path

import pytest

from perdure.clock import SystemClock, SystemEntropy
from perdure.ports import Store
from perdure.stores.sqlite import SqliteStore
from perdure.testing.conformance import CHECKS, Check, OpenStore, claim_of, store_conformance


@pytest.mark.parametrize("check", CHECKS, ids=claim_of)
async def test_the_sqlite_store_does_what_the_port_says(check: Check, tmp_path: Path) -> None:
    """R-116, O1, O2, O17."""

    def fresh() -> OpenStore:
        async def open_store() -> Store:
            return await SqliteStore.open(tmp_path / "store.db", clock=SystemClock(), entropy=SystemEntropy())

        return open_store

    await store_conformance(fresh, [check])
