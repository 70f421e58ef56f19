"""Structured answers: the schema of an output model, and the check of what a model proposes.

Also the check of answers to waits. A Python type is checked by the library that owns it, a plain schema by jsonschema
(Draft 2020-12); the words are those of tool arguments.
"""

import typing
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from perdure.contracts.contract import JsonObject, JsonValue
from perdure.contracts.values import to_json
from perdure.errors import ConfigurationError, ValueFormError
from perdure.tools import diagnosis, json_schema

ANSWER_TEXT = "The answer does not fit its schema:"


class AnswerCheck:
    """Checks structured answers against an output model or a JSON schema.

    Attributes:
        schema: JSON schema of the answer, always of an object.

    Raises:
        ConfigurationError: the model has no JSON schema, the schema is invalid, or it is not of an object.
    """

    def __init__(self, output: object) -> None:
        name = getattr(output, "__qualname__", type(output).__qualname__)
        self._validate: Callable[[bytes], object] | None = None
        if isinstance(output, dict):
            name = "output schema"
            self.schema = check_schema(output, name)
        elif not isinstance(output, type) and typing.get_origin(output) is None:
            raise ConfigurationError(
                f"it is {output!r:.80}", where="output", next="give a pydantic model, a dataclass, or a JSON schema"
            )
        elif _is_msgspec(output):
            self.schema, self._validate = _msgspec_model(output, name)
        else:
            self.schema, self._validate = _pydantic_model(output, name)
        if self.schema.get("type") != "object":
            kind = json_schema.compact(self.schema.get("type"))
            raise ConfigurationError(
                f"it is of type {kind} at its top level",
                where=f"output {name}",
                next="an answer is an object: put the value into a field of one",
            )

    def problem(self, value: JsonValue) -> str | None:
        """What is wrong with the answer, for the model to read; None when it fits."""
        if self._validate is None:
            return schema_problem(self.schema, value)
        try:
            self._validate(msgspec.json.encode(value))
        except Exception as error:  # noqa: BLE001 - whatever a validator of the user's raises is a problem of the answer
            lines = _problem_lines(self.schema, value, error)
            return diagnosis.explain(ANSWER_TEXT, lines, self.schema, self._fits)
        return None

    def _fits(self, value: JsonValue) -> bool:
        assert self._validate is not None
        try:
            self._validate(msgspec.json.encode(value))
        except Exception:  # noqa: BLE001 - whatever a validator raises, the value does not fit
            return False
        return True


def schema_problem(schema: JsonObject, value: JsonValue) -> str | None:
    """What is wrong with a value by a JSON schema (Draft 2020-12); None when it fits."""
    try:
        lines = diagnosis.schema_lines(schema, value)
    except Exception as error:  # noqa: BLE001 - a recorded schema may hold what no definition check saw
        return f"The schema cannot be used: {type(error).__name__}: {str(error)[:200]}"
    if not lines:
        return None
    return diagnosis.explain(
        ANSWER_TEXT, lines, schema, lambda candidate: not diagnosis.schema_lines(schema, candidate)
    )


def check_schema(schema: JsonObject, where: str) -> JsonObject:
    """The schema as plain JSON, once it is sure that values can be checked by it.

    Raises:
        ConfigurationError: it is no valid Draft 2020-12 schema, or has a reference that leads outside or nowhere.
    """
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
    from jsonschema.exceptions import SchemaError  # type: ignore[import-untyped]

    try:
        plain: JsonObject = to_json(schema)
        Draft202012Validator.check_schema(plain)
    except ValueFormError as error:
        raise ConfigurationError(
            f"it is no JSON ({error.found} at {error.path})", where=where, next="use JSON types"
        ) from error
    except SchemaError as error:
        raise ConfigurationError(
            f"it is no valid JSON schema at {error.json_path} ({error.message[:200]})",
            where=where,
            next="correct that keyword",
        ) from error
    for problem in _dead_ends(plain, plain):
        raise ConfigurationError(problem, where=where, next="correct it; nothing is fetched from outside the schema")
    return plain


def _dead_ends(schema: JsonValue, root: JsonObject) -> Iterator[str]:
    """References that a check could not follow."""
    if not isinstance(schema, dict):
        return
    for key in ("$ref", "$dynamicRef"):
        reference = schema.get(key)
        if isinstance(reference, str) and not _leads_somewhere(reference, root):
            yield f"the reference {reference!r:.80} leads nowhere inside it"
    inside: list[JsonValue] = []
    json_schema.subschemas(schema, inside.append)
    for inner in inside:
        yield from _dead_ends(inner, root)


def _leads_somewhere(reference: str, root: JsonObject) -> bool:
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    if not reference.startswith("#"):
        return False
    try:
        Registry().resolver_with_root(DRAFT202012.create_resource(root)).lookup(reference)
    except Unresolvable:
        return False
    return True


def _problem_lines(schema: JsonObject, value: JsonValue, error: Exception) -> list[str]:
    from perdure.tools.parameters import problem_lines

    return problem_lines(schema, value, error)


def _is_msgspec(output: Any) -> bool:
    """Whether msgspec reads the type: its own records, and the standard TypedDict, which pydantic refuses on 3.11."""
    return (isinstance(output, type) and issubclass(output, msgspec.Struct)) or typing.is_typeddict(output)


def _msgspec_model(output: Any, name: str) -> tuple[JsonObject, Callable[[bytes], object]]:
    try:
        schema = json_schema.tidy(msgspec.json.schema(output))
        decoder = msgspec.json.Decoder(output, strict=True)
    except Exception as error:
        raise _no_schema(name, error) from error
    return schema, decoder.decode


def _pydantic_model(output: Any, name: str) -> tuple[JsonObject, Callable[[bytes], object]]:
    from pydantic import TypeAdapter

    from perdure.tools.parameters import QuietSchema

    try:
        adapter: TypeAdapter[Any] = TypeAdapter(output)
        schema = json_schema.tidy(adapter.json_schema(schema_generator=QuietSchema))
    except Exception as error:
        raise _no_schema(name, error) from error
    return schema, lambda data: adapter.validate_json(data, strict=True)


def _no_schema(name: str, error: Exception) -> ConfigurationError:
    reason = " ".join(str(error).split())[:160] or type(error).__name__
    return ConfigurationError(
        f"it has no JSON schema ({reason})",
        where=f"output {name}",
        next="give a pydantic model, a dataclass, a msgspec Struct, a TypedDict, or a JSON schema",
    )
