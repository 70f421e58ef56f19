"""The verb `crash-test`: finds what is to be tested, has it tested, and prints the report."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure.cli import output, tables
from perdure.cli.arguments import task_input
from perdure.cli.stopping import Interrupted, unwinding
from perdure.contracts.contract import JsonValue
from perdure.errors import ConfigurationError, PerdureError, UsageError

if TYPE_CHECKING:
    from perdure.agent import Agent
    from perdure.contracts.messages import AssistantTurn
    from perdure.testing.killing.crash_test import CrashReport
    from perdure.testing.killing.cut_drive import Subject
    from perdure.testing.killing.worlds import CrashWorld

CLEAN, UNSAFE = 0, 1
_SHORTEST_S = 0.1
"""A drive is a process: in less, none gets anywhere."""
_SAID_EVERY_S = 5.0
"""Shortest time between two lines of progress."""


@dataclass(frozen=True)
class Options:
    """What the verb was told."""

    store: str
    subject: str
    task: JsonValue
    """None for a run."""
    agent: str | None
    model: str | None
    world: str | None
    files: str | None
    keep: str | None
    timeout_s: float


def task_of(subject: str, text: str | None, as_json: str | None) -> JsonValue:
    """The task of an agent; None for a recorded run, which has its own.

    Raises:
        UsageError: an agent without a task, or a run with one.
    """
    if _names_agent(subject):
        return task_input(text, as_json, "perdure crash-test")
    if text is not None or as_json is not None:
        raise UsageError(
            "a task is given for a recorded run", where=f"run {subject}", next="leave it out, or name an agent"
        )
    return None


def crash_test(options: Options, *, as_json: bool) -> int:
    """Tests and prints. Returns the exit code: 0 clean, 1 something was doubled, lost or ended otherwise, 128 and a
    signal's number when that asked it to leave."""
    if not options.timeout_s >= _SHORTEST_S:
        raise UsageError(
            f"the time limit is {options.timeout_s:g} s", where="--timeout", next=f"give {_SHORTEST_S} seconds or more"
        )
    subject, turns, base = _recorded(options) if not _names_agent(options.subject) else _declared(options)
    try:
        with unwinding():
            report = _tested(options, subject, turns, base, None if as_json and not output.watched() else _Progress())
    except Interrupted as interrupted:
        return interrupted.exit_code
    except OSError as error:
        raise _unusable(error) from error
    _print(report, as_json=as_json)
    return CLEAN if report.ok else UNSAFE


def _unusable(error: OSError) -> PerdureError:
    """A path that the system will not have, in words."""
    from perdure.testing.killing.crash_test import full_disk
    from perdure.testing.killing.folders import FULL

    place = Path(str(error.filename or tempfile.gettempdir()))
    if error.errno in FULL:
        return full_disk(place)
    found = f"it cannot be used: {error.strerror or error}"
    return UsageError(found, where=f"{place!s:.200}", next="name another with TMPDIR, --keep or --files")


def _tested(
    options: Options,
    subject: "Subject",
    turns: "tuple[AssistantTurn, ...] | None",
    base: Path,
    progress: "_Progress | None",
) -> "CrashReport":
    from perdure.testing.killing.crash_test import CrashTest

    folder, temporary = _folder(options.keep)
    try:
        world, working = _world(options, folder, base)
        test = CrashTest(subject, world, folder / "cuts", working, turns, options.timeout_s)
        report = test.run(progress)
        (folder / "report.json").write_text(output.json_text(_record(report)) + "\n", "utf-8")
        return report
    finally:
        if temporary:
            shutil.rmtree(folder, ignore_errors=True)


def _names_agent(subject: str) -> bool:
    return subject.endswith(".toml") or ":" in subject or "/" in subject


def _declared(options: Options) -> "tuple[Subject, None, Path]":
    from perdure.agent_file import load_agent
    from perdure.binding import bind
    from perdure.testing.killing.cut_drive import Subject

    # In a loop, as everywhere: a module that starts a run when it is imported is refused.
    async def load() -> "Agent":
        agent = load_agent(options.subject)
        await bind(options.model or agent.model, agent).discard()  # one that cannot be had is told before anything
        return agent

    agent = asyncio.run(load())
    base = Path(options.subject).parent if options.subject.endswith(".toml") else Path.cwd()
    return Subject(agent, options.task, options.model, {}), None, base


def _recorded(options: Options) -> "tuple[Subject, tuple[AssistantTurn, ...], Path]":
    from perdure.agent_file import load_agent
    from perdure.binding import must_be_unchanged, recorded_agent
    from perdure.engine import Engine
    from perdure.testing.killing.cut_drive import Subject
    from perdure.testing.killing.fixed import answers_of, turns_of

    async def read() -> Any:
        async with Engine.open(options.store, create=False, read_only=True) as engine:
            state, envelopes = await engine.state(options.subject), await engine.journal(options.subject)
        return state, envelopes, recorded_agent(state) if options.agent is None else load_agent(options.agent)

    state, envelopes, agent = asyncio.run(read())
    must_be_unchanged(state, agent)
    answers: Mapping[str, JsonValue] = answers_of(envelopes)
    ref = agent.ref or ""
    base = Path(ref).parent if ref.endswith(".toml") else Path.cwd()
    return Subject(agent, state.started.input, None, answers), turns_of(envelopes), base


def _folder(keep: str | None) -> tuple[Path, bool]:
    """Where the test works, and whether that is removed afterwards."""
    from perdure.testing.killing.folders import must_be_empty

    if keep is None:
        return Path(tempfile.mkdtemp(prefix="perdure-crash-test-")), True
    folder = Path(keep).absolute()
    must_be_empty(folder)
    return folder, False


def _world(options: Options, folder: Path, base: Path) -> "tuple[CrashWorld, Path | None]":
    from perdure.agent_file import load_named
    from perdure.testing.killing.worlds import FilesWorld, is_world, problem_of

    if options.world is None:
        template = None if options.files is None else Path(options.files).absolute()
        if template is not None and not template.is_dir():
            raise UsageError("it is no directory", where=f"--files {options.files}", next="name a directory")
        return FilesWorld(folder / "working", template), folder / "working"
    if options.files is not None:
        raise UsageError("--world and --files are both given", where="perdure crash-test", next="give one of them")
    where = f"--world {options.world!r:.80}"
    world: Any = load_named(options.world, base=base, where=where)
    try:
        world = world() if isinstance(world, type) else world
        sound = is_world(world)
    except PerdureError:
        raise
    except Exception as error:  # whatever a user's class does
        raise ConfigurationError(
            f"it cannot be made: {problem_of(error)}",
            where=where,
            next="make it one that needs no arguments, or name one",
        ) from error
    if not sound:
        raise ConfigurationError(
            f"{type(world).__name__} is no world", where=where, next="give it reset() and effects()"
        )
    return world, None


class _Progress:
    """Says on standard error what is to come, and then every few seconds how far it is."""

    def __init__(self) -> None:
        self._said_at = 0.0

    def __call__(self, done: int, of: int, run_s: float) -> None:
        """As `Progress` of a crash test."""
        now = time.monotonic()
        if not done:
            cuts = output.counted(of, "cut")
            output.note(f"{cuts}, after a run of {run_s:.1f} s: this takes about {of * run_s:.0f} s or more")
        elif now - self._said_at < _SAID_EVERY_S or done == of:
            return
        else:
            output.note(f"{done} of {output.counted(of, 'cut')}")
        self._said_at = now


def _record(report: "CrashReport") -> Any:
    import msgspec

    return msgspec.to_builtins(report)


def _print(report: "CrashReport", *, as_json: bool) -> None:
    if as_json:
        output.say_json(_record(report))
        return
    output.say(tables.crash_test(_record(report)))
