"""Text that other hands have put into the file: SQLite keeps what is no UTF-8, and its drivers then refuse the row.

What must be read whatever it is, is fetched ``CAST(… AS BLOB)`` and decoded here, one value at a time. PostgreSQL
and a database in UTF-16 hold no such text: there the casts are left out.
"""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["escaped", "raw", "shown", "text", "uncast"]

_CAST = re.compile(r"CAST\(([\w.]+) AS BLOB\)")


@lru_cache(maxsize=1024)
def uncast(sql: str) -> str:
    """Return the statement without its casts, for a database that holds proper text only."""
    return _CAST.sub(r"\1", sql)


def text(value: bytes | str) -> str:
    """Return a fetched text. ValueError: it is no UTF-8."""
    return value.decode() if isinstance(value, bytes) else value


def shown(value: bytes | str) -> str:
    """Return a fetched text to be read by people: what is no UTF-8 in it is replaced."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def escaped(value: bytes | str) -> str:
    """Return a fetched name so that `raw` finds its row again: what is no UTF-8 in it becomes lone surrogates."""
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else value


def raw(name: str) -> bytes | str:
    """Return what `escaped` was given, to be bound as ``CAST(:name AS TEXT)``; a proper text as it is."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return name.encode(errors="surrogateescape")
    return name
