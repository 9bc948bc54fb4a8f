"""The fixtures of the tests with real processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.crash.harness import Processes, open_processes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests of tests/crash for as long as they deserve")


@pytest.fixture
def long(request: pytest.FixtureRequest) -> bool:
    """Whether there is time: ``pytest tests/crash --long``."""
    return bool(request.config.getoption("--long", default=False))


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[Processes]:
    """Starts children, and reaps them."""
    async with open_processes(tmp_path) as opened:
        yield opened


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where the test's store will be."""
    return str(tmp_path / "store.db")
