"""Where tests put files that are written very often."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from alkstore.testing.simulation import IN_MEMORY


@pytest.fixture
def quick_folder() -> Iterator[Path]:
    """An empty folder, in memory where there is such a thing: a sync costs nothing there."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY if os.path.isdir(IN_MEMORY) else None) as folder:
        yield Path(folder)
