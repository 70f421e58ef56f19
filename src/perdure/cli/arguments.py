"""What is written behind a verb, checked and turned into values: inputs, JSON, `name=value` pairs, the store."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure.errors import UsageError, ValueFormError

if TYPE_CHECKING:
    from perdure.contracts.contract import JsonValue

DEFAULT_STORE = "sqlite:./perdure.db"


def store_url(given: str | None) -> str:
    """The store that is meant: as given, else $PERDURE_STORE, else a file in the working directory."""
    return given or os.environ.get("PERDURE_STORE") or DEFAULT_STORE


def task_input(text: str | None, as_json: str | None, command: str) -> "JsonValue":
    """The run's input, from exactly one of `--input TEXT`, `--input @FILE` and `--input-json JSON` of a command.

    Raises:
        UsageError: none or both are given, the file cannot be read as text, or the JSON cannot be read.
    """
    if (text is None) == (as_json is None):
        found = "no input is given" if text is None else "--input and --input-json are both given"
        raise UsageError(found, where=command, next="give one of --input TEXT, --input @FILE, --input-json JSON")
    if as_json is not None:
        return json_value(as_json, "--input-json")
    assert text is not None
    if text.startswith("@"):
        return _file_text(Path(text[1:]).expanduser())
    if not text.isascii() and text != text.encode("utf-8", "replace").decode():
        raise UsageError("it is no UTF-8", where="--input", next="give text")
    return text


def _file_text(path: Path) -> str:
    where = f"--input @{path}"
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"byte {error.start} is no UTF-8", where=where, next="give a text file") from error
    except OSError as error:
        raise UsageError(f"the file cannot be read: {error.strerror}", where=where, next="check the path") from error


def json_value(text: str, where: str) -> "JsonValue":
    """A JSON value written as an argument.

    Raises:
        UsageError: it is no JSON, or holds what cannot be stored; the error names the position.
    """
    from perdure.contracts.values import to_json

    try:
        return to_json(json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object))
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        found = f"it is no JSON: {error.msg} at {place}"
        raise UsageError(found, where=where, next=f"correct it; a text is written with quotes, as {_QUOTED}") from error
    except ValueFormError as error:
        raise UsageError(
            f"{error.found} at {error.where}", where=where, next="give a value that can be stored"
        ) from error
    except RecursionError as error:
        raise UsageError("it is nested too deeply", where=where, next="give a flatter value") from error
    except ValueError as error:  # a number with more digits than Python reads, or one of the refusals below
        raise UsageError(f"it is no JSON: {error}", where=where, next="correct it") from error


_QUOTED = "'\"yes\"'"


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r:.80} stands twice in one object")
    return made


def pairs(given: Sequence[str], form: str) -> dict[str, str]:
    """`name=value` arguments as a table.

    Raises:
        UsageError: one has another form, or a name stands twice.
    """
    found: dict[str, str] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not name or not equals:
            raise UsageError(f"{item!r:.120} is not of the form {form}", next=f"write {form}")
        if name in found:
            raise UsageError(f"{name!r:.80} is given twice", next="give it once")
        found[name] = value
    return found
