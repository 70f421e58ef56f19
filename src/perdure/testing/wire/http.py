"""A small HTTP/1.1 server over asyncio and h11, for servers that must be able to misbehave."""

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from perdure.errors import ConfigurationError

if TYPE_CHECKING:
    import h11

MAX_BODY_BYTES = 64 << 20
"""A longer request body is answered 413; a guard of this server, no rule of a service."""


class AbortConnection(Exception):
    """Raised by a body: tear the connection."""


class HangConnection(Exception):
    """Raised by a body: send nothing more until the client goes away."""


@dataclass(frozen=True)
class HttpRequest:
    """A whole request."""

    method: str
    path: str
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes
    query: Mapping[str, str] = field(default_factory=dict)
    """The parameters behind the path."""
    too_large: bool = False
    """The body was longer than `MAX_BODY_BYTES` and is not kept."""


@dataclass(frozen=True)
class HttpResponse:
    """A response; a body of bytes is sent with its length, any other in chunks."""

    status: int
    body: bytes | AsyncIterator[bytes]
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[HttpRequest], Awaitable[HttpResponse]]


class HttpServer:
    """Serves one handler on a port of 127.0.0.1."""

    def __init__(self, handler: Handler) -> None:
        if importlib.util.find_spec("h11") is None:
            raise ConfigurationError(
                "the wire servers need h11", where="perdure.testing.wire", next="run: pip install 'perdure[testing]'"
            )
        self._handler = handler
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, port: int = 0) -> int:
        """Listens; returns the port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    async def stop(self) -> None:
        """Stops listening and ends every connection."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connection(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        import h11

        wire = h11.Connection(h11.SERVER)
        # A client that goes away, or writes what is no HTTP, ends its own connection and nothing else.
        with suppress(ConnectionError, AbortConnection, h11.RemoteProtocolError):
            try:
                while (request := await self._request(wire, reader, writer)) is not None:
                    try:
                        await self._respond(wire, writer, await self._handler(request))
                    except HangConnection:
                        await reader.read()
                        raise AbortConnection from None
                    if wire.our_state is not h11.DONE or wire.their_state is not h11.DONE:
                        break
                    wire.start_next_cycle()
            except AbortConnection:
                writer.transport.abort()
                raise
            finally:
                writer.close()

    async def _request(
        self, wire: "h11.Connection", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> HttpRequest | None:
        import h11

        head: h11.Request | None = None
        body, size = bytearray(), 0
        while True:
            event = wire.next_event()
            if event is h11.NEED_DATA:
                if wire.they_are_waiting_for_100_continue:
                    writer.write(wire.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
                wire.receive_data(await reader.read(65536))
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                size += len(event.data)
                if size <= MAX_BODY_BYTES:
                    body += event.data
            elif isinstance(event, h11.EndOfMessage) and head is not None:
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
                path, _, query = head.target.decode("latin-1").partition("?")
                method = head.method.decode("latin-1")
                too_large = size > MAX_BODY_BYTES
                return HttpRequest(method, path, headers, bytes(body), dict(parse_qsl(query)), too_large)
            else:
                return None

    async def _respond(self, wire: "h11.Connection", writer: asyncio.StreamWriter, response: HttpResponse) -> None:
        import h11

        headers = list(response.headers.items())
        if isinstance(response.body, bytes):
            headers.append(("Content-Length", str(len(response.body))))
        writer.write(wire.send(h11.Response(status_code=response.status, headers=headers)) or b"")
        if isinstance(response.body, bytes):
            writer.write(wire.send(h11.Data(data=response.body)) or b"")
        else:
            async for piece in response.body:
                writer.write(wire.send(h11.Data(data=piece)) or b"")
                await writer.drain()
        writer.write(wire.send(h11.EndOfMessage()) or b"")
        await writer.drain()
