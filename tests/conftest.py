"""What the tests of several folders need: a PostgreSQL server, and a schema of its own for each test."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.postgres.schemas import Schemas, drop_schema
from tests.postgres.server import shared_server

for number, handler in (signal.SIGINT, signal.default_int_handler), (signal.SIGCHLD, signal.SIG_DFL):
    if signal.getsignal(number) is signal.SIG_IGN:  # as whoever is started by a script in the background inherits it
        signal.signal(number, handler)

settings.register_profile("gate", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""The same examples in every run, on a slow machine too: what fails has failed because of what was changed."""

settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Other examples in each run: ``--hypothesis-profile=explore``."""

settings.load_profile("gate")


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The URL of a server, as its superuser: one of this run's own, or that of ALKSTORE_TEST_POSTGRES."""
    with shared_server() as url:
        yield url


@pytest.fixture
def postgres_schema(postgres_url: str) -> Iterator[str]:
    """The name of a schema that is not there yet, and that is dropped after the test."""
    name = f"test_{secrets.token_hex(4)}"
    yield name
    drop_schema(postgres_url, name)


@pytest.fixture(scope="session")
def postgres_schemas(postgres_url: str) -> Iterator[Schemas]:
    """Schemas that have the store's tables already, for tests that are many and short."""
    with Schemas(postgres_url) as schemas:
        yield schemas


@pytest.fixture
def emptied_schema(postgres_schemas: Schemas) -> Iterator[str]:
    """The name of a schema with the store's tables, and nothing in them."""
    with postgres_schemas.lend() as name:
        yield name
