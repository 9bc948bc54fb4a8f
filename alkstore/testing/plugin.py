"""The pytest plugin: it is loaded by every test run that has alkstore installed, so it imports nothing until used."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from alkstore.store import Store


@pytest.fixture
async def alkstore_store() -> AsyncIterator[Store]:
    """An empty inline store in memory, in virtual time: a year of schedules takes seconds.

    Needs pytest-trio, which comes with alkstore[testing]. The lease of the schedules' leader is a day, since renewing a
    shorter one through a year would take longer than everything else.
    """
    from alkstore.clock import TrioClock  # noqa: PLC0415 - see the module's first line
    from alkstore.engines.bridge import in_virtual_time  # noqa: PLC0415
    from alkstore.store import open_store  # noqa: PLC0415

    if not in_virtual_time():  # a year would take a year
        pytest.fail("alkstore_store needs virtual time here: let the test itself ask for `autojump_clock` too")
    async with open_store(":memory:", inline=True, clock=TrioClock(), leadership_ttl=86_400) as store:
        yield store


def pytest_itemcollected(item: pytest.Item) -> None:
    """Run the tests that ask for `alkstore_store` in virtual time.

    pytest-trio takes a clock from a test's own arguments, and does not see those of its fixtures.
    """
    if _is_ours(item) and _has_pytest_trio(item):
        item.add_marker(pytest.mark.trio(run=_run_in_virtual_time))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Say what is missing before pytest says that it cannot await a fixture."""
    if _is_ours(item) and not _has_pytest_trio(item):
        pytest.fail("the fixture alkstore_store needs pytest-trio: install alkstore[testing]", pytrace=False)


def _is_ours(item: pytest.Item) -> bool:
    return "alkstore_store" in getattr(item, "fixturenames", ())


def _has_pytest_trio(item: pytest.Item) -> bool:
    plugins = item.config.pluginmanager.get_plugins()
    return any(getattr(plugin, "__name__", "") == "pytest_trio.plugin" for plugin in plugins)


def _run_in_virtual_time(*args: Any, clock: Any = None, **options: Any) -> Any:
    import trio.testing  # noqa: PLC0415 - see the module's first line

    return trio.run(*args, clock=trio.testing.MockClock(autojump_threshold=0) if clock is None else clock, **options)
