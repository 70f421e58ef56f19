"""Tool schemas in the form a provider takes, never in one that accepts something else."""

from typing import Any

from perdure.contracts.contract import JsonObject


def object_schema(schema: JsonObject) -> JsonObject:
    """The schema with `properties` spelled out: an object without any is refused (github-mcp-server#1548)."""
    if schema.get("type") == "object" and "properties" not in schema:
        return {**schema, "properties": {}}
    return schema


def inlined(schema: JsonObject) -> JsonObject:
    """The schema with each local `$ref` replaced by what it points at, for a provider that reads none.

    A definition that contains itself cannot be written out: its references and definitions stay as they are.
    """
    definitions = {
        f"#/{word}/{name}": form
        for word in ("$defs", "definitions")
        for name, form in (schema.get(word) or {}).items()
        if isinstance(schema.get(word), dict)
    }
    recursive = {name for name in definitions if _leads_to(name, definitions[name], definitions, frozenset())}
    if not definitions:
        return schema
    kept = {word for word in ("$defs", "definitions") if any(name.startswith(f"#/{word}/") for name in recursive)}
    body = {name: value for name, value in schema.items() if name not in ("$defs", "definitions") or name in kept}
    made: JsonObject = _replaced(body, {name: form for name, form in definitions.items() if name not in recursive})
    return made


def _leads_to(name: str, form: Any, definitions: JsonObject, seen: frozenset[str]) -> bool:
    if isinstance(form, dict):
        ref = form.get("$ref")
        if isinstance(ref, str):
            if ref == name:
                return True
            if ref in definitions and ref not in seen and _leads_to(name, definitions[ref], definitions, seen | {ref}):
                return True
        return any(_leads_to(name, value, definitions, seen) for value in form.values())
    return isinstance(form, list) and any(_leads_to(name, value, definitions, seen) for value in form)


def _replaced(form: Any, definitions: JsonObject) -> Any:
    if isinstance(form, list):
        return [_replaced(value, definitions) for value in form]
    if not isinstance(form, dict):
        return form
    ref = form.get("$ref")
    if isinstance(ref, str) and ref in definitions:
        beside = {name: _replaced(value, definitions) for name, value in form.items() if name != "$ref"}
        pointed = _replaced(definitions[ref], definitions)
        # Words beside a reference hold as well as it does (JSON Schema 2020-12, 8.2.3.1).
        clash = isinstance(pointed, dict) and pointed.keys() & beside.keys() - {"description", "title", "default"}
        return {"allOf": [pointed], **beside} if clash else {**pointed, **beside}
    return {name: _replaced(value, definitions) for name, value in form.items()}
