"""The options of `open_store`: each is refused by its name, with what is right."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from alkstore import InvalidName, open_store


@pytest.mark.parametrize("option", ["inline", "create", "migrate", "listen"])
@pytest.mark.parametrize("value", ["no", 0, 1, None])
async def test_what_is_true_or_false_is_nothing_else(tmp_path: Path, option: str, value: object) -> None:
    options: dict[str, Any] = {option: value}
    with pytest.raises(TypeError, match=f"^{option} must be True or False, not {value!r}$"):
        async with open_store(tmp_path / "a.db", **options):
            pass
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"schema": "other"}, ValueError, "schema, connections and listen are options of a PostgreSQL server"),
        ({"connections": 4}, ValueError, "schema, connections and listen are options of a PostgreSQL server"),
        ({"listen": False}, ValueError, "schema, connections and listen are options of a PostgreSQL server"),
        ({"connections": 0}, ValueError, "connections must be from 1 to 100, not 0"),
        ({"connections": "many"}, TypeError, "connections must be an int from 1 to 100, not 'many'"),
        ({"schema": 5}, InvalidName, "a schema name must be a str, not int"),
    ],
)
async def test_the_options_of_a_server_are_no_options_of_a_file(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        async with open_store(tmp_path / "a.db", **options):
            pass
    assert not os.listdir(tmp_path)
