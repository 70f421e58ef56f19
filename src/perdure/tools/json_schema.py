"""JSON schemas as data: tidied, described in words, and answered with a small fitting example.

Pure: knows no validator. Every text made here can reach a model, so it depends on the schema alone.
"""

import json
from collections.abc import Callable
from typing import Any

from perdure.contracts.contract import JsonObject, JsonValue, canonical

_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = (
    "items",
    "additionalProperties",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
    "contentSchema",
)
_BOUNDS = (
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minLength",
    "maxLength",
    "pattern",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
)
_DEEPEST_EXAMPLE = 8
_MOST_CHOICES = 8

_FORMAT_EXAMPLES = {
    "date-time": "2025-01-31T12:00:00Z",
    "date": "2025-01-31",
    "time": "12:00:00Z",
    "duration": "PT1H",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "email": "name@example.com",
    "uri": "https://example.com/",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
}


def subschemas(schema: JsonObject, change: Callable[[JsonValue], JsonValue]) -> JsonObject:
    """A copy in which each schema directly inside is replaced; data (`enum`, `default`) stays as it is."""
    changed: JsonObject = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            changed[key] = {name: change(inner) for name, inner in value.items()}
        elif key in _LISTED and isinstance(value, list):
            changed[key] = [change(inner) for inner in value]
        elif key in _SINGLE and isinstance(value, dict):
            changed[key] = change(value)
        else:
            changed[key] = value
    return changed


def tidy(schema: JsonObject) -> JsonObject:
    """The schema without generated titles, with a set's default in a fixed order and its top level written out."""
    cleaned: JsonObject = _tidied(schema)
    reference = cleaned.get("$ref")
    if isinstance(reference, str):
        # Providers want `type: object` in the top level itself, which a self-referring model hides behind a reference.
        target = resolve({"$ref": reference}, cleaned)
        rest = {key: value for key, value in cleaned.items() if key != "$ref"}
        cleaned = {**target, **rest}
    return cleaned


def _tidied(schema: JsonValue) -> JsonValue:
    if not isinstance(schema, dict):
        return schema
    cleaned = subschemas(schema, _tidied)
    if isinstance(cleaned.get("title"), str):
        del cleaned["title"]
    if cleaned.get("uniqueItems") is True and isinstance(cleaned.get("default"), list):
        # A set's order differs from process to process; a definition's bytes may not.
        cleaned["default"] = sorted(cleaned["default"], key=canonical)
    return cleaned


def resolve(schema: JsonValue, root: JsonObject) -> JsonObject:
    """The schema itself, or the one inside `root` that it refers to; an empty schema when that cannot be found."""
    for _ in range(20):
        if not isinstance(schema, dict):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = _target(reference, root)
    return {}


def _target(reference: str, root: JsonObject) -> JsonValue:
    if not reference.startswith("#"):
        return {}
    place: JsonValue = root
    for step in reference[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(place, dict) or name not in place:
            return {}
        place = place[name]
    return place


def at(path: tuple[str | int, ...], schema: JsonObject, root: JsonObject) -> JsonObject | None:
    """The schema of the value at `path`; None when the path leaves what can be followed."""
    current = resolve(schema, root)
    if not path:
        return current
    step, rest = path[0], path[1:]
    for branch in (*_list(current, "anyOf"), *_list(current, "oneOf"), *_list(current, "allOf")):
        found = at(path, resolve(branch, root), root)
        if found is not None:
            return found
    if isinstance(step, int):
        places = _list(current, "prefixItems")
        inner = places[step] if step < len(places) else current.get("items")
    else:
        inner = current.get("properties", {}).get(step, current.get("additionalProperties"))
    return at(rest, inner, root) if isinstance(inner, dict) else None


def _list(schema: JsonObject, key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def type_name(value: JsonValue) -> str:
    """The value's JSON type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def describe(schema: JsonValue, root: JsonObject) -> str:
    """What the schema asks for, in a few words: type, choices, bounds."""
    return _bounded(_described(resolve(schema, root), root, 0), 200)


def _described(schema: JsonObject, root: JsonObject, depth: int) -> str:
    if "const" in schema:
        return compact(schema["const"])
    if isinstance(schema.get("enum"), list):
        choices = [compact(choice) for choice in schema["enum"]]
        more = f" or {len(choices) - _MOST_CHOICES} more" if len(choices) > _MOST_CHOICES else ""
        return "one of " + ", ".join(choices[:_MOST_CHOICES]) + more
    for key in ("anyOf", "oneOf"):
        branches = _list(schema, key)
        if branches and depth < 3:
            words = [_described(resolve(branch, root), root, depth + 1) for branch in branches]
            return " or ".join(dict.fromkeys(words))
    return _typed(schema, root, depth)


def _typed(schema: JsonObject, root: JsonObject, depth: int) -> str:
    kind = schema.get("type", "any value")
    words = " or ".join(map(str, kind)) if isinstance(kind, list) else str(kind)
    items = schema.get("items")
    if words == "array" and isinstance(items, dict) and depth < 3:
        inner = resolve(items, root)
        if inner:
            words = f"array of ({_described(inner, root, depth + 1)})"
    if words == "object":
        words += _fields(schema)
    if isinstance(schema.get("format"), str):
        words += f" ({schema['format']})"
    return words + "".join(f", {key} {compact(schema[key])}" for key in _BOUNDS if key in schema)


def _fields(schema: JsonObject) -> str:
    """The fields an object must have, a discriminating constant with its value."""
    known = schema.get("properties", {})
    words = []
    for name in _list(schema, "required")[:_MOST_CHOICES]:
        inner = known.get(name)
        constant = isinstance(inner, dict) and "const" in inner
        words.append(f"{name} {compact(inner['const'])}" if constant else str(name))
    return f" {{{', '.join(words)}}}" if words else ""


def compact(value: JsonValue, limit: int = 80) -> str:
    """The value as JSON on one line, cut at `limit` characters."""
    return _bounded(json.dumps(value, ensure_ascii=False, separators=(", ", ": "), default=repr), limit)


def _bounded(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def example(schema: JsonObject) -> JsonValue:
    """A small value meant to fit; the caller checks that it does (a pattern, say, cannot be met from its text)."""
    return _example(schema, schema, 0)


def _example(schema: JsonValue, root: JsonObject, depth: int) -> JsonValue:
    current = resolve(schema, root)
    if depth > _DEEPEST_EXAMPLE:
        return None
    if "const" in current:
        return current["const"]
    for key in ("examples", "enum"):
        if _list(current, key):
            return current[key][0]
    for key in ("anyOf", "oneOf"):
        branches = _list(current, key)
        if branches:
            return _example(branches[0], root, depth + 1)
    kind = current.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind is None:
        kind = "object" if "properties" in current or "required" in current else "string"
    return _example_of_type(str(kind), current, root, depth)


def _example_of_type(kind: str, schema: JsonObject, root: JsonObject, depth: int) -> JsonValue:
    if kind == "object":
        known = schema.get("properties", {})
        return {name: _example(known.get(name, {}), root, depth + 1) for name in _list(schema, "required")}
    if kind == "array":
        places = _list(schema, "prefixItems")
        filled = [_example(place, root, depth + 1) for place in places]
        count = min(int(schema.get("minItems", len(filled))), 10)
        return filled + [_example(schema.get("items", {}), root, depth + 1) for _ in range(count - len(filled))]
    if kind in ("integer", "number"):
        return _example_number(schema)
    if kind == "string":
        text = _FORMAT_EXAMPLES.get(str(schema.get("format")), "text")
        text += "x" * (min(int(schema.get("minLength", 0)), 100) - len(text))
        return text[: int(schema.get("maxLength", len(text)))]
    return True if kind == "boolean" else None


def _example_number(schema: JsonObject) -> int | float:
    number: int | float = schema.get("multipleOf", 1)
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is not None and number <= low:
        number = low if "minimum" in schema else low + 1
    if high is not None and number >= high:
        number = high if "maximum" in schema else high - 1
    return number
