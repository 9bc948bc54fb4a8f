"""A disk that fails at a chosen moment, or whose power is cut: a VFS shim of apsw around SQLite's own."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import apsw
from attrs import define, field, frozen

from alkstore.engines.driver import ApswConnection

__all__ = ["CODES", "Cut", "Disk", "Failure"]

CODES = {
    "write": (apsw.SQLITE_IOERR_WRITE, apsw.SQLITE_FULL),
    "sync": (apsw.SQLITE_IOERR_FSYNC,),
    "truncate": (apsw.SQLITE_IOERR_TRUNCATE,),
    "read": (apsw.SQLITE_IOERR_READ,),
    "open": (apsw.SQLITE_CANTOPEN,),
    "lock": (apsw.SQLITE_BUSY,),
}
"""What each operation of a disk can fail with."""

Write: TypeAlias = tuple[str, int, bytes]


@frozen
class Failure:
    """The `nth` (from 1) operation of this kind fails with `code`, and with `lasting` every one after it too."""

    operation: str
    nth: int
    code: int
    lasting: bool = False


@define(eq=False)
class Cut:
    """What is on the platters at the moment of a power cut, and what may be there too."""

    synced: dict[str, bytes]
    unsynced: list[Write]
    answered: int
    """How many answers had been given."""

    def leave(self, folder: Path, chance: random.Random | None) -> Path:
        """Write the files as they are after the cut; of what was not synced any part may have arrived."""
        files = {name: bytearray(content) for name, content in self.synced.items()}
        for name, offset, data in self.unsynced:
            if name in files and chance is not None and chance.random() < 0.5:
                arrived = data if chance.random() < 0.8 else data[: chance.randrange(len(data))]
                file = files[name]
                file.extend(b"\0" * (offset + len(arrived) - len(file)))
                file[offset : offset + len(arrived)] = arrived
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return folder / "app.db"


@define(eq=False)
class Disk:
    """Every file of a SQLite database is on it, as long as it is `plugged_in`."""

    failure: Failure | None = None
    answered: Callable[[], int] | None = None
    """How many answers have been given by now; then a `Cut` is kept for each sync."""
    done: Counter[str] = field(factory=Counter)
    """Operations so far."""
    struck: int = 0
    cuts: list[Cut] = field(factory=list)
    _synced: dict[str, bytes] = field(factory=dict)
    _unsynced: list[Write] = field(factory=list)

    @contextmanager
    def plugged_in(self) -> Iterator[None]:
        """Let apsw use this disk by default. Small caches make a transaction write long before it commits."""
        vfs = _Vfs(self)
        apsw.connection_hooks.append(_use_small_cache)
        closed = ApswConnection.close
        ApswConnection.close = _close_as_sqlite_does  # type: ignore[method-assign]
        try:
            yield
        finally:
            ApswConnection.close = closed  # type: ignore[method-assign]
            apsw.connection_hooks.remove(_use_small_cache)
            vfs.unregister()

    def does(self, operation: str) -> None:
        """Count an operation, and fail if it is the one."""
        self.done[operation] += 1
        failure = self.failure
        if failure is None or failure.operation != operation:
            return
        count = self.done[operation]
        if count == failure.nth or (failure.lasting and count > failure.nth):
            self.struck += 1
            raise apsw.exception_for(failure.code)

    def wrote(self, name: str, offset: int, data: bytes) -> None:
        if self.answered is not None:
            self._unsynced.append((name, offset, bytes(data)))

    def syncs(self, name: str, content: Callable[[], bytes]) -> None:
        if self.answered is not None:
            self.cuts.append(Cut(dict(self._synced), list(self._unsynced), self.answered()))
            self._synced[name] = content()
            self._unsynced = [write for write in self._unsynced if write[0] != name]

    def deleted(self, name: str) -> None:
        self._synced.pop(name, None)
        self._unsynced = [write for write in self._unsynced if write[0] != name]


def _use_small_cache(connection: apsw.Connection) -> None:
    connection.execute("PRAGMA cache_size = 5")


def _close_as_sqlite_does(self: ApswConnection) -> None:
    try:
        self._raw.close(True)
    except apsw.Error:  # the last checkpoint failed, of which SQLite says nothing
        self._raw.close(True)


class _Vfs(apsw.VFS):
    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        super().__init__("alkstore-disk", "unix", makedefault=True)

    def xOpen(self, name: Any, flags: list[int]) -> Any:  # noqa: N802 - SQLite's name
        self._disk.does("open")
        return _File(self._disk, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802
        super().xDelete(filename, syncdir)
        self._disk.deleted(Path(filename).name)


class _File(apsw.VFSFile):
    def __init__(self, disk: Disk, name: Any, flags: list[int]) -> None:
        self._disk = disk
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        self._name = Path(path or "temporary").name
        super().__init__("unix", name, flags)

    def xRead(self, amount: int, offset: int) -> bytes:  # noqa: N802
        self._disk.does("read")
        return super().xRead(amount, offset)

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802
        self._disk.does("write")
        super().xWrite(data, offset)
        self._disk.wrote(self._name, offset, data)

    def xSync(self, flags: int) -> None:  # noqa: N802
        self._disk.does("sync")
        super().xSync(flags)
        self._disk.syncs(self._name, lambda: super(_File, self).xRead(self.xFileSize(), 0))

    def xTruncate(self, newsize: int) -> None:  # noqa: N802
        self._disk.does("truncate")
        super().xTruncate(newsize)

    def xLock(self, level: int) -> None:  # noqa: N802
        self._disk.does("lock")
        super().xLock(level)
