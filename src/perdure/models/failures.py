"""What went wrong at a provider, told in one vocabulary: `ModelError.kind`.

Owns how a status, an error object, a wait and a text become a `ModelError`. A protocol brings only its own codes, as a
`Dialect`. Imports no SDK.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import NamedTuple

from perdure.errors import RETRYABLE_KINDS, ModelError, StreamFaultError

_NEXT = {
    "auth": "check the API key and what it may use",
    "quota": "add credit or raise the spending limit; waiting does not help",
    "context_too_long": "send less: shorten the conversation or the tool results in it",
    "not_found": "check the model's name and the base URL",
    "refused": "the provider's content filter refused the request",
    "protocol": "check that the base URL leads to the provider and not to a proxy or a web page",
}

_KIND_BY_STATUS = {
    401: "auth",
    402: "quota",
    403: "auth",
    404: "not_found",
    405: "protocol",
    408: "timeout",
    409: "overloaded",
    413: "context_too_long",
    429: "rate_limited",
    504: "timeout",
}

TEXT_LIMIT = 500
"""Characters kept of what a provider says."""
_KEY = re.compile(r"\b(?:sk-[\w*.-]{4,}|AIza[\w-]{8,})")


@dataclass(frozen=True)
class Dialect:
    """How one protocol says what went wrong."""

    kinds: Mapping[str, str]
    """The kind of each code and type of its error objects."""
    phrases: tuple[tuple[str, str], ...] = ()
    """Words of a message and the kind they mean, where the protocol has no code for it. Looked at first, in order."""
    statuses: Mapping[int, str] = field(default_factory=dict)
    """The kind of a status, where it is not the usual one."""
    next: Mapping[str, str] = field(default_factory=dict)
    """What to do, by kind, where the protocol knows better."""

    def advice(self, kind: str) -> str:
        """What to do about an error of this kind; empty when there is nothing to say."""
        return self.next.get(kind, _NEXT.get(kind, ""))


class _Said(NamedTuple):
    """What the provider's error object says, as far as there is one."""

    message: str
    codes: tuple[str, ...]
    looks: str
    """What the body is when it is no error object: `HTML`, `text`, or empty for nothing at all."""
    is_object: bool


def refused(
    dialect: Dialect, status: int, body: str, headers: Mapping[str, str], *, target: str, key: str | None
) -> ModelError:
    """A request that was answered with an error status.

    Args:
        dialect: the protocol's own words.
        status: the HTTP status.
        body: the body as it came.
        headers: names in lower case, or a mapping that does not mind.
        target: who was asked, as `provider:name`.
        key: the API key, to be taken out of texts.
    """
    said = _said(_decoded(body))
    kind = _kind(dialect, status, said)
    reason = said.message or (f"a body that is no error object ({said.looks})" if said.looks else "an empty body")
    shown = next(iter(said.codes), "")
    found = f"HTTP {status}: {reason}" + (f" [{shown}]" if shown else "")
    return ModelError(
        kind,
        masked(found, key),
        where=target,
        next=dialect.advice(kind),
        retryable=kind in RETRYABLE_KINDS,
        retry_after_s=retry_after(headers),
    )


def said_inside(dialect: Dialect, body: object, *, target: str, key: str | None) -> ModelError:
    """An error object inside a stream that had begun: final when its kind is, else a broken stream."""
    said = _said(body)
    kind = _named_kind(dialect, said)
    found = masked(f"inside the reply the provider said: {said.message or 'an error without words'}", key)
    if kind is not None and kind not in RETRYABLE_KINDS:
        return ModelError(kind, found, where=target, next=dialect.advice(kind))
    return StreamFaultError(kind or "protocol", found, where=target)


def broken(kind: str, found: str, *, target: str, key: str | None, streaming: bool) -> ModelError:
    """A connection that failed (`connection`) or took too long (`timeout`), before or inside the reply."""
    if streaming:
        return StreamFaultError(kind, masked(f"inside the reply: {found}", key), where=target)
    return ModelError(kind, masked(found, key), where=target, retryable=True)


def unreadable(error: object, *, target: str, key: str | None) -> StreamFaultError:
    """A piece of a stream that is not what the protocol writes."""
    return StreamFaultError("protocol", masked(f"a chunk of the reply cannot be read ({error})", key), where=target)


def refuse_other_content(content_type: str, target: str, *, expected: str = "text/event-stream") -> None:
    """Refuses an answer that is certainly something else: another protocol, or a web page.

    Raises:
        ModelError: `protocol`; not retried, since the address is wrong.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind in ("text/html", "application/json") and kind != expected:
        raise ModelError("protocol", f"the answer is {kind}, not {expected}", where=target, next=_NEXT["protocol"])


def masked(text: str, key: str | None) -> str:
    """The text with the API key, and whatever looks like one, taken out, bounded to 500 characters."""
    if key:
        text = text.replace(key, "[key]")
    return _KEY.sub("[key]", text)[:TEXT_LIMIT]


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds the provider asks to wait, from `retry-after-ms` or `retry-after` (seconds or a date, RFC 9110 10.2.3).

    A date is measured against the response's own `Date`, so that a wrong local clock does not matter. None when there
    is no such header or it makes no sense.
    """
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    given = headers.get("retry-after")
    seconds = _number(given)
    if seconds is not None or given is None:
        return seconds
    until = _date(given)
    if until is None:
        return None
    now = _date(headers.get("date", "")) or datetime.now(UTC)
    return max(0.0, (until - now).total_seconds())


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def _date(text: str) -> datetime | None:
    try:
        value = parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError):
        return None
    return value if value.tzinfo else value.replace(tzinfo=UTC)


def _named_kind(dialect: Dialect, said: _Said) -> str | None:
    low = said.message.lower()
    for words, kind in dialect.phrases:
        if words.lower() in low:
            return kind
    return next((dialect.kinds[code] for code in said.codes if code in dialect.kinds), None)


def _kind(dialect: Dialect, status: int, said: _Said) -> str:
    named = _named_kind(dialect, said)
    if named is not None:
        return named
    known = dialect.statuses.get(status) or _KIND_BY_STATUS.get(status)
    if known is not None:
        return known
    if status >= 500:
        return "overloaded"
    return "bad_request" if said.is_object else "protocol"


def _decoded(text: str) -> object:
    """The decoded body, or its text. An SDK's own error body has often lost which of the two it was."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _said(body: object) -> _Said:
    if isinstance(body, list) and body:  # Gemini wraps its error object in an array when it streams
        body = body[0]
    if isinstance(body, dict):
        inner = body.get("error", body)
        if isinstance(inner, str):
            return _Said(inner, (), "", is_object=True)
        if isinstance(inner, dict):
            message = inner.get("message") or inner.get("detail")
            words = message if isinstance(message, str) else json.dumps(inner)[:TEXT_LIMIT]
            codes = tuple(str(inner[name]) for name in ("code", "type", "status") if inner.get(name))
            return _Said(words, codes, "", is_object=True)
    text = body if isinstance(body, str) else ""
    looks = "" if not text.strip() else "HTML" if text.lstrip()[:1] == "<" else "text"
    return _Said("", (), looks, is_object=False)
