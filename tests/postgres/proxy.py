"""Stands between a store and its server, and forwards what it is told to: a network that fails without a word."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psycopg
import trio
from attrs import define, field

__all__ = ["Proxy", "open_proxy"]


@define(eq=False)
class Wire:
    """One connection through the proxy. `stalled`: it stays open, and nothing is forwarded any more."""

    client: trio.SocketStream
    server: trio.SocketStream
    sent: bytearray = field(factory=bytearray)
    stalled: bool = False


@define(eq=False)
class Proxy:
    folder: Path
    server: str
    """The path of the server's socket."""
    wires: list[Wire] = field(factory=list)
    is_silent: bool = False
    """New wires are stalled from the beginning."""
    delay: float = 0.0
    """Seconds that everything is under way, in either direction."""

    def url(self, of_server: str) -> str:
        """The server's URL with the proxy's address in the place of its own."""
        info = psycopg.conninfo.conninfo_to_dict(of_server)
        return f"postgresql://{info.get('user', 'postgres')}@/{info['dbname']}?host={self.folder}"

    def that_said(self, text: bytes) -> list[Wire]:
        return [wire for wire in self.wires if text in wire.sent]

    def stall_all(self) -> None:
        """Forward nothing any more, on new wires neither."""
        self.is_silent = True
        for wire in self.wires:
            wire.stalled = True

    async def serve(self, client: trio.SocketStream) -> None:
        server = await trio.open_unix_socket(self.server)
        wire = Wire(client, server, stalled=self.is_silent)
        self.wires.append(wire)
        async with client, server, trio.open_nursery() as nursery:
            nursery.start_soon(self._forward, wire, client, server)
            nursery.start_soon(self._forward, wire, server, client)

    async def _forward(self, wire: Wire, source: trio.SocketStream, target: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while data := await source.receive_some():
                await trio.sleep(self.delay)
                if wire.stalled:
                    continue
                if source is wire.client:
                    wire.sent += data
                await target.send_all(data)
            if not wire.stalled:
                await target.send_eof()


@asynccontextmanager
async def open_proxy(folder: Path, of_server: str) -> AsyncIterator[Proxy]:
    """Open a proxy for the server of this URL, which has to listen on a socket of its own."""
    info = psycopg.conninfo.conninfo_to_dict(of_server)
    proxy = Proxy(folder, f"{info['host']}/.s.PGSQL.{info.get('port', 5432)}")
    socket = trio.socket.socket(trio.socket.AF_UNIX)
    await socket.bind(str(folder / ".s.PGSQL.5432"))
    socket.listen()
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, proxy.serve, [trio.SocketListener(socket)])
        try:
            yield proxy
        finally:
            nursery.cancel_scope.cancel()
