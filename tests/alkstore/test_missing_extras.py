"""What needs a package that is not installed says which extra brings it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from alkstore import open_store
from alkstore.engines.driver import load_driver


def test_the_driver_apsw_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apsw", None)
    with pytest.raises(ImportError, match=r"install alkstore\[apsw\]"):
        load_driver("apsw")


def _without_psycopg(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.delitem(sys.modules, module, raising=False)


async def test_a_url_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_psycopg(monkeypatch, "alkstore.engines.postgres.engine")
    with pytest.raises(ImportError, match=r"install alkstore\[postgres\]"):
        async with open_store("postgresql://h/d"):
            pass


def test_moving_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_psycopg(monkeypatch, "alkstore.moving")
    with pytest.raises(ImportError, match=r"install alkstore\[postgres\]"):
        importlib.import_module("alkstore.moving")


USING = """
async def test_async(alkstore_store):
    pass

def test_plain(alkstore_store):
    pass

def test_other():
    pass
"""


def test_the_fixture_names_its_extra_and_leaves_other_tests_alone(tmp_path: Path) -> None:
    (tmp_path / "test_using.py").write_text(USING)
    (tmp_path / "pytest.ini").write_text("[pytest]")
    command = [sys.executable, "-m", "pytest", "-p", "no:trio", "-p", "no:cacheprovider", "--strict-markers", "-q", "."]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.stdout.count("the fixture alkstore_store needs pytest-trio: install alkstore[testing]") >= 2
    assert "1 passed" in done.stdout
    assert "2 errors" in done.stdout
    assert "Traceback" not in done.stdout
