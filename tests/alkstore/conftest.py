"""The smallest database for the functions of `alkstore.sql`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.alkstore.sqltx import Database, opened


@pytest.fixture
def db() -> Iterator[Database]:
    yield from opened()
