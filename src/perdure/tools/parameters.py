"""A function's signature as a pydantic model: the schema a model is shown, and the check of what it sends.

Importing this module imports pydantic; it is imported when the first tool is defined.
"""

import inspect
import types
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import partial
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints
from uuid import UUID

import msgspec
import pydantic
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_jsonable_python

from perdure.calls import CallContext
from perdure.contracts.contract import JsonObject, JsonValue, canonical
from perdure.errors import ToolDefinitionError
from perdure.ports import InvalidArgumentsError
from perdure.tools import diagnosis, json_schema


class QuietSchema(GenerateJsonSchema):
    """Generates a schema; a default without a JSON form is left out of it, without a warning."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}


_PLAIN = (str, int, float, Decimal, datetime, date, time, timedelta, UUID, Enum, NoneType)
"""Values of one piece, whatever they were written as."""


class Parameters:
    """The parameters of one function, as shown to a model and as checked."""

    def __init__(
        self, model: type[pydantic.BaseModel], fields: Mapping[str, str], own: frozenset[str], context: str | None
    ) -> None:
        self.schema = _schema_of(model)
        """JSON schema of the arguments: always an object that takes no unknown field."""
        self.context = context
        """Name of the parameter that takes the call's context, absent from the schema."""
        self._model, self._fields, self._own = model, fields, own
        # Whatever is no plain type of the checking library goes through a function; whose it is cannot be told from
        # here.
        self.runs_functions = "'function-" in repr(model.__pydantic_core_schema__)
        """Whether checking runs functions, such as a validator of the user's."""

    def read(self, tool: str, arguments: JsonObject) -> dict[str, Any]:
        """The arguments as Python values, by parameter. A parameter that was not sent and has a default is left out.

        Raises:
            InvalidArgumentsError: they do not fit.
        """
        try:
            values = self._model.model_validate_json(msgspec.json.encode(arguments), strict=True)
        except Exception as error:  # a ValidationError, or whatever a validator of the user's raised
            raise InvalidArgumentsError(self._explain(tool, arguments, error)) from error
        sent = values.model_fields_set
        return {
            name: getattr(values, key) for key, name in self._fields.items() if key in sent or name not in self._own
        }

    def form(self, arguments: JsonObject) -> JsonObject:
        """What all arguments that come to the same values have in common: the values, less those that are defaults.
        Where checking runs functions, nothing is checked, and a default is known only as the schema shows it."""
        if self.runs_functions:
            return {name: value for name, value in arguments.items() if not self._is_default(name, value)}
        try:
            values = self._model.model_validate_json(msgspec.json.encode(arguments), strict=True)
            fields = type(values).model_fields
            sent = [(name, getattr(values, key), fields[key].default) for key, name in self._fields.items()]
            # What lies deeper stays as it was sent: a default there may be what tells one kind of record from another.
            return {
                name: to_jsonable_python(value) if isinstance(value, _PLAIN) else arguments[name]
                for name, value, default in sent
                if name in arguments and not _same(value, default)
            }
        except Exception:  # noqa: BLE001 - they do not fit, or hold a value that no JSON can show
            return arguments

    def _is_default(self, name: str, value: JsonValue) -> bool:
        shown = self.schema.get("properties", {}).get(name, {})
        return "default" in shown and canonical(shown["default"]) == canonical(value)

    def _explain(self, tool: str, arguments: JsonObject, error: Exception) -> str:
        lines = problem_lines(self.schema, arguments, error)
        return diagnosis.explain(f"The arguments do not fit the tool {tool}:", lines, self.schema, self._fits)

    def _fits(self, value: JsonValue) -> bool:
        return fits(self._model.model_validate_json, value)


def _same(value: object, default: object) -> bool:
    # To Python a truth value equals a number.
    return isinstance(value, bool) == isinstance(default, bool) and bool(value == default)


def problem_lines(schema: JsonObject, value: JsonValue, error: Exception) -> list[str]:
    """The problems behind a failed check: by the schema, else by pydantic's own structured errors."""
    try:
        lines = diagnosis.schema_lines(schema, value)
    except Exception:  # noqa: BLE001 - a pattern written for another engine, say; the structured errors still tell
        lines = []
    if lines:
        return lines
    if isinstance(error, pydantic.ValidationError):
        return diagnosis.pydantic_lines(error, schema, value)
    return [f"(the whole value): checking it raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"]


def fits(validate: Callable[..., Any], value: JsonValue) -> bool:
    """Whether a strict JSON check takes the value."""
    try:
        validate(msgspec.json.encode(value), strict=True)
    except Exception:  # noqa: BLE001 - whatever a validator raises, the value does not fit
        return False
    return True


def parameters_of(function: Callable[..., Any], where: str, names: Mapping[str, Any]) -> Parameters:
    """Reads the signature.

    Args:
        function: the user's function.
        where: names the function in errors.
        names: what was in scope where it was defined, for annotations written as text.

    Raises:
        ToolDefinitionError: a parameter cannot be offered to a model.
    """
    fields: dict[str, Any] = {}
    by_key: dict[str, str] = {}
    own: set[str] = set()
    context = None
    for parameter in _signature(function, where).parameters.values():
        annotation = _annotation(parameter, function, f"{where}, parameter {parameter.name}", names)
        if annotation is CallContext or CallContext in _union_members(annotation):
            if context is not None:
                raise ToolDefinitionError("two parameters take a CallContext", where=where, next="keep one of them")
            context = parameter.name
            continue
        # Fields are numbered and the parameter is the alias, so that no parameter name can clash with pydantic's own.
        key = f"p{len(fields)}"
        by_key[key] = parameter.name
        fields[key] = _field(parameter, annotation)
        if parameter.default is not parameter.empty and not isinstance(parameter.default, FieldInfo):
            own.add(parameter.name)
    return Parameters(_model(fields, by_key, where), by_key, frozenset(own), context)


def _signature(function: Callable[..., Any], where: str) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (ValueError, TypeError, NameError) as error:
        raise ToolDefinitionError(
            f"its signature cannot be read ({error})", where=where, next="wrap it in a function with typed parameters"
        ) from error


def _annotation(
    parameter: inspect.Parameter, function: Callable[..., Any], where: str, names: Mapping[str, Any]
) -> Any:
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise ToolDefinitionError("it is positional-only", where=where, next="remove the / from the signature")
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise ToolDefinitionError(
            "it takes any number of arguments (*args or **kwargs)", where=where, next="name each parameter and its type"
        )
    if parameter.annotation is parameter.empty:
        step = "write its type, as in `job_id: str`"
        if parameter.name in ("self", "cls"):
            step = "decorate the bound method: tool(instance.method)"
        raise ToolDefinitionError("it has no type", where=where, next=step)
    holder = types.SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    known = {"CallContext": CallContext, **names, **_globals(function)}
    try:
        return get_type_hints(holder, known, dict(names), include_extras=True)[parameter.name]
    except Exception as error:
        raise ToolDefinitionError(
            f"its type {parameter.annotation!r} cannot be resolved ({error})",
            where=where,
            next="import that name in the tool's module, outside `if TYPE_CHECKING`",
        ) from error


def _globals(function: Any) -> dict[str, Any]:
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__globals__") and not inspect.ismethod(function):
        function = type(function).__call__
    return getattr(getattr(function, "__func__", function), "__globals__", {})


def _union_members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if type(None) in get_args(annotation) else ()


def _field(parameter: inspect.Parameter, annotation: Any) -> tuple[Any, Any]:
    default = ... if parameter.default is parameter.empty else parameter.default
    if isinstance(default, FieldInfo):
        annotation, default = Annotated[annotation, default], ...
        return annotation, pydantic.Field(alias=parameter.name, validation_alias=parameter.name)
    if default is ...:
        return annotation, pydantic.Field(alias=parameter.name, validation_alias=parameter.name)
    return annotation, pydantic.Field(default, alias=parameter.name, validation_alias=parameter.name)


def _model(fields: dict[str, Any], by_key: Mapping[str, str], where: str) -> type[pydantic.BaseModel]:
    config = pydantic.ConfigDict(extra="forbid")
    try:
        model: type[pydantic.BaseModel] = pydantic.create_model("Arguments", __config__=config, **fields)
        _schema_of(model)
    except Exception as error:
        # One field at a time, to name the parameter that cannot be offered.
        for key, field in fields.items():
            try:
                _schema_of(pydantic.create_model("Arguments", __config__=config, **{key: field}))
            except Exception as cause:
                raise _unsupported(f"{where}, parameter {by_key[key]}", cause) from cause
        raise _unsupported(where, error) from error
    return model


def _schema_of(model: type[pydantic.BaseModel]) -> JsonObject:
    return json_schema.tidy(model.model_json_schema(schema_generator=QuietSchema))


def _unsupported(where: str, error: Exception) -> ToolDefinitionError:
    reason = " ".join(str(error).split())[:160] or type(error).__name__
    return ToolDefinitionError(
        f"its type has no JSON schema ({reason})",
        where=where,
        next="use JSON types, an enum, Literal, a pydantic model, a dataclass or a TypedDict",
    )
