"""One connection to the server: how it is made, what its errors mean, and the `Tx` on it."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psycopg
import trio
from attrs import define, field

from alkstore.engines.postgres.address import is_url, redacted
from alkstore.engines.postgres.statements import translate
from alkstore.errors import (
    StoreBusy,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
)
from alkstore.sql.tx import Params, Row
from alkstore.values import Event, at

if TYPE_CHECKING:
    from psycopg import Connection

__all__ = ["BEGIN", "CHECK", "RESET", "PostgresTx", "connect", "cut", "is_final", "is_repeatable", "mapped"]

CONNECT_S = 5
"""Seconds for one attempt to connect."""

KEEPALIVE: dict[str, Any] = {"keepalives": 1, "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3}
"""A server that has gone without a word is noticed within half a minute."""

TCP_USER_TIMEOUT_MS = 20_000
"""So is one that does not take what was sent."""

BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
"""Whatever is the default of the user, or of the database."""

RESET = (
    "; RESET SESSION AUTHORIZATION; RESET ROLE; RESET ALL; CLOSE ALL; UNLISTEN *; DISCARD TEMP; "
    "SELECT pg_catalog.pg_advisory_unlock_all()"
)
"""After a COMMIT or ROLLBACK, in one message with it, so that through a pooler too it reaches the same session.

All of DISCARD ALL, which cannot be in a message with others, but for prepared statements, which a pooler may count on.
"""

CHECK = "SET CONSTRAINTS ALL IMMEDIATE; "
"""Before a COMMIT: what is deferred may fail, and after a COMMIT that fails no RESET would reach the same session."""

NOW = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"

# the count is there when every row is locked, and what is beside it is computed when the count is there
LOCK = f"WITH locked AS MATERIALIZED ({{}}) SELECT count(*), {NOW} FROM locked"


_BY_STATE: dict[str, tuple[type[StoreError], str]] = {
    "40001": (StoreBusy, "the transaction was in another one's way"),
    "40P01": (StoreBusy, "a deadlock was broken"),
    "55P03": (StoreBusy, "a row is locked by somebody else"),
    "57014": (StoreBusy, "a statement took too long, or was cancelled"),
    "53100": (StoreFull, "the server's disk is full"),
    "53200": (StoreUnavailable, "the server is out of memory"),
    "53300": (StoreUnavailable, "the server has no connection to spare"),
    "25006": (StoreReadOnly, "the server takes no writes (a standby, or a read-only transaction)"),
    "25P03": (StoreUnavailable, "the server has ended a transaction that lay idle"),
    "25P04": (StoreUnavailable, "the server has ended a transaction that took too long"),
    "42501": (StoreReadOnly, "this user lacks a privilege"),
    "XX001": (StoreCorrupt, "the server's data is damaged"),
    "XX002": (StoreCorrupt, "an index of the server is damaged"),
}

_OURS = "__alkstore_"
"""Of names of constraints: who was faster is there now, and will be seen when it is tried again."""

_AWAY = ("08", "57P")
"""Classes of errors after which a connection is of no use."""

_REFUSED = "the server refuses: "

_NOT_UNDERSTOOD = "the server's URL is wrong: "

_FINAL = ("password authentication failed", "no pg_hba.conf entry", "does not exist", "no password supplied")
"""What a server says that will say so again. It gives no code before it has let somebody in."""

_UNREADABLE = re.compile(r"\binvalid (?:\w+ )?(?:value|number)\b")
"""What libpq says of a URL that it does not understand, beside what psycopg tells by the type."""


def mapped(error: psycopg.Error) -> StoreError:
    """Return the error of ours for one of psycopg's, which has to be its cause."""
    state = error.sqlstate or ""
    if (found := _BY_STATE.get(state)) is not None:
        kind, what = found
        return kind(f"{what}: {error}")
    if not state and "in COPY" in str(error):
        return StoreError("COPY TO STDOUT or FROM STDIN moves data beside the statement: take SELECT or INSERT instead")
    if state.startswith(_AWAY) or (not state and isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)):
        return StoreUnavailable(f"the server is away: {error}")
    if _was_faster(error):
        return StoreBusy(f"somebody else was faster: {error}")
    if state == "0A000" and "recovery" in str(error):  # READ WRITE was asked for
        return StoreReadOnly(f"the server takes no writes (a standby): {error}")
    if state == "42601" and "multiple commands" in str(error):
        return StoreError(f"only one statement at a time: {error}")
    if not state and "placeholders" in str(error):
        return StoreError(f"{error}: PostgreSQL's placeholders are %s and %(name)s, not ? and :name")
    return StoreError(str(error))


def is_repeatable(error: StoreError) -> bool:
    """Whether nothing has come of a transaction that ended so, and it may do when it is run again."""
    if isinstance(error, StoreUnavailable):
        return True
    cause = error.__cause__
    return isinstance(cause, psycopg.Error) and (cause.sqlstate in ("40001", "40P01") or _was_faster(cause))


def is_final(error: StoreUnavailable) -> bool:
    """Whether `connect` would say so again, however often it is tried."""
    return str(error).startswith((_REFUSED, _NOT_UNDERSTOOD))


def _was_faster(error: psycopg.Error) -> bool:
    return error.sqlstate == "23505" and (error.diag.constraint_name or "").startswith(_OURS)


def connect(url: str) -> Connection[Row]:
    """Open a connection that commits nothing by itself and prepares nothing, so that a transaction pooler will do.

    Blocks, up to 5 s for each address of the server.

    Raises:
        ValueError: it is no postgresql:// URL, whatever else libpq takes.
        StoreUnavailable: the server cannot be reached, or it refuses, or the URL is wrong.
    """
    if not is_url(url):
        raise ValueError("the address of a PostgreSQL server must be a URL such as postgresql://user@host/database")
    try:
        return psycopg.Connection.connect(
            url,
            autocommit=True,  # BEGIN and COMMIT are ours
            prepare_threshold=None,
            client_encoding="UTF8",
            connect_timeout=CONNECT_S,
            tcp_user_timeout=TCP_USER_TIMEOUT_MS,
            **KEEPALIVE,
        )
    except psycopg.Error as error:
        told = redacted(str(error), url)
        if isinstance(error, psycopg.ProgrammingError) or _UNREADABLE.search(told):
            what = _NOT_UNDERSTOOD
        else:
            what = _REFUSED if any(text in told for text in _FINAL) else "the server cannot be reached: "
        ours = StoreUnavailable(what + told)
        if told != str(error):
            raise ours from None  # the driver's own error shows the password
        raise ours from error


def cut(connection: Connection[Row]) -> None:
    """Let whoever waits for the server on `connection`, in whatever thread, find it lost."""
    with suppress(psycopg.Error, OSError), socket.socket(fileno=os.dup(connection.fileno())) as shared:
        shared.shutdown(socket.SHUT_RDWR)


@define(eq=False)
class PostgresTx:
    """The `Tx` of PostgreSQL. `manual` is what a clock reads that was given to the store; else the server's counts."""

    connection: Connection[Row]
    schema: str
    manual: int | None
    learn: Callable[[int, float], None]
    """Gets every reading of the server's clock, and the seconds that it took."""
    topics: set[str] = field(factory=set)
    events: list[Event] = field(factory=list)
    moment: int | None = field(default=None, init=False)
    begun: bool = field(default=False, init=False)
    """BEGIN has succeeded; before, nothing can have happened."""
    interruption: trio.Event | None = field(default=None, init=False)
    """Set when the server has been asked to stop the present statement; None: nobody is asking."""
    interrupted_at: float | None = field(default=None, init=False)
    """When that was asked first, on time.monotonic's clock."""
    has_users: bool = field(default=False, init=False)
    """It has run statements that are not the store's: nobody knows what they have done to the session."""
    committing: bool = field(default=False, init=False)
    """COMMIT is sent, or will be at once."""
    _asking: threading.Lock = field(factory=threading.Lock, init=False)

    def all(self, sql: str, params: Params = {}) -> list[Row]:  # noqa: B006 - never changed
        return self._rows(translate(sql, self.schema), params)

    def one(self, sql: str, params: Params = {}) -> Row | None:  # noqa: B006 - never changed
        rows = self.all(sql, params)
        return rows[0] if rows else None

    def each(self, sql: str, params: Sequence[Params]) -> list[list[Row]]:
        """In one round trip for all."""
        if len(params) < 2:
            return [self.all(sql, one) for one in params]
        try:
            with self.connection.cursor() as cursor:
                cursor.executemany(translate(sql, self.schema), params, returning=True)
                return [result.fetchall() if result.description else [] for result in cursor.results()]
        except psycopg.Error as error:
            raise mapped(error) from error

    def user(self, sql: str, params: Params) -> list[Row]:
        """Run a statement that is not the store's, in psycopg's own style."""
        as_it_is: Any = sql
        self.has_users = True
        try:
            with self.connection.pipeline():  # there the server takes one statement at a time, and no more
                cursor = self.connection.execute(as_it_is, params or None)
            return cursor.fetchall() if cursor.description is not None else []
        except psycopg.Error as error:
            raise mapped(error) from error

    def lock(self, sql: str, params: Params = {}) -> None:  # noqa: B006 - never changed
        began = time.monotonic()
        read = self._rows(LOCK.format(translate(sql, self.schema)), params)
        self._take(int(read[0][1]), began)

    def now(self) -> int:
        if self.moment is None:
            if self.manual is not None:
                self.moment = self.manual
            else:
                began = time.monotonic()
                self._take(int(self._rows(f"SELECT {NOW}", ())[0][0]), began)
        assert self.moment is not None
        return self.moment

    def touch(self, topic: str) -> None:
        self.topics.add(topic)

    def report(self, kind: str, subject: str, **details: object) -> None:
        self.events.append(Event(kind, at(self.now()), subject, details))

    def ask_to_stop(self, timeout: float) -> None:
        """Ask the server to stop the present statement, but no COMMIT. Blocks, in another thread than the rest.

        A COMMIT that waits for a standby would end as if that had confirmed it.
        """
        with self._asking, suppress(psycopg.Error):
            if not self.committing:
                self.connection.cancel_safe(timeout=timeout)

    def will_commit(self) -> None:
        """From now on nobody asks the server to stop."""
        with self._asking:
            self.committing = True

    @property
    def is_open(self) -> bool:
        """Whether it can go on; False: the server has given it up, or is away."""
        return self.connection.info.transaction_status in (
            psycopg.pq.TransactionStatus.INTRANS,
            psycopg.pq.TransactionStatus.INERROR,
        )

    def _take(self, read: int, began: float) -> None:
        if self.manual is not None:
            self.moment = self.manual
            return
        self.moment = read
        self.learn(read, time.monotonic() - began)

    def _rows(self, sql: Any, params: Params | None) -> list[Row]:
        try:
            cursor = self.connection.execute(sql, params)
            return cursor.fetchall() if cursor.description is not None else []
        except psycopg.Error as error:
            raise mapped(error) from error
