"""The constants that docs/sqlite.md names are those of the code."""

from __future__ import annotations

import importlib
import re

import pytest

from tests.docs.blocks import ROOT

ROWS = re.findall(r"^\| `([\w.]+)\.(\w+)` \| ([\d.]+) \|", (ROOT / "docs" / "sqlite.md").read_text(), re.MULTILINE)


def test_the_table_of_constants_is_found() -> None:
    assert len(ROWS) >= 10


@pytest.mark.parametrize(("module", "name", "value"), ROWS, ids=[name for _, name, _ in ROWS])
def test_a_constant_has_the_value_that_the_page_says(module: str, name: str, value: str) -> None:
    assert getattr(importlib.import_module(module), name) == float(value)
