"""Which Python values have an agreed JSON form, and what that form is.

Owns the rule of the boundary between what users write and what is stored; nothing is ever dropped or turned into null.
"""

import dataclasses
import math
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any

import msgspec

from perdure.contracts.contract import JsonValue
from perdure.errors import ValueFormError

_MIN_INT, _MAX_INT = -(2**63), 2**63 - 1
_DEEPEST = 200
"""Nesting that JSON readers in use still take; what is deeper is refused, not left to a reader's recursion limit."""
_LONGEST_PATH = 200
"""Characters of a path in an error, which a model may read."""


def to_json(value: object) -> JsonValue:
    """The value's JSON form: JSON types within 64-bit integers as they are, msgspec, pydantic and dataclass records as
    objects, enums as their value, Decimal as its string, an aware datetime as RFC 3339. A tuple is a list; a msgspec
    field that is UNSET is absent, as msgspec itself has it.

    Raises:
        ValueFormError: the value, or one inside it, has no agreed form; `path` says where.
    """
    try:
        return _convert(value, "$", 0)
    except ValueFormError:
        raise
    except Exception as error:  # a container of the user's own that fails while it is walked
        raise _raised("$", error) from error


def _refused(path: str, found: str) -> ValueFormError:
    shown = path if len(path) <= _LONGEST_PATH else path[: _LONGEST_PATH - 3] + "..."
    return ValueFormError(shown, found)


def _convert(value: Any, path: str, depth: int) -> JsonValue:
    if value is None or value is True or value is False:
        return value
    if depth > _DEEPEST:
        raise _refused(path, f"nesting deeper than {_DEEPEST} levels (a value that holds itself?)")
    # The plain types' own methods are named: a subclass with conversions of its own is taken as what it holds.
    if isinstance(value, Enum):
        return _convert(value.value, path, depth + 1)
    if isinstance(value, str):
        return _text(value, path)
    if isinstance(value, int):
        whole = int.__index__(value)
        if not _MIN_INT <= whole <= _MAX_INT:
            raise _refused(path, "an integer beyond 64 bits")
        return whole
    if isinstance(value, float):
        real = float.__float__(value)
        if not math.isfinite(real):
            raise _refused(path, f"the number {real!r}, which JSON cannot hold")
        return real
    if isinstance(value, dict):
        return _mapping(value, path, depth)
    if isinstance(value, list | tuple):
        return [_convert(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
    return _other(value, path, depth)


def _text(value: str, path: str) -> str:
    text = str.__str__(value)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _refused(path, "text with a lone surrogate, which UTF-8 cannot hold") from None
    return text


def _mapping(value: dict[Any, Any], path: str, depth: int) -> dict[str, JsonValue]:
    converted: dict[str, JsonValue] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise _refused(path, f"a key of type {type(key).__name__}; keys must be strings")
        name = _text(key.value if isinstance(key, Enum) and isinstance(key.value, str) else key, path)
        if name in converted:
            raise _refused(path, f"two keys that are both {name!r:.40}")
        converted[name] = _convert(item, f"{path}.{name}", depth + 1)
    return converted


def _other(value: Any, path: str, depth: int) -> JsonValue:
    try:
        form = _form(value, path)
    except ValueFormError:
        raise
    except Exception as error:  # a property, serializer or time zone of the user's value
        raise _raised(path, error) from error
    return _convert(form, path, depth + 1)


def _raised(path: str, error: Exception) -> ValueFormError:
    try:
        message = f": {error!s:.200}"
    except Exception:  # noqa: BLE001 - an error whose own text cannot be had; its type is said
        message = ""
    return _refused(path, f"converting it raised {type(error).__name__}{message}")


def _form(value: Any, path: str) -> Any:
    """One step towards JSON; what it gives is converted in turn."""
    if isinstance(value, type):
        raise _refused(path, f"the class {value.__name__} itself, not a value")
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise _refused(path, f"the number {value!r}, which JSON cannot hold")
        return Decimal.__str__(value)
    if isinstance(value, datetime):
        return _instant(value, path)
    if isinstance(value, msgspec.Struct):
        return _struct(value)
    if dataclasses.is_dataclass(value):
        return _present({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if hasattr(type(value), "model_dump") and hasattr(type(value), "model_fields"):
        # A pydantic record, recognised by shape so that this layer does not import the library. Its own JSON mode would
        # turn what has no agreed form (bytes, sets) into something else, so the fields are taken as they are; without
        # `serialize_as_any` the fields a subclass adds would be dropped where the base is declared.
        return value.model_dump(mode="python", by_alias=True, serialize_as_any=True, warnings=False)
    raise _refused(path, f"a value of type {type(value).__module__}.{type(value).__qualname__}")


def _instant(value: datetime, path: str) -> str:
    offset = value.utcoffset()
    if not isinstance(offset, timedelta):
        raise _refused(path, "a datetime without a time zone")
    if offset % timedelta(minutes=1):
        # RFC 3339 knows offsets in whole minutes only; local mean times have seconds.
        value = value.astimezone(UTC)
    return value.isoformat()


def _struct(value: msgspec.Struct) -> dict[str, Any]:
    config = value.__struct_config__
    tag = {} if config.tag is None else {config.tag_field or "type": config.tag}
    fields = msgspec.structs.fields(value)
    return tag | _present({field.encode_name: getattr(value, field.name) for field in fields})


def _present(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not msgspec.UNSET}
