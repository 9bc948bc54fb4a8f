"""What the store is measured against: the standard library's sqlite3 on the same tables, written by hand."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from alkstore.engines import migrate
from alkstore.engines.driver import StdlibDriver

__all__ = ["PAYLOAD", "connect", "row"]

PAYLOAD = {"to": "alice@example.com", "n": 1}
"""What every job of every benchmark carries."""

START = 1_700_000_000_000


def connect(path: Path, synchronous: str = "full") -> sqlite3.Connection:
    """Open `path` in WAL mode with the store's tables, which are made if there are none."""
    installer = StdlibDriver().connect(str(path))
    installer.all("PRAGMA journal_mode = WAL")
    installer.all("BEGIN IMMEDIATE")
    migrate.install(installer)
    installer.all("COMMIT")
    installer.close()
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(f"PRAGMA synchronous = {synchronous}").fetchall()
    return connection


def row(payload: str) -> dict[str, object]:
    """The parameters of the store's own INSERT for a job of the queue ``q``."""
    return {
        "queue": "q",
        "priority": 0,
        "run_at": START,
        "parked": 0,
        "expires_at": None,
        "key": None,
        "max_attempts": 3,
        "visibility": 300_000,
        "backoff": 5_000,
        "payload": payload,
        "headers": None,
        "schedule": None,
        "boundary": None,
        "now": START,
    }
