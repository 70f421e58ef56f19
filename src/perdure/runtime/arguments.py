"""Reading what a model wrote: text made storable, and a call's arguments turned into an object or a fault.

Owns nothing about schemas; whether an object fits its tool is asked later.
"""

import json
import math
import re
from typing import Any

from perdure.contracts.contract import JsonObject
from perdure.contracts.messages import CallFault

RAW_LIMIT = 400
"""Characters of faulty arguments that are kept for the diagnostic."""

_INT64 = range(-(2**63), 2**63)
_DEEPEST = 200
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def storable(text: str) -> str:
    """The text with surrogate pairs joined and each lone surrogate replaced by U+FFFD, so that UTF-8 can hold it."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def size(text: str) -> int:
    """How many bytes the text takes in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def parse_arguments(text: str, *, cut: bool, closed: bool) -> tuple[JsonObject, CallFault | None]:
    """The arguments as an object, or an empty object and what is wrong with them.

    An empty text is an empty object, as some providers write it for a call without arguments. Of a key given twice the
    last one counts. A number JSON cannot hold, or an integer beyond 64 bits, makes the text no JSON.

    Args:
        text: everything received for the call.
        cut: the output limit ended the reply, so broken or missing JSON means a cut and not a slip.
        closed: the provider itself closed the call, so that an empty text is known to be all of it.
    """
    if not text.strip():
        return {}, CallFault.CUT if cut and not closed else None
    try:
        value = _decoder.decode(text)
        if text.count("[") + text.count("{") > _DEEPEST:
            _check_depth(value, 0)
    except (ValueError, RecursionError):
        return {}, CallFault.CUT if cut else CallFault.NOT_JSON
    if not isinstance(value, dict):
        return {}, CallFault.NOT_AN_OBJECT
    if _SURROGATE_ESCAPE.search(text):
        return _storable_value(value), None
    return value, None


def _integer(digits: str) -> int:
    value = int(digits)
    if value not in _INT64:
        raise ValueError("an integer beyond 64 bits")
    return value


def _real(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("a number beyond a double")
    return value


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_int=_integer, parse_float=_real, parse_constant=_constant)


def _check_depth(value: Any, depth: int) -> None:
    if depth > _DEEPEST:
        raise ValueError(f"nesting deeper than {_DEEPEST} levels")
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return
    for item in value:
        _check_depth(item, depth + 1)


def _storable_value(value: Any) -> Any:
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, list):
        return [_storable_value(item) for item in value]
    if isinstance(value, dict):
        return {storable(key): _storable_value(item) for key, item in value.items()}
    return value
