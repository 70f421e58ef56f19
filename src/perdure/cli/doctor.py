"""The verb `doctor`: what Perdure stands on, on this machine and for this store. Leaves nothing behind but what SQLite
makes beside any store that is read (`-wal`, `-shm`)."""

import fcntl
import importlib.metadata
import os
import platform
import shlex
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import apsw

from perdure.cli import output
from perdure.errors import PerdureError, UnknownError
from perdure.stores.driver_lock import driver_is_dead, no_directory
from perdure.stores.faults import translated
from perdure.stores.mounts import NETWORK_TYPES, mounted_type
from perdure.stores.schema import OLDEST_SQLITE, checked_version, open_for_reading, store_file
from perdure.stores.url import parse_sqlite_url

OK, REFUSED = 0, 4
LITTLE_ROOM = 200_000_000
"""Free bytes below which a warning is due: a log and a checkpoint of a busy store take some tens of megabytes."""
IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
EXTRAS = {"openai": "openai"}
"""Extras by name, and the package each brings."""
KEYS = ("OPENAI_API_KEY",)
"""Variables a provider's client takes its key from."""
_SAMPLE = "create table sample(n); insert into sample values(1)"

Verdict = Literal["ok", "warn", "bad"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    verdict: Verdict
    found: str
    next: str = ""


async def examine(store: str, *, as_json: bool) -> int:
    """Prints what was found. Returns 0, or 4 when something is bad: no run can be driven safely then."""
    path, force_network = parse_sqlite_url(store)
    file = store_file(path)
    findings = [*_findings(file, force_network), await _store(store, file)]
    for one in findings:
        if as_json:
            output.say_json(asdict(one))
        else:
            output.say(output.escaped(f"{one.verdict:<4}  {one.name:<14}  {one.found}"))
            if one.next:
                output.say(output.escaped(f"{'':<4}  {'':<14}  next: {one.next}"))
    return REFUSED if any(one.verdict == "bad" for one in findings) else OK


def _findings(path: Path, force_network: bool) -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield _sqlite()
    yield from _looked("directory", path.parent, lambda: _directory(path.parent, force_network))
    drivers = path.with_name(path.name + ".drivers")
    yield from _looked("lock files", drivers, lambda: _lock_files(drivers))
    for file in (path, *(path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))):
        yield from _looked("permissions", file, partial(_permissions, file, stat.S_ISREG))
    yield from _looked("permissions", drivers, lambda: _permissions(drivers, stat.S_ISDIR))
    yield from _extras()
    yield _sandbox()
    yield from _keys()


def _looked(name: str, path: Path, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """What a look finds. What cannot be looked at is a finding, too."""
    try:
        with translated(path):
            yield from look()
    except PerdureError as error:
        yield Finding(name, "bad", f"{path}: {error.found}", error.next)


def _sqlite() -> Finding:
    version = apsw.sqlite_lib_version()
    known = tuple(int(part) for part in version.split(".")[:3])
    if known < OLDEST_SQLITE:
        oldest = ".".join(map(str, OLDEST_SQLITE))
        return Finding("sqlite", "bad", f"{version}, which can lose commits", f"install apsw {oldest} or later")
    threads = next((one for one in apsw.compile_options if one.startswith("THREADSAFE")), "THREADSAFE unknown")
    return Finding("sqlite", "ok", f"{version} in apsw {apsw.apsw_version()}, {threads}")


def _directory(folder: Path, force_network: bool) -> Iterator[Finding]:
    if not folder.is_dir():
        yield Finding("directory", "bad", f"{folder} is not there", "make it, or name a store elsewhere")
        return
    yield _file_system(folder.resolve(), force_network)
    room = shutil.disk_usage(folder).free
    verdict: Verdict = "ok" if room >= LITTLE_ROOM else "warn"
    yield Finding("free space", verdict, f"{room / 1e9:.1f} GB", "" if verdict == "ok" else "free some")
    if not os.access(folder, os.W_OK | os.X_OK):
        yield Finding("directory", "bad", f"{folder} cannot be written", "make it writable, or name a store elsewhere")
        return
    with tempfile.TemporaryDirectory(dir=folder, prefix=".perdure-doctor-") as probe:
        yield _locks(Path(probe, "lock"))
        yield _shared_memory(Path(probe, "sample.db"))


def _file_system(folder: Path, force_network: bool) -> Finding:
    kind = mounted_type(folder)
    if kind in NETWORK_TYPES:
        verdict: Verdict = "warn" if force_network else "bad"
        return Finding("file system", verdict, f"{kind}, a network file system", "keep the store on a local disk")
    if kind in IN_MEMORY:
        return Finding("file system", "warn", f"{kind}: nothing outlives a power cut", "keep the store on a disk")
    return Finding("file system", "ok", kind or "unknown: the system does not tell")


def _locks(path: Path) -> Finding:
    """Whether a lock of the operating system keeps a second one out, and goes with its descriptor."""
    first, second = (os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600) for _ in range(2))
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return Finding("locks", "bad", "a locked file could be locked again", "keep the store on a local disk")
    except OSError as error:
        return Finding("locks", "bad", f"files cannot be locked ({error})", "keep the store on a local disk")
    finally:
        os.close(first)
        os.close(second)
    return Finding("locks", "ok", "a lock keeps others out")


def _shared_memory(path: Path) -> Finding:
    """Whether two connections see each other's commits over a shared log."""
    try:
        writer, reader = apsw.Connection(str(path)), apsw.Connection(str(path))
        mode = writer.pragma("journal_mode", "wal")
        writer.execute(_SAMPLE)
        seen = reader.execute("select n from sample").get
        reader.close()
        writer.close()
    except apsw.Error as error:
        return Finding("log", "bad", f"SQLite's log cannot be shared here ({error})", "keep the store on a local disk")
    if (mode, seen) != ("wal", 1):
        return Finding("log", "bad", f"SQLite refuses its log here (mode {mode})", "keep the store on a local disk")
    return Finding("log", "ok", "commits are seen over the shared log")


def _lock_files(drivers: Path) -> Iterator[Finding]:
    if os.path.lexists(drivers) and not drivers.is_dir():
        raise no_directory(drivers)
    yield Finding("lock files", "ok", f"in {drivers.name}" if drivers.is_dir() else "none yet")


def _permissions(file: Path, of_its_kind: Callable[[int], bool]) -> Iterator[Finding]:
    """Whether others can read the file, and whether we can write it. Not there, it is made with the right ones; what is
    of another kind is not ours to change, and the store's own finding names it."""
    try:
        mode = file.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not of_its_kind(mode):
        return
    needed = os.R_OK | os.W_OK | (os.X_OK if stat.S_ISDIR(mode) else 0)
    if not os.access(file, needed):
        found = f"{file.name} cannot be written by this user (mode {stat.S_IMODE(mode):o}, owner {_owner(file)})"
        yield Finding("permissions", "bad", found, f"make it writable, or be its owner: {file}")
    if stat.S_IMODE(mode) & 0o077:
        found = f"{file.name} is open to others (mode {stat.S_IMODE(mode):o})"
        yield Finding("permissions", "warn", found, f"chmod go-rwx {shlex.quote(str(file))}")


def _owner(file: Path) -> str:
    try:
        return file.owner()
    except KeyError:  # a user id without a name
        return str(file.stat().st_uid)


def _extras() -> Iterator[Finding]:
    for extra, package in EXTRAS.items():
        try:
            yield Finding("extra", "ok", f"{extra}: {package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            yield Finding("extra", "ok", f"{extra}: not installed", f"to use it: pip install 'perdure[{extra}]'")


def _sandbox() -> Finding:
    return Finding("sandbox", "ok", "bubblewrap is " + ("there" if shutil.which("bwrap") else "not installed"))


def _keys() -> Iterator[Finding]:
    for name in KEYS:
        yield Finding("key", "ok", f"{name} is {'set' if os.environ.get(name) else 'not set'}")


async def _store(store: str, path: Path) -> Finding:
    """What is in the store, as far as it opens for reading."""
    from perdure.engine import Engine

    problems: dict[str, PerdureError] = {}
    try:
        version = _version(path)
        async with Engine.open(store, create=False, read_only=True) as engine:
            runs = await engine.runs(problems=problems)
        with translated(path):
            alive = output.counted(_alive(path), "driver")
    except UnknownError:
        return Finding("store", "ok", f"{path} is not there yet; `perdure run` makes it")
    except PerdureError as error:
        return Finding("store", "bad", f"{path}: {error.found}", error.next)
    head = f"{path}: version {version}"
    if problems:
        damaged = output.counted(len(problems), "damaged run")
        return Finding("store", "bad", f"{head}, {damaged}", "see `perdure list` and `perdure verify`")
    held = sum(run["status"] == "running" for run in runs)
    return Finding("store", "ok", f"{head}, {output.counted(len(runs), 'run')}, {held} driven now, {alive} alive")


def _version(path: Path) -> int:
    """The version that the store's tables have."""
    connection = open_for_reading(path, any_version=True)
    try:
        return checked_version(connection, path)
    finally:
        connection.close()


def _alive(path: Path) -> int:
    folder = path.with_name(path.name + ".drivers")
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    drivers = [name for name in names if len(name) == 32 and "." not in name]
    return sum(not driver_is_dead(folder, name) for name in drivers)
