"""A database that has the store's tables and one of the embedder's own, and the embedder's connections to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from alkstore import open_store
from tests.seam.embedders import KINDS, Embedder, Kind


@pytest.fixture
def path(tmp_path: Path) -> str:
    """The database."""
    target = str(tmp_path / "app.db")

    async def make() -> None:
        async with open_store(target, inline=True) as store:
            await store.transact(lambda tx: tx.execute("CREATE TABLE orders (total INTEGER)"))

    trio.run(make)
    return target


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def connect(kind: Kind, path: str) -> Iterator[Callable[[], Embedder]]:
    """Open a connection of the embedder's; it is closed after the test."""
    opened: list[Embedder] = []

    def open_one() -> Embedder:
        opened.append(kind.open(path))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


@pytest.fixture
def embedder(connect: Callable[[], Embedder]) -> Embedder:
    return connect()
