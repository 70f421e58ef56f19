"""The base of every value that crosses a boundary, its one byte form, and the digest of that form.

Owns canonical JSON. Refuses to know any particular contract: those live beside it, by subject.
"""

import hashlib
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import msgspec

JsonValue: TypeAlias = Any
"""What JSON can hold, integers within 64 bits. Typed as Any because a recursive alias costs callers casts, not safety:
values enter through `perdure.contracts.values.to_json`, which checks them."""

JsonObject: TypeAlias = dict[str, Any]

T = TypeVar("T")


class Contract(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An immutable, closed record: an unknown field on input is an error, a default is not written."""


class Fact(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """An immutable record read back from a journal: a field added by a later release of the same schema version is
    ignored.

    The search for cycles passes it by (a long journal is hundreds of thousands of these): it holds what JSON can hold,
    which leads back to nothing.
    """


canonical: Callable[[object], bytes] = msgspec.json.Encoder(order="sorted").encode
"""The one byte form of a value: JSON in UTF-8 with sorted keys and no white space.

Not-a-number is the caller's to keep out (`values.to_json` does); this encoder would write it as null.
"""


def without_defaults(value: object) -> object:
    """A record as it is written, less every field that equals its default. The encoder leaves out a field that holds
    the default object itself: an equal word or number from a file is another object and would be written."""
    if isinstance(value, msgspec.Struct):
        fields = msgspec.structs.fields(value)
        kept = {field.encode_name: getattr(value, field.name) for field in fields if not _is_default(value, field)}
        return {name: without_defaults(one) for name, one in kept.items()}
    return value


def _is_default(value: msgspec.Struct, field: msgspec.structs.FieldInfo) -> bool:
    present = getattr(value, field.name)
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return type(present) is type(default) and bool(present == default)


def content_digest(data: bytes) -> str:
    """SHA-256 of the bytes, in lower-case hex (64 characters)."""
    return hashlib.sha256(data).hexdigest()


def value_digest(value: object) -> str:
    """`content_digest` of the canonical form."""
    return content_digest(canonical(value))
