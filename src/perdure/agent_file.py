"""From a reference (`file.toml`, or `module:attribute`) to an agent.

Owns the agent file's keys and where its paths and imports start. The rules of a declaration are the agent's own.
"""

import dataclasses
import importlib
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import msgspec

from perdure.agent import Agent
from perdure.contracts.agents import Settings
from perdure.contracts.contract import Contract, JsonObject
from perdure.contracts.limits import Limits, Price
from perdure.errors import ConfigurationError
from perdure.named import import_named, nearest


class AgentFile(Contract, frozen=True):
    """The keys of an agent file. Relative paths and imports start at the file's folder."""

    name: str
    model: str | None = None
    base_url: str | None = None
    instructions: str | None = None
    instructions_file: str | None = None
    tools: tuple[str, ...] = ()
    """Each `module:attribute`."""
    output: str | None = None
    output_schema: str | None = None
    """Path of a JSON schema."""
    loop: str | None = None
    strategy: str = "react"
    batch: str = "lenient"
    resume_mode: str = "continue"
    on_exhausted: str = "park"
    approval: str = "auto"
    on_reject: str = "continue"
    settings: Settings = Settings()
    limits: Limits = Limits()
    price: Price | None = None
    labels: dict[str, str] = {}


_TABLES: Mapping[str, type[msgspec.Struct]] = {"settings": Settings, "limits": Limits, "price": Price}
_WORDS = Agent.words


def load_agent(ref: str, *, base: Path | None = None) -> Agent:
    """The agent a reference names.

    Its folder is searched first while it is imported and last afterwards, so that imports inside functions still work.

    Args:
        ref: path of an agent file (`.toml`), or `module:attribute` of an `Agent`.
        base: where a relative path or an import starts; the working directory when None.

    Raises:
        ConfigurationError: nothing usable is there; the error names the file, the key and the next step.
    """
    folder = (base or Path.cwd()).resolve()
    if ref.endswith(".toml") or "/" in ref:
        return _from_file(_whole(folder, ref))
    where = f"agent {ref!r:.200}"
    if ":" not in ref:
        raise ConfigurationError("it names no agent", where=where, next="write file.toml or module:attribute")
    with _importing_from(folder):
        found = _imported(ref, folder, where)
    if not isinstance(found, Agent):
        raise ConfigurationError(f"it is no Agent ({type(found).__name__})", where=where, next="name one")
    return found if found.ref == ref else dataclasses.replace(found, ref=ref)


def _whole(folder: Path, ref: str) -> Path:
    try:
        return (folder / Path(ref).expanduser()).resolve()
    except (OSError, RuntimeError) as error:  # a link that leads to itself, a `~name` of nobody
        raise ConfigurationError(
            f"it cannot be found: {error!s:.300}", where=f"agent {ref!r:.200}", next="check the path"
        ) from error


def load_named(ref: str, *, base: Path | None, where: str) -> Any:
    """Whatever `module:attribute` names; imports start at the base, the working directory when None.

    Raises:
        ConfigurationError: nothing is there; the error names the module and the next step.
    """
    folder = (base or Path.cwd()).resolve()
    with _importing_from(folder):
        return _imported(ref, folder, where)


def _from_file(path: Path) -> Agent:
    declared = _parsed(path)
    folder = path.parent
    with _importing_from(folder):
        if declared.model is not None:
            _refuse_other_module(declared.model.partition(":")[0], folder, f"{path}, model")
        tools = [_imported(ref, folder, f"{path}, tools[{place}]") for place, ref in enumerate(declared.tools)]
        output = None if declared.output is None else _imported(declared.output, folder, f"{path}, output")
        loop = None if declared.loop is None else _imported(declared.loop, folder, f"{path}, loop")
        _refuse_mixed_modules(folder, str(path))
    try:
        return Agent(
            name=declared.name,
            model=declared.model,
            base_url=declared.base_url,
            instructions=_instructions(declared, path),
            tools=tools,
            output=output,
            output_schema=_output_schema(declared, path),
            loop=loop,
            limits=declared.limits,
            settings=declared.settings,
            price=declared.price,
            labels=declared.labels,
            ref=str(path),
            **{word: getattr(declared, word) for word in _WORDS},
        )
    except ConfigurationError as error:
        if error.where.startswith(str(path)):
            raise
        raise type(error)(error.found, where=f"{path}, {error.where}", next=error.next) from error


def _parsed(path: Path) -> AgentFile:
    try:
        table = tomllib.loads(_text(path, str(path)))
    except tomllib.TOMLDecodeError as error:  # its message ends with the line and the column
        raise ConfigurationError(f"it is no TOML: {error}", where=str(path), next="correct that line") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, tables nested without end
        raise ConfigurationError(f"it cannot be read: {error}", where=str(path), next="write it smaller") from error
    _refuse_unknown_keys(table, path)
    if isinstance(table.get("tools"), str):
        one = table["tools"]
        raise ConfigurationError(
            "tools is a text, and must be a list of texts", where=str(path), next=f'write tools = ["{one:.80}"]'
        )
    try:
        return msgspec.convert(table, AgentFile, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigurationError(_plain(error), where=str(path), next="correct that key") from error


_TOML_WORDS = {"str": "text", "int": "integer", "float": "number", "bool": "true or false", "object": "table"}


def _plain(error: msgspec.ValidationError) -> str:
    """What msgspec found, in TOML's words: its `object` is a table, and `$.limits.x` is known as limits.x."""
    text, _, place = str(error).partition(" - at `$.")
    missing = re.fullmatch(r"Object missing required field `(\w+)`", text)
    if missing:
        text = f"the key {missing[1]} is missing"
    # TOML has no null: a key that may be left out is one that is not written.
    text = text.replace(" | null", "")
    text = re.sub(r"`(\w+)`", lambda found: f"`{_TOML_WORDS.get(found[1], found[1])}`", text)
    return f"{place.rstrip('`')}: {text}" if place else text


def _refuse_unknown_keys(table: JsonObject, path: Path) -> None:
    _refuse_unknown(table, AgentFile.__struct_fields__, str(path), "")
    for name, kind in _TABLES.items():
        if isinstance(table.get(name), dict):
            _refuse_unknown(table[name], kind.__struct_fields__, str(path), f"{name}.")


def _refuse_unknown(table: JsonObject, known: Sequence[str], where: str, prefix: str) -> None:
    for key in table:
        if key not in known:
            hint = nearest(key, known) or f"known keys: {', '.join(known)}"
            if prefix + key == "mcp":
                hint = "MCP servers are not available in this release"
            raise ConfigurationError(f"there is no key {prefix + key!r:.80}", where=where, next=hint)


def _instructions(declared: AgentFile, path: Path) -> str:
    if declared.instructions_file is None:
        return declared.instructions or ""
    if declared.instructions is not None:
        raise ConfigurationError(
            "instructions and instructions_file are both given", where=str(path), next="keep one of them"
        )
    return _text(path.parent / declared.instructions_file, f"{path}, instructions_file")


def _output_schema(declared: AgentFile, path: Path) -> JsonObject | None:
    if declared.output_schema is None:
        return None
    place = path.parent / declared.output_schema
    where = f"{path}, output_schema"
    try:
        schema = json.loads(_text(place, where))
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{place} is no JSON: {error}", where=where, next="correct that line") from error
    if not isinstance(schema, dict):
        raise ConfigurationError(f"{place} holds no object", where=where, next="write a JSON schema of an object")
    return schema


def _text(path: Path, where: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigurationError(f"there is no file {path}", where=where, next="check the path") from None
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read ({error.strerror})", where=where, next="check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{path} is not UTF-8 (byte {error.start})", where=where, next="save it as UTF-8"
        ) from error


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Searches the folder first inside, and last from then on."""
    place = str(folder)
    sys.path.insert(0, place)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(place)
        if place not in sys.path:
            sys.path.append(place)


def _imported(ref: str, folder: Path, where: str) -> Any:
    name, _, attribute = ref.partition(":")
    if not name or not attribute or name.startswith("."):
        raise ConfigurationError(
            f"{ref!r:.80} is no module:attribute", where=where, next=f'write "{_rewritten(ref):.80}"'
        )
    _refuse_other_module(name, folder, where)
    return import_named(name, attribute, folder=folder, where=where)


def _rewritten(ref: str) -> str:
    """The reference as it may have been meant, in the user's own words."""
    name, colon, attribute = ref.lstrip(".").partition(":")
    name = name.removesuffix(".py")
    if not colon and "." in name:
        name, _, attribute = name.rpartition(".")
    return f"{name or 'MODULE'}:{attribute or 'NAME'}"


def _refuse_other_module(name: str, folder: Path, where: str) -> None:
    """A module of the folder cannot be had while another of its name is loaded: Python would hand out that one."""
    top = name.partition(".")[0]
    loaded = _loaded_elsewhere(top, folder)
    if loaded is not None:
        raise ConfigurationError(
            f"the module {top} of {folder} cannot be imported: another one was loaded from {loaded}",
            where=where,
            next="rename one of them, or use the two in separate processes",
        )


def _loaded_elsewhere(name: str, folder: Path) -> Path | None:
    """Where the loaded module of this name came from, if the folder has one of the name and it is not that."""
    module = sys.modules.get(name)
    if module is None:
        return None
    offered = next((place for place in (folder / f"{name}.py", folder / name / "__init__.py") if place.is_file()), None)
    if offered is None:
        return None
    origin = Path(getattr(module, "__file__", None) or "(built in)")
    return None if origin.resolve() == offered.resolve() else origin


def _refuse_mixed_modules(folder: Path, where: str) -> None:
    """Looks behind the imports: a module of the folder may have been given a namesake of the one beside it."""
    offered = {place.stem for place in folder.glob("*.py")} | {
        place.parent.name for place in folder.glob("*/__init__.py")
    }
    doubtful = {name for name in offered if _loaded_elsewhere(name, folder) is not None}
    if not doubtful:
        return
    for name in offered - doubtful:
        for value in list(vars(sys.modules.get(name, object)).values()):
            source = value.__name__ if isinstance(value, ModuleType) else ""
            if isinstance(value, type | FunctionType):
                source = str(value.__module__)
            if source.partition(".")[0] in doubtful:
                _refuse_other_module(source, folder, where)
