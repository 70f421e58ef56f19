"""What is wrong with a value, in words of ours: the text a model reads after it sent something that does not fit.

The words are templates over structured errors, never a library's messages, so an upgrade of a library changes no text.
Problems are found by the JSON schema; what a schema cannot say (a validator of the user's own) comes from pydantic.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from perdure.contracts.contract import JsonObject, JsonValue
from perdure.tools import json_schema

if TYPE_CHECKING:
    import pydantic
    from jsonschema.exceptions import ValidationError  # type: ignore[import-untyped]

MAX_PROBLEMS = 5
"""Problems named in one diagnostic."""
MAX_VALUE = 80
"""Characters shown of a received value."""
MAX_EXAMPLE = 300
"""Characters of the correction example."""

Path = tuple[str | int, ...]


def explain(what: str, lines: Sequence[str], schema: JsonObject, fits: Callable[[JsonValue], bool]) -> str:
    """The whole diagnostic: one line for each problem, then one example that fits."""
    shown = [f"- {line}" for line in lines[:MAX_PROBLEMS]]
    if len(lines) > MAX_PROBLEMS:
        shown.append(f"- and {len(lines) - MAX_PROBLEMS} more")
    return "\n".join([what, *shown, _correction(schema, fits)])


def _correction(schema: JsonObject, fits: Callable[[JsonValue], bool]) -> str:
    value = json_schema.example(schema)
    text = json_schema.compact(value, MAX_EXAMPLE + 1)
    if len(text) <= MAX_EXAMPLE and fits(value):
        return f"Example that fits: {text}"
    required = schema.get("required")
    names = ", ".join(required) if isinstance(required, list) else ""
    return f"Required fields: {names[:MAX_EXAMPLE] or 'none'}"


def line(path: Path, expected: str, value: JsonValue) -> str:
    """One problem: the field, what it should be, what came."""
    shown = "" if value is None else f" {json_schema.compact(value, MAX_VALUE)}"
    return f"{field(path)}: expected {expected}; received {json_schema.type_name(value)}{shown}"


def field(path: Path) -> str:
    """A place inside the value, as `items[0].name`; `(the whole value)` for the value itself."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text[:120] or "(the whole value)"


def schema_lines(schema: JsonObject, value: JsonValue) -> list[str]:
    """The problems a JSON schema finds, one line each; empty when the value fits.

    Raises:
        Exception: the schema uses a pattern or a reference that cannot be followed here.
    """
    errors = checker(schema).iter_errors(value)
    leaves = [leaf for error in errors for leaf in _leaves(error)]
    leaves.sort(key=lambda leaf: ([str(step) for step in leaf.absolute_path], str(leaf.validator)))
    return _unique(text for leaf in leaves for text in _lines_of(leaf, schema))


def checker(schema: JsonObject) -> Any:
    """A Draft 2020-12 validator that fetches nothing from a network."""
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
    from referencing.jsonschema import EMPTY_REGISTRY

    return Draft202012Validator(schema, registry=EMPTY_REGISTRY)


def _unique(lines: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(lines))


def _leaves(error: "ValidationError") -> Iterator["ValidationError"]:
    """The error itself, or what is wrong inside the one branch of an `anyOf` that was meant."""
    branches: dict[Any, list[ValidationError]] = {}
    for inner in error.context or ():
        branches.setdefault(inner.relative_schema_path[0], []).append(inner)
    meant = [errors for errors in branches.values() if not any(_misses(inner) for inner in errors)]
    if len(meant) == 1:
        for inner in meant[0]:
            yield from _leaves(inner)
    else:
        yield error


def _misses(error: "ValidationError") -> bool:
    """Whether a branch was not meant: its type is another, or its discriminating constant is."""
    depth = len(error.relative_path)
    return (depth == 0 and error.validator in ("type", "enum", "const")) or (depth == 1 and error.validator == "const")


def _lines_of(error: "ValidationError", root: JsonObject) -> Iterator[str]:
    path: Path = tuple(error.absolute_path)
    schema: Any = error.schema
    if error.validator == "required":
        for name in error.validator_value:
            if name not in error.instance:
                expected = json_schema.describe(schema.get("properties", {}).get(name, {}), root)
                yield f"{field((*path, name))}: expected {expected}; received nothing (the field is required)"
    elif error.validator in ("additionalProperties", "unevaluatedProperties") and error.validator_value is False:
        known = list(schema.get("properties", {}))
        yield from (_unknown(path, name, known, error.instance[name]) for name in error.instance if name not in known)
    elif isinstance(schema, dict):
        yield line(path, json_schema.describe(schema, root), error.instance)
    else:
        yield line(path, "nothing here", error.instance)


def _unknown(path: Path, name: str, known: list[str], value: JsonValue) -> str:
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else f"known fields: {', '.join(known) or 'none'}"
    return line((*path, name), f"no such field ({hint[:200]})", value)


def pydantic_lines(error: "pydantic.ValidationError", schema: JsonObject, value: JsonValue) -> list[str]:
    """The problems pydantic found, in our words; the text of a user's own validator is the user's and is kept."""
    from typing import get_args

    from pydantic_core.core_schema import ErrorType

    known = frozenset(get_args(ErrorType))
    lines = []
    for found in error.errors(include_url=False):
        path, received = _received(found["loc"], value)
        expected = json_schema.at(path, schema, schema)
        words = json_schema.describe(expected, schema) if expected else "a fitting value"
        reason = _own_reason(found, known)
        lines.append(line(path, words, received) + (f" ({reason})" if reason else ""))
    return _unique(lines)


def _received(location: Sequence[str | int], value: JsonValue) -> tuple[Path, JsonValue]:
    """Follows a location through the value, leaving out steps that name a branch of a union and no field."""
    path: list[str | int] = []
    for step in location:
        inside = step in value if isinstance(value, dict) else isinstance(value, list) and step in range(len(value))
        if inside:
            value = value[step]
            path.append(step)
    return tuple(path), value


def _own_reason(found: Any, known: frozenset[str]) -> str:
    kind = found["type"]
    if kind in ("value_error", "assertion_error"):
        return " ".join(str(found.get("ctx", {}).get("error", "")).split())[:200]
    return "" if kind in known else " ".join(str(found["msg"]).split())[:200]
