"""What a wire protocol is to the server: it checks requests and writes replies as the real service does."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from perdure.contracts.contract import JsonObject
from perdure.testing.replies import Reply


@dataclass(frozen=True)
class Refusal:
    """A request that was not answered with a reply."""

    rule: str
    """Which rule of the service it broke, or `fault` when the script asked for it."""
    message: str
    status: int = 400
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """A reply as bytes: what is written piece by piece, and how it ends."""

    content_type: str
    pieces: tuple[bytes, ...]
    ending: Literal["end", "hang", "abort"] = "end"
    """`end`: a proper end of the body; `hang`: nothing more ever comes; `abort`: the connection is torn."""


@dataclass(frozen=True)
class Received:
    """A request as it came."""

    number: int
    """1 for the first request of the server."""
    method: str
    path: str
    headers: Mapping[str, str]
    """Names in lower case; the values of those that carry a key are left out."""
    raw: bytes
    query: Mapping[str, str] = field(default_factory=dict)
    """The parameters behind the path; the value of one that carries a key is left out."""
    body: JsonObject = field(default_factory=dict)
    """The decoded body; empty when it was refused before it could be read."""


class WireProtocol(Protocol):
    """One provider's protocol."""

    def check(self, request: Received, keys: Mapping[str, str]) -> Refusal | JsonObject:
        """The decoded body of a request the service would take, or why it would not.

        Args:
            request: without what carries a key.
            keys: the values of headers (by their names in lower case) and of query parameters (as `?name`) that carry
                a key.
        """

    def number(self, body: JsonObject) -> int:
        """How many replies of the model the body holds: the number of the reply it asks for."""

    def warnings(self, body: JsonObject) -> list[str]:
        """What the service takes and no well-kept client sends."""

    def answer(self, reply: Reply, body: JsonObject, number: int, chunk: int) -> Answer:
        """The reply on the wire, streamed or whole as the body asks, in fragments of `chunk` characters."""

    def refused(self, reply: Reply) -> Refusal:
        """The refusal a scripted fault asks for."""

    def error(self, refusal: Refusal) -> bytes:
        """The body of a refusal."""
