"""A place for the store of each test, and a superuser's connection beside it."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.postgres.kit import Admin, Place


@pytest.fixture
def place(postgres_url: str, postgres_schema: str) -> Place:
    """A schema that is not there yet."""
    return Place(postgres_url, postgres_schema)


@pytest.fixture
def admin(place: Place) -> Iterator[Admin]:
    with psycopg.connect(place.server, autocommit=True) as connection:
        yield Admin(place, connection)


@pytest.fixture
def clerk(admin: Admin) -> Iterator[str]:
    """A user who may log in and nothing more."""
    name = f"clerk_{secrets.token_hex(4)}"
    admin.rows(f"CREATE ROLE {name} LOGIN")
    yield name
    admin.rows(f"DROP OWNED BY {name}; DROP ROLE {name}")


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """The path of a socket has a limit that pytest's folders may exceed."""
    with tempfile.TemporaryDirectory(prefix="alkpg") as folder:
        yield Path(folder)
