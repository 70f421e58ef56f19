"""A stand-in for a provider: its protocol over a real socket, scripted replies, refusals by its rules."""

import asyncio
import importlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from perdure.contracts.contract import JsonObject
from perdure.errors import ConfigurationError
from perdure.testing.replies import REFUSALS, Reply, ScriptExhaustedError, reply_number
from perdure.testing.wire.faults import CutAfter, Fault, FaultPlan, Reindex, Repeat, Stall, Status, reindexed
from perdure.testing.wire.http import AbortConnection, HangConnection, HttpRequest, HttpResponse, HttpServer
from perdure.testing.wire.protocol import Answer, Received, Refusal, WireProtocol

PROTOCOLS = {"openai-chat": "perdure.testing.wire.openai_chat"}
"""The module of each known protocol; each has a `PROTOCOL`, a `PREFIX` (the path a base URL ends in), its `RULES`, and
`INDEXES` (the fields of a chunk that say which item a fragment belongs to)."""

Replies = Sequence[Reply] | Callable[[JsonObject], Reply]

_SECRET_HEADERS = ("authorization", "x-api-key", "api-key", "x-goog-api-key", "cookie")
_SECRET_PARAMETERS = ("key", "api_key", "access_token")


class WireServer:
    """A running stand-in; made by `serve`."""

    def __init__(
        self, protocol: str, replies: Replies, faults: Sequence[Fault], *, chunk: int, delay_ms: int, log: Path | None
    ) -> None:
        if protocol not in PROTOCOLS:
            known = ", ".join(sorted(PROTOCOLS))
            raise ConfigurationError(f"there is no wire protocol {protocol!r}", next=f"known are: {known}")
        module = importlib.import_module(PROTOCOLS[protocol])
        self._protocol: WireProtocol = module.PROTOCOL
        self._prefix: str = module.PREFIX
        self._indexes: tuple[str, ...] = module.INDEXES
        self._replies, self._faults, self._log = replies, FaultPlan(tuple(faults)), log
        self._chunk, self._delay_s = chunk, delay_ms / 1000
        self._asked: Counter[int] = Counter()
        self._http = HttpServer(self._handle)
        self.base_url = ""
        """What a client takes as its base URL."""
        self.requests: list[Received] = []
        """Every request, in order, the refused ones included."""
        self.refusals: list[Refusal] = []
        """Every refusal, in order; those a fault asked for have the rule `fault`."""
        self.warnings: list[str] = []
        """What the service takes and no well-kept client sends."""

    async def start(self, port: int = 0) -> None:
        """Listens on 127.0.0.1."""
        self.base_url = f"http://127.0.0.1:{await self._http.start(port)}{self._prefix}"

    async def stop(self) -> None:
        """Stops listening and ends every connection."""
        await self._http.stop()

    async def _handle(self, request: HttpRequest) -> HttpResponse:
        number = len(self.requests) + 1
        headers = {name: value for name, value in request.headers.items() if name not in _SECRET_HEADERS}
        query = {name: value for name, value in request.query.items() if name not in _SECRET_PARAMETERS}
        received = Received(number, request.method, request.path, headers, request.body, query)
        self.requests.append(received)
        fault = self._faults.take(number)
        if isinstance(fault, Status):
            return self._status(received, fault)
        checked = self._checked(request, received)
        if isinstance(checked, Refusal):
            return self._refuse(received, checked)
        received = self.requests[-1] = replace(received, body=checked)
        self.warnings.extend(self._protocol.warnings(checked))
        try:
            reply, reply_no = self._reply(checked)
        except ScriptExhaustedError as error:
            return self._refuse(received, Refusal("script_exhausted", str(error), code="script_exhausted"))
        except Exception as error:  # noqa: BLE001 (the script is the caller's; its failure must show at the client)
            found = f"the script raised {type(error).__name__}: {error}"
            return self._refuse(received, Refusal("script_failed", found, code="script_failed"))
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        if reply.fault in REFUSALS and reply.fault != "protocol":
            return self._refuse(received, self._protocol.refused(reply))
        answer = self._protocol.answer(reply, checked, reply_no, self._chunk)
        self._note(received, 200, None, reply_no)
        return _response(_disturbed(answer, fault, self._indexes), fault)

    def _checked(self, request: HttpRequest, received: Received) -> Refusal | JsonObject:
        if request.too_large:
            return Refusal("body_too_large", "The request body is too large.", status=413)
        keys = {name: value for name, value in request.headers.items() if name in _SECRET_HEADERS}
        keys |= {f"?{name}": value for name, value in request.query.items() if name in _SECRET_PARAMETERS}
        return self._protocol.check(received, keys)

    def _reply(self, body: JsonObject) -> tuple[Reply, int]:
        number = self._protocol.number(body)
        attempt = self._asked[number]
        self._asked[number] += 1
        return reply_number(self._replies, number, body).at(attempt), number

    def _refuse(self, received: Received, refusal: Refusal) -> HttpResponse:
        self.refusals.append(refusal)
        self._note(received, refusal.status, refusal.rule, None)
        headers = {"Content-Type": "application/json", **refusal.headers}
        return HttpResponse(refusal.status, self._protocol.error(refusal), headers)

    def _status(self, received: Received, fault: Status) -> HttpResponse:
        message = f"This answer of status {fault.status} was scripted."
        refusal = Refusal("fault", message, fault.status, type="scripted_fault", headers=fault.headers)
        if fault.body is None:
            return self._refuse(received, refusal)
        self.refusals.append(refusal)
        self._note(received, fault.status, "fault", None)
        kind = "text/html" if fault.body.lstrip().startswith("<") else "application/json"
        return HttpResponse(fault.status, fault.body.encode(), {"Content-Type": kind, **fault.headers})

    def _note(self, received: Received, status: int, rule: str | None, reply: int | None) -> None:
        """One line of the request log, written before the answer goes out."""
        if self._log is None:
            return
        line = {
            "number": received.number,
            "method": received.method,
            "path": received.path,
            "status": status,
            "rule": rule,
            "reply": reply,
            "body": received.body,
        }
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _disturbed(answer: Answer, fault: Fault | None, indexes: tuple[str, ...]) -> Answer:
    """The answer with a piece sent twice, or with its indexes changed, as the fault says."""
    if isinstance(fault, Repeat) and fault.piece < len(answer.pieces):
        pieces = (*answer.pieces[: fault.piece + 1], *answer.pieces[fault.piece :])
        return replace(answer, pieces=pieces)
    if isinstance(fault, Reindex):
        return replace(answer, pieces=tuple(reindexed(piece, indexes, fault.index) for piece in answer.pieces))
    return answer


def _response(answer: Answer, fault: Fault | None) -> HttpResponse:
    headers = {"Content-Type": answer.content_type}
    whole = b"".join(answer.pieces)
    breaks = fault if isinstance(fault, CutAfter | Stall) else None
    if breaks is None and answer.ending == "end" and len(answer.pieces) == 1:
        return HttpResponse(200, whole, headers)
    limit = None if breaks is None else breaks.bytes
    ending = answer.ending
    if breaks is not None and limit is not None and limit <= len(whole):
        ending = "hang" if isinstance(breaks, Stall) else "end" if breaks.clean else "abort"
    return HttpResponse(200, _body(answer.pieces, limit, ending), headers)


async def _body(pieces: Sequence[bytes], limit: int | None, ending: str) -> AsyncIterator[bytes]:
    left = limit
    for piece in pieces:
        if left is None:
            yield piece
        elif left > 0:
            yield piece[:left]
            left -= len(piece)
    if ending == "end":
        return
    # What was written must have left the process before the connection is torn, or the client would see none of it.
    await asyncio.sleep(0.05)
    raise AbortConnection if ending == "abort" else HangConnection


@asynccontextmanager
async def serve(
    protocol: str,
    replies: Replies,
    faults: Sequence[Fault] = (),
    *,
    port: int = 0,
    chunk: int = 16,
    delay_ms: int = 0,
    log: Path | None = None,
) -> AsyncIterator[WireServer]:
    """A stand-in for a provider while the block runs.

    Args:
        protocol: one of `PROTOCOLS`.
        replies: by number (the count of the model's turns in the request), or a function of the decoded body.
        faults: what goes wrong on the way.
        port: 0 picks a free one of 127.0.0.1.
        chunk: characters per fragment of a streamed reply; 0: in one piece.
        delay_ms: wait before each reply, in milliseconds.
        log: a file that gets one JSON line per request.

    Raises:
        ConfigurationError: an unknown protocol, or h11 is not installed.
    """
    server = WireServer(protocol, replies, faults, chunk=chunk, delay_ms=delay_ms, log=log)
    await server.start(port)
    try:
        yield server
    finally:
        await server.stop()
