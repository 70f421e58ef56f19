"""What the OpenAI SDK raises, translated once into `ModelError`.

Every OpenAI protocol of this package shares it. Nothing here imports the SDK before it has raised something.
"""

import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

from perdure.errors import RETRYABLE_KINDS, ModelError, StreamFaultError

_NEXT = {
    "auth": "check the API key and what it may use",
    "quota": "add credit or raise the spending limit; waiting does not help",
    "context_too_long": "send less: shorten the conversation or the tool results in it",
    "not_found": "check the model's name and the base URL",
    "refused": "the provider's content filter refused the request",
    "protocol": "check that the base URL leads to the provider and not to a proxy or a web page",
}

# Codes and types of the provider's error object. Source: the OpenAI API's error codes guide (developers.openai.com,
# docs/guides/error-codes), which says to go by `error.code` where `error.type` is still `insufficient_quota`.
_KIND_BY_CODE = {
    "insufficient_quota": "quota",
    "credit_balance_exhausted": "quota",
    "organization_spend_limit_exceeded": "quota",
    "project_spend_limit_exceeded": "quota",
    "billing_hard_limit_reached": "quota",
    "billing_not_active": "quota",
    "context_length_exceeded": "context_too_long",
    "content_filter": "refused",
    "content_policy_violation": "refused",
    "invalid_api_key": "auth",
    "model_not_found": "not_found",
    "server_is_overloaded": "overloaded",
    "slow_down": "overloaded",
    "rate_limit_exceeded": "rate_limited",
    "rate_limit_error": "rate_limited",
    "server_error": "overloaded",
    "service_unavailable_error": "overloaded",
}

_KIND_BY_STATUS = {
    401: "auth",
    402: "quota",
    403: "auth",
    404: "not_found",
    408: "timeout",
    409: "overloaded",
    413: "context_too_long",
    429: "rate_limited",
}

_KEY = re.compile(r"\bsk-[\w*.-]{4,}")
_TEXT_LIMIT = 500


class _Said(NamedTuple):
    """What the provider's error object says, as far as there is one."""

    message: str
    code: str
    type: str
    is_object: bool


def masked(text: str, key: str | None) -> str:
    """The text with the API key, and whatever looks like one, taken out, bounded to 500 characters."""
    if key:
        text = text.replace(key, "[key]")
    return _KEY.sub("[key]", text)[:_TEXT_LIMIT]


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


def translate(error: Exception, target: str, key: str | None, *, streaming: bool) -> ModelError:
    """The error of one attempt.

    Args:
        error: what the SDK raised.
        target: who was asked, as `provider:name`.
        key: the API key, to be taken out of texts.
        streaming: the reply had begun, so that a lost connection is a broken stream.
    """
    from openai import APIConnectionError, APIStatusError, APITimeoutError

    if isinstance(error, APIStatusError):
        return _status_error(error, target, key)
    if isinstance(error, APITimeoutError):
        kind, found = "timeout", "the provider did not answer in time"
    elif isinstance(error, APIConnectionError):
        kind, found = "connection", f"the connection failed ({error.__cause__ or error})"
    else:
        return _stream_error(error, target, key)
    if streaming:
        return StreamFaultError(kind, masked(f"inside the reply: {found}", key), where=target)
    return ModelError(kind, masked(found, key), where=target, retryable=True)


def _status_error(error: Any, target: str, key: str | None) -> ModelError:
    said = _said(_body(error.response.text))
    kind = _kind(error.status_code, said)
    reason = said.message or (f"a body that is no error object ({said.type})" if said.type else "an empty body")
    found = f"HTTP {error.status_code}: {reason}" + (f" [{said.code}]" if said.code else "")
    return ModelError(
        kind,
        masked(found, key),
        where=target,
        next=_NEXT.get(kind, ""),
        retryable=kind in RETRYABLE_KINDS,
        retry_after_s=retry_after(error.response.headers),
    )


def _kind(status: int, said: _Said) -> str:
    # A single request over the whole per-minute allowance comes as a rate limit, but no wait will let it through.
    if status == 429 and said.message.startswith("Request too large"):
        return "context_too_long"
    named = _KIND_BY_CODE.get(said.code) or _KIND_BY_CODE.get(said.type)
    if named is not None:
        return named
    if status >= 500:
        return "overloaded"
    if status in _KIND_BY_STATUS:
        return _KIND_BY_STATUS[status]
    if not said.is_object:
        return "protocol"
    # Compatible servers say it in words only.
    return "context_too_long" if "maximum context length" in said.message else "bad_request"


def _body(text: str) -> object:
    """The decoded body, or its text. The SDK's own `error.body` has lost which of the two it was."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _said(body: object) -> _Said:
    if isinstance(body, dict):
        inner = body.get("error", body)
        if isinstance(inner, str):
            return _Said(inner, "", "", is_object=True)
        if isinstance(inner, dict):
            message = inner.get("message") or inner.get("detail")
            words = message if isinstance(message, str) else json.dumps(inner)[:_TEXT_LIMIT]
            return _Said(words, str(inner.get("code") or ""), str(inner.get("type") or ""), is_object=True)
    text = body if isinstance(body, str) else ""
    looks = "" if not text else "HTML" if text.lstrip()[:1] == "<" else "text"
    return _Said("", "", looks, is_object=False)


def _stream_error(error: Exception, target: str, key: str | None) -> ModelError:
    """Something inside a stream: an error object in place of a chunk, or bytes that are no chunk at all."""
    from openai import APIError

    if isinstance(error, APIError):
        said = _said(error.body)
        kind = _KIND_BY_CODE.get(said.code) or _KIND_BY_CODE.get(said.type)
        found = masked(f"inside the reply the provider said: {said.message or error.message}", key)
        if kind is not None and kind not in RETRYABLE_KINDS:
            return ModelError(kind, found, where=target, next=_NEXT.get(kind, ""))
        return StreamFaultError(kind or "protocol", found, where=target)
    return StreamFaultError("protocol", masked(f"a chunk of the reply is no JSON ({error})", key), where=target)
