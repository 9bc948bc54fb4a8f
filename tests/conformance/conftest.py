"""The engines that keep the contract, and how a test opens a store on one of them. All engine knowledge is here."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from alkstore import ManualClock, Store, open_store
from tests.conformance.helpers import START, OpenStore
from tests.postgres.schemas import in_schema

SHARED: dict[str, dict[str, object]] = {
    "sqlite-inline-file": {"inline": True, "synchronous": "normal"},
    "sqlite-threads-file": {"inline": False, "synchronous": "full"},
    "postgres": {"connections": 3},
}
"""Engines whose database can be opened more than once, with the options they are opened with."""

ENGINES: dict[str, dict[str, object]] = {"sqlite-inline-memory": {"inline": True}, **SHARED}


def opener(request: pytest.FixtureRequest, folder: Path) -> OpenStore:
    """Return what opens the test's own database: the same one at each call, if it can be shared."""
    engine: str = request.param
    target = ":memory:" if engine.endswith("memory") else str(folder / "app.db")
    fixed = dict(ENGINES[engine])
    if engine == "postgres":
        fixed["schema"] = request.getfixturevalue("emptied_schema")
        target = in_schema(request.getfixturevalue("postgres_url"), str(fixed["schema"]))

    is_empty = engine == "postgres"  # but for the tables, which are there already

    def open_it(**options: object) -> object:
        nonlocal is_empty
        if is_empty and options.get("create") is False:
            options["schema"] = "nothing_is_here"
        is_empty = False
        return open_store(target, **{**fixed, **options})  # type: ignore[arg-type]

    return cast(OpenStore, open_it)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Run every test in virtual time, unless it asks for `real_time`: pytest-trio overlooks the clock of a fixture."""
    is_async = inspect.iscoroutinefunction(getattr(item, "obj", None))
    if is_async and "real_time" not in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.trio(run=_run_in_virtual_time))


def _run_in_virtual_time(*args: Any, clock: Any = None, **options: Any) -> object:
    return trio.run(*args, clock=MockClock(autojump_threshold=0) if clock is None else clock, **options)


@pytest.fixture
def real_time() -> None:
    """For tests whose handlers live in threads, which an autojump clock would leap over."""


@pytest.fixture(params=list(ENGINES))
def open_engine_store(request: pytest.FixtureRequest, tmp_path: Path) -> OpenStore:
    """Open the test's database, one at a time."""
    return opener(request, tmp_path)


@pytest.fixture(params=list(SHARED))
def open_shared_store(request: pytest.FixtureRequest, tmp_path: Path) -> OpenStore:
    """Open the test's database, as often as one likes: each store stands for a process of its own."""
    return opener(request, tmp_path)


@pytest.fixture(params=[engine for engine in ENGINES if engine.startswith("sqlite")])
def open_embedded_store(request: pytest.FixtureRequest, tmp_path: Path) -> OpenStore:
    """As `open_engine_store`, without a server: there is one writer at a time, and the clock is watched for steps."""
    return opener(request, tmp_path)


@pytest.fixture(params=[engine for engine in SHARED if engine.startswith("sqlite")])
def open_embedded_file_store(request: pytest.FixtureRequest, tmp_path: Path) -> OpenStore:
    """As `open_embedded_store`, on databases that are still there when they are opened again."""
    return opener(request, tmp_path)


@pytest.fixture
async def store(open_engine_store: OpenStore) -> AsyncIterator[Store]:
    """An empty store; in virtual time unless the test asks for `real_time`."""
    async with open_engine_store() as store:
        yield store


@pytest.fixture
async def one_store() -> AsyncIterator[Store]:
    """A store on one engine, for what is refused before any engine is asked (`refused`)."""
    async with open_store(":memory:", inline=True) as store:
        yield store


@pytest.fixture
def clock() -> ManualClock:
    """A clock that the test moves by hand."""
    return ManualClock(START)


@pytest.fixture
async def stepped(open_engine_store: OpenStore, clock: ManualClock) -> AsyncIterator[Store]:
    """An empty store whose clock is `clock`; trio's own is virtual."""
    async with open_engine_store(clock=clock) as store:
        yield store


@pytest.fixture
async def embedded_stepped(open_embedded_store: OpenStore, clock: ManualClock) -> AsyncIterator[Store]:
    """As `stepped`, on engines that mend what a step back has broken; a server's clock is the server's affair."""
    async with open_embedded_store(clock=clock) as store:
        yield store
