"""What the tests of the PostgreSQL engine share: a store's own server connections, found, killed and kept waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, TypeAlias

import psycopg
import trio
from attrs import frozen

from alkstore import Store, open_store
from alkstore.engines.postgres.engine import PostgresEngine
from alkstore.engines.postgres.statements import quoted
from alkstore.sql.tx import Tx

__all__ = ["Admin", "Place", "as_user", "engine_of", "eventually"]

WITHIN_S = 20.0
"""No wait for a server or a process is longer."""

Row: TypeAlias = tuple[Any, ...]


def engine_of(store: Store) -> PostgresEngine:
    engine = store._context.engine
    assert isinstance(engine, PostgresEngine)
    return engine


async def run(store: Store, function: Callable[[Tx], Any]) -> Any:
    """Run a function of `alkstore.sql` as a unit of work."""
    return await store._context.engine.run(function)


async def eventually(condition: Callable[[], Any], within: float = WITHIN_S) -> float:
    """Wait until `condition` holds, and return how many seconds that took; it is about another process, or a server."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within, "it has not happened in time"
        await trio.sleep(0.01)
    return time.monotonic() - began


def as_user(server: str, user: str) -> str:
    """The URL of a server, for another user who needs no password."""
    info = psycopg.conninfo.conninfo_to_dict(server)
    port = f"&port={info['port']}" if "port" in info else ""
    return f"postgresql://{user}@/{info['dbname']}?host={info['host']}{port}"


@frozen
class Place:
    """Where a test's store is; its connections are known by their application_name, which is the schema's."""

    server: str
    schema: str

    @property
    def url(self) -> str:
        return self.within(self.server)

    def within(self, server: str) -> str:
        """The URL for the same schema, seen through another address."""
        return f"{server}{'&' if '?' in server else '?'}application_name={self.schema}"

    def open(self, **options: Any) -> AbstractAsyncContextManager[Store]:
        return open_store(self.url, schema=self.schema, **{"connections": 3, **options})

    def table(self, name: str) -> str:
        return f"{quoted(self.schema)}.__alkstore_{name}"


@frozen
class Admin:
    """A superuser's connection beside the store's."""

    place: Place
    connection: psycopg.Connection[Row]

    def rows(self, sql: str, *params: object) -> list[Row]:
        cursor = self.connection.execute(sql.encode(), params or None)
        return cursor.fetchall() if cursor.description is not None else []

    def value(self, sql: str, *params: object) -> Any:
        return self.rows(sql, *params)[0][0]

    def backends(self, query: str = "%") -> list[int]:
        """The server's processes for the store's connections whose last statement is like `query`."""
        rows = self.rows(
            "SELECT pid FROM pg_stat_activity WHERE application_name = %s AND query LIKE %s", self.place.schema, query
        )
        return [pid for (pid,) in rows]

    def kill(self, query: str = "%") -> int:
        """End these connections, and return how many."""
        pids = self.backends(query)
        for pid in pids:
            self.rows("SELECT pg_terminate_backend(%s)", pid)
        return len(pids)

    def waiting(self) -> int:
        """How many of the store's connections wait for a lock."""
        return int(
            self.value(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s AND wait_event_type = 'Lock'",
                self.place.schema,
            )
        )

    @contextmanager
    def holding(self, sql: str, *params: object) -> Iterator[None]:
        """In the body a transaction is open that has run `sql`, and so holds its locks."""
        with psycopg.connect(self.place.server) as other:
            other.execute(sql.encode(), params or None)
            yield
            other.rollback()
