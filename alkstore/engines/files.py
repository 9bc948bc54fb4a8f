"""Which copy of SQLite this process has each file open with: two copies would drop each other's locks."""

from __future__ import annotations

import os
import threading
from typing import TypeAlias

from attrs import define, field

from alkstore.errors import MixedSQLite, StoreReadOnly, StoreUnavailable

__all__ = ["FileIdentity", "identity", "refuse_other_copy", "register", "unregister"]

FileIdentity: TypeAlias = tuple[int, int]
"""Device and inode: two paths may lead to one file."""


@define(eq=False)
class _Opened:
    driver: str
    stores: int = 0
    pid: int = field(factory=os.getpid, init=False)


_opened: dict[FileIdentity, _Opened] = {}
_lock = threading.Lock()


def identity(path: str) -> FileIdentity | None:
    """Return what tells this file from all others; None: there is none. It is not opened: that would drop locks."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise StoreReadOnly(f"{path} cannot be reached: this user may not enter its folder") from error
    except OSError as error:
        raise StoreUnavailable(f"{path} cannot be reached: {error.strerror}") from error
    return found.st_dev, found.st_ino


def register(path: str, driver: str) -> FileIdentity | None:
    """Note that a store opens `path` with `driver`; give what is returned to `unregister`.

    Raises:
        MixedSQLite: a store of this process has the file open with another driver.
    """
    file = identity(path)
    if file is not None:
        with _lock:
            refuse_other_copy(path, driver)
            _opened.setdefault(file, _Opened(driver)).stores += 1
    return file


def unregister(file: FileIdentity) -> None:
    """Take back one `register`."""
    with _lock:
        opened = _opened[file]
        opened.stores -= 1
        if opened.stores == 0:
            del _opened[file]


def refuse_other_copy(path: str, driver: str) -> None:
    """Raise MixedSQLite if a store of this process has `path` open with another copy of SQLite than `driver`."""
    file = identity(path)
    opened = None if file is None else _opened.get(file)
    if opened is not None and opened.pid != os.getpid():
        raise MixedSQLite(
            f"{path} was open when this process was forked, and closing it in the one process drops the locks of the "
            "other: start processes that do not share it (multiprocessing: spawn)"
        )
    if opened is not None and opened.driver != driver:
        raise MixedSQLite(
            f"this process has {path} open with {opened.driver}; opening it with {driver} too would drop the locks of "
            "both: use one copy of SQLite for all, see driver= of open_store"
        )
