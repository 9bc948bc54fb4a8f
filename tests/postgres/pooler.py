"""A pooler in transaction mode: each transaction of a client has whichever connection to the server is free.

It does what pgbouncer promises of its `pool_mode = transaction`, and is stricter in one thing: a connection that was
used goes to the end of the line, so that of several none has two transactions of a client in a row if it can be
helped. Messages: https://www.postgresql.org/docs/current/protocol-message-formats.html
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import psycopg
import trio
from attrs import define, field

__all__ = ["Pooler", "open_pooler"]

PROTOCOL_3 = 196_608
CANCEL, TLS, GSS = 80_877_102, 80_877_103, 80_877_104

LOGGED_IN = struct.pack("!cII", b"R", 8, 0)
IDLE = b"Z\x00\x00\x00\x05I"

ASKING = (b"Q", b"S", b"F")
"""Query, Sync and FunctionCall: each is answered with ReadyForQuery once."""

Message: TypeAlias = tuple[bytes, bytes]
"""Its type, and all of it."""

GONE = (trio.BrokenResourceError, trio.ClosedResourceError, EOFError)


@define(eq=False)
class Peer:
    """One connection, of which whole messages are read. Cancelled, reading has taken nothing."""

    stream: trio.SocketStream
    _unread: bytearray = field(factory=bytearray, init=False)

    async def message(self) -> Message:
        """Return the next message."""
        await self._have(5)
        message = await self._take(1 + struct.unpack_from("!I", self._unread, 1)[0])
        return message[:1], message

    async def first_message(self) -> tuple[int, bytes]:
        """Return the code of a message without a type, with which a client begins, and the rest."""
        await self._have(8)
        message = await self._take(struct.unpack_from("!I", self._unread)[0])
        return struct.unpack_from("!I", message, 4)[0], message[8:]

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def _have(self, size: int) -> None:
        while len(self._unread) < size:
            if not (some := await self.stream.receive_some()):
                raise EOFError
            self._unread += some

    async def _take(self, size: int) -> bytes:
        await self._have(size)
        taken = bytes(self._unread[:size])
        del self._unread[:size]
        return taken


@define(eq=False)
class Server(Peer):
    """One connection to the server, which may be used by anybody."""

    key: bytes = b""
    """By which a statement on it can be cancelled."""
    greeting: bytes = b""
    """What it has told of itself, for clients to know."""


@define(eq=False)
class Pooler:
    url: str
    server: str
    """The path of the server's socket."""
    _startup: bytes
    _put: trio.MemorySendChannel[Server]
    _free: trio.MemoryReceiveChannel[Server]
    used: set[bytes] = field(factory=set, init=False)
    """The keys of the connections that have served a transaction."""
    _servers: set[Server] = field(factory=set, init=False)
    _uses: dict[bytes, Server | None] = field(factory=dict, init=False)
    """By the key of each client, which connection it has at the moment."""

    async def connect(self) -> None:
        """Add one connection to the server."""
        server = Server(await trio.open_unix_socket(self.server))
        self._servers.add(server)
        await server.send(self._startup)
        kind = b""
        while kind != b"Z":
            kind, message = await server.message()
            assert kind != b"E", message
            if kind == b"S":
                server.greeting += message
            elif kind == b"K":
                server.key = message[5:]
        self._put.send_nowait(server)

    def close(self) -> None:
        for server in self._servers:
            server.stream.socket.close()

    async def serve(self, stream: trio.SocketStream) -> None:
        """Serve one client until it leaves."""
        client = Peer(stream)
        with suppress(*GONE):
            async with stream:
                code, about = await client.first_message()
                while code in (TLS, GSS):
                    await client.send(b"N")
                    code, about = await client.first_message()
                if code == CANCEL:
                    await self._cancel(about)
                else:
                    assert code == PROTOCOL_3, code
                    await self._session(client)

    async def _session(self, client: Peer) -> None:
        key = secrets.token_bytes(8)
        server = await self._free.receive()
        self._put.send_nowait(server)
        await client.send(LOGGED_IN + server.greeting + struct.pack("!cI", b"K", 4 + len(key)) + key + IDLE)
        asked: Message | None = None
        while True:
            asked = asked or await client.message()
            if asked[0] == b"X":
                return
            server = await self._free.receive()
            self.used.add(server.key)
            self._uses[key] = server
            try:
                asked = await _Transaction(client, server).run(asked)
            except BaseException:
                server.stream.socket.close()  # nobody else may find it half-way
                self._servers.remove(server)
                await self.connect()
                raise
            else:
                self._put.send_nowait(server)
            finally:
                del self._uses[key]
            await client.send(IDLE)

    async def _cancel(self, key: bytes) -> None:
        if (server := self._uses.get(key)) is not None:
            async with await trio.open_unix_socket(self.server) as stream:
                await stream.send_all(struct.pack("!II", 8 + len(server.key), CANCEL) + server.key)
                await stream.receive_some()


@define(eq=False)
class _Transaction:
    """Forwards both ways until the server is in no transaction, and owes no answer."""

    client: Peer
    server: Server
    _owed: int = field(default=0, init=False)
    _unasked: bool = field(default=False, init=False)
    """Something was forwarded that is answered only when more has come."""
    _over: bool = field(default=False, init=False)
    _next: Message | None = field(default=None, init=False)

    async def run(self, asked: Message) -> Message | None:
        """Run until the client is owed an IDLE and nothing else; return what it has asked meanwhile."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ask, asked, nursery.cancel_scope)
            with suppress(*GONE):
                await self._answer()
            nursery.cancel_scope.cancel()
        if not self._over:
            raise EOFError
        return self._next

    async def _ask(self, asked: Message, both: trio.CancelScope) -> None:
        with suppress(*GONE):
            while asked[0] != b"X":
                self._owed += asked[0] in ASKING
                self._unasked = asked[0] not in ASKING
                await self.server.send(asked[1])
                asked = await self.client.message()
                if self._over:
                    self._next = asked
                    return
        both.cancel()

    async def _answer(self) -> None:
        while True:
            kind, message = await self.server.message()
            self._owed -= kind == b"Z"
            if message == IDLE and not self._owed and not self._unasked:
                self._over = True
                return
            await self.client.send(message)


@asynccontextmanager
async def open_pooler(folder: Path, of_server: str, size: int) -> AsyncIterator[Pooler]:
    """Open a pooler with `size` connections to the server of this URL, which has to listen on a socket of its own."""
    info = psycopg.conninfo.conninfo_to_dict(of_server)
    about = b"".join(
        f"{name}\0{value}\0".encode() for name, value in {"user": info["user"], "database": info["dbname"]}.items()
    )
    startup = struct.pack("!II", 9 + len(about), PROTOCOL_3) + about + b"\0"
    url = f"postgresql://{info['user']}@/{info['dbname']}?host={folder}"
    path = f"{info['host']}/.s.PGSQL.{info.get('port', 5432)}"
    pooler = Pooler(url, path, startup, *trio.open_memory_channel[Server](size))
    socket = trio.socket.socket(trio.socket.AF_UNIX)
    await socket.bind(str(folder / ".s.PGSQL.5432"))
    socket.listen()
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, pooler.serve, [trio.SocketListener(socket)])
        try:
            for _ in range(size):
                await pooler.connect()
            yield pooler
        finally:
            nursery.cancel_scope.cancel()
            pooler.close()
