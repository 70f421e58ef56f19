"""The store's file: its tables, its versions, and how it is created and opened.

An event's row number is its place: the run's number in the upper bits and the seq in the lower 32. So a run's events
stand together, in order, with no second index (a unique index over `run_id` and `seq` would cost 180 bytes a turn and
one more page a commit), no two events can have one place, and a row whose columns were damaged still says which event
it was.
"""

import errno
import logging
import os
import stat
from pathlib import Path

import apsw

from perdure.errors import ConfigurationError, StoreError, UnknownError
from perdure.stores import wal
from perdure.stores.driver_lock import make_directory, opening
from perdure.stores.faults import BUSY_SECONDS, translated

_log = logging.getLogger("perdure")

APPLICATION_ID = 0x50455244
"""The letters PERD, in the file's header."""

OLDEST_SQLITE = (3, 51, 3)
"""Before it, two connections could reset the write-ahead log under each other and lose commits
(https://sqlite.org/wal.html, "The WAL-Reset Bug")."""

SEQ_BITS = 32

_DEFINITIONS = "select type, name, tbl_name, sql from sqlite_schema"

_HEADER_BYTES = 100
"""Of every SQLite file (https://sqlite.org/fileformat.html, section 1.3)."""

EVENT_COLUMNS = "run_id, seq, kind, recorded_at, active_ns, schema_version, commitment, salt, payload, digest"

# Measured with four events a turn: 4096 bytes a page leave 1.77 KB a turn, 8192 leave 1.65 KB for 5 % more time a
# commit.
_PAGE_BYTES = 8192
_CHECKPOINT_PAGES = 1000
_LOG_BYTES_KEPT = 32 * 1024 * 1024

_VERSION_1 = """
create table event(
    run_id text not null,
    seq integer not null,
    kind text not null,
    recorded_at integer not null,
    active_ns integer not null,
    schema_version integer not null,
    commitment blob not null,
    salt blob,
    payload blob,
    digest blob not null
);
-- VACUUM keeps row numbers only of tables that have an index, and an event's row number is its place.
create index event_erased on event(run_id) where payload is null;
create table run(
    run_no integer primary key,
    run_id text not null unique,
    key blob not null,
    agent text not null,
    phase text not null,
    terminal_reason text,
    park text,
    wake_at integer
);
-- `events` guards the end of the journal: rows missing there leave a chain that is whole.
create table lease(run_no integer primary key, epoch integer not null, driver_id text, events integer not null);
-- Drivers that were taken over while their lock was still held: until they are dead they may still be inside a call.
create table outlived(run_no integer not null, driver_id text not null, primary key (run_no, driver_id)) without rowid;
create table driver(driver_id text primary key, beat integer not null, beat_at integer not null) without rowid;
create table artifact(
    run_no integer not null, digest text not null, data blob not null, primary key (run_no, digest)
) without rowid;
create table migration(version integer primary key);
"""

MIGRATIONS = (_VERSION_1,)
"""One script a version, applied in order; the file's `user_version` is the number applied."""


def store_file(path: str | Path) -> Path:
    """Where the store's file lies, symbolic links followed; every other file of the store lies beside it. The file need
    not be there.

    Raises:
        ConfigurationError: the path names no file, whatever is on the disk, or its symbolic links lead in a circle.
    """
    where = f"store {str(path)!r}"
    if "\0" in str(path):
        raise ConfigurationError("the path holds a zero byte", where=where, next="name a file")
    found = Path(os.path.realpath(path))  # unlike Path.resolve, of a circle as well, whichever the Python
    if not found.name:
        raise ConfigurationError("the path names no file", where=where, next="name a file in a directory")
    try:
        found.stat()
    except OSError as error:  # any other is told where the file is opened
        if error.errno == errno.ELOOP:
            raise ConfigurationError(
                "symbolic links on the path lead in a circle", where=where, next="correct the link, or name a file"
            ) from error
    return found


def first_place(run_no: int) -> int:
    """The row number of a run's first event."""
    return run_no << SEQ_BITS


def open_for_writing(path: Path, drivers: Path, *, create: bool) -> apsw.Connection:
    """A connection that may write, over a store of this release's version, created or migrated as needed.

    Raises:
        UnknownError: there is no file, and `create` is false.
        StoreError: it is not our store, is newer, cannot be written, or stays locked.
    """
    with translated(path):
        if not _present(path):
            if not create:
                raise no_store(path)
            _create(path, drivers)
        # Looked at for reading first: another program's file is not even opened for writing.
        open_for_reading(path, any_version=True).close()
        connection = _connect(path, apsw.SQLITE_OPEN_READWRITE)
        try:
            # Until it is known to be whole, the log stays as it is, even when this is the last connection to close.
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            _require_writable(connection, path)
            version = checked_version(connection, path)
            _must_have_a_whole_log(connection, path)
            connection.execute("pragma synchronous=full")
            if version < len(MIGRATIONS):
                _apply(connection)
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0)
            connection.execute(f"pragma journal_size_limit={_LOG_BYTES_KEPT}")
            connection.wal_autocheckpoint(_CHECKPOINT_PAGES)
        except BaseException:
            connection.close()
            raise
        return connection


def _must_have_a_whole_log(connection: apsw.Connection, path: Path) -> None:
    if not wal.must_be_whole(connection, path).torn:
        return
    looker = _connect(path, apsw.SQLITE_OPEN_READONLY)
    try:
        connection.execute("begin immediate")  # so that what is there is not just being written
        torn = wal.must_be_whole(looker, path).torn
    except apsw.BusyError:
        return  # whoever holds the lock is writing it
    finally:
        looker.close()
        if connection.in_transaction:
            connection.execute("rollback")
    if torn:
        _log.warning("store %s: %s", path, wal.torn_end(torn))


def open_for_reading(path: Path, *, any_version: bool = False) -> apsw.Connection:
    """A connection that never writes to the journal. `any_version` takes the store of an earlier release, too.

    Raises:
        UnknownError: there is no file.
        StoreError: it is not our store, is of another version, or stays locked.
    """
    with translated(path):
        if not _present(path):
            raise no_store(path)
        disk_is_read_only = bool(os.statvfs(path).f_flag & os.ST_RDONLY)
        connection = _connect(path, apsw.SQLITE_OPEN_READONLY, reading_options(path, disk_is_read_only))
        try:
            version = checked_version(connection, path)
            _require_current(path, len(MIGRATIONS) if any_version else version)
        except BaseException:
            connection.close()
            raise
        return connection


def reading_options(path: Path, disk_is_read_only: bool) -> str:
    """How the file is to be opened for reading, as a URL's query.

    Where nobody can write, nobody can make the shared memory that a reader needs beside a writer, and none is needed.
    But a file opened so is read without its log: one that a process left there when it died must not be passed over.
    """
    return "?immutable=1" if disk_is_read_only and not wal.holds_frames(path) else ""


def _require_writable(connection: apsw.Connection, path: Path) -> None:
    if connection.readonly("main"):
        raise StoreError("the file is read-only", where=f"store {path}", next="make it writable")


def _require_current(path: Path, version: int) -> None:
    if version < len(MIGRATIONS):
        raise StoreError(
            f"the store has version {version}, this release reads version {len(MIGRATIONS)}",
            where=f"store {path}",
            next="open it once for writing (any verb that drives a run does), which brings it up to date",
        )


def no_store(path: Path) -> UnknownError:
    """The error for a store that is not there."""
    return UnknownError("there is no store", where=str(path), next="check the path; `perdure run` creates a store")


def checked_version(connection: apsw.Connection, path: Path) -> int:
    """The file's version, once it is known to be our store.

    Raises:
        StoreError: it is not our store, or is newer than this release.
    """
    application_id = connection.pragma("application_id")
    version = connection.pragma("user_version")
    if application_id != APPLICATION_ID or not isinstance(version, int) or version < 1:
        raise StoreError(
            f"the file is not a Perdure store (application id {application_id!s}, version {version!s})",
            where=f"store {path}",
            next="name another file; this one was left as it was",
        )
    if version > len(MIGRATIONS):
        raise StoreError(
            f"the store has version {version}, this release knows up to {len(MIGRATIONS)}",
            where=f"store {path}",
            next="use the release of Perdure that wrote it, or a later one",
        )
    return version


def must_be_a_file(path: Path) -> None:
    """Refuses what only looks like a store's file: a directory, a device, a pipe.

    Raises:
        StoreError: it is one of these.
    """
    with translated(path):
        _present(path)


def definition_damage(connection: apsw.Connection) -> str | None:
    """Which of our tables or indexes is not defined as it was made; None when all are."""
    sound = apsw.Connection(":memory:")
    try:
        _apply(sound)
        wanted = sound.execute(_DEFINITIONS).fetchall()
    finally:
        sound.close()
    changed = set(wanted) - set(connection.execute(_DEFINITIONS))
    return f"the definition of {min(str(name) for _, name, *_ in changed)} is damaged" if changed else None


def header_damage(path: Path) -> str | None:
    """What is damaged in the header of a file that is ours all the same; None when nothing tells that it is ours.

    Read through SQLite's own file layer: closing a file opened by other means would drop this process's locks on it.
    """
    with translated(path):
        file = apsw.VFSFile("", str(path), [apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READONLY, 0])
        try:
            header = file.xRead(_HEADER_BYTES, 0) if file.xFileSize() >= _HEADER_BYTES else b""
        finally:
            file.xClose()
    version, application_id = header[60:64], header[68:72]
    applied = _applied(path)
    if application_id == APPLICATION_ID.to_bytes(4, "big"):
        if applied is None:
            return "the file's header is damaged: it cannot be read as a database"
        if applied != int.from_bytes(version, "big"):
            return f"the file's header is damaged: it names version {int.from_bytes(version, 'big')}, not {applied}"
        return None
    return None if applied is None else "the file's header is damaged: it does not name Perdure as its application"


def _applied(path: Path) -> int | None:
    """The version that the tables themselves tell; None when they are not ours, or cannot be read."""
    try:
        connection = _connect(path, apsw.SQLITE_OPEN_READONLY)
        try:
            connection.execute(f"select {EVENT_COLUMNS} from event limit 0")  # noqa: S608 - column names of ours
            version = connection.execute("select max(version) from migration").get
        finally:
            connection.close()
    except apsw.Error:
        return None
    return version if isinstance(version, int) else None


def _present(path: Path) -> bool:
    """Whether a file with content is there. An empty file holds nothing that could be lost or foreign."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(status.st_mode):
        raise StoreError("the path is a directory", where=f"store {path}", next="name a file")
    if not stat.S_ISREG(status.st_mode):
        # Its size says nothing, and creating a store would put a file in the place of a device, pipe or socket.
        raise StoreError("the path is a device, pipe or socket", where=f"store {path}", next="name a file")
    return status.st_size > 0


def _connect(path: Path, flags: int, options: str = "") -> apsw.Connection:
    if tuple(int(part) for part in apsw.sqlite_lib_version().split(".")[:3]) < OLDEST_SQLITE:
        raise StoreError(
            f"SQLite {apsw.sqlite_lib_version()} can lose commits when several processes write",
            where="the apsw package",
            next=f"install apsw {'.'.join(map(str, OLDEST_SQLITE))} or later",
        )
    name = path.as_uri() + options if options else str(path)
    connection = apsw.Connection(name, flags=flags | (apsw.SQLITE_OPEN_URI if options else 0))
    connection.set_busy_timeout(BUSY_SECONDS * 1000)
    connection.execute("pragma trusted_schema=off")
    return connection


def _create(path: Path, drivers: Path) -> None:
    """Builds the store beside its name and moves it there whole, so that nobody ever sees half of one."""
    if not path.parent.is_dir():
        raise StoreError(
            "its directory does not exist", where=f"store {path}", next="make the directory, or name another"
        )
    make_directory(drivers)
    with opening(drivers, f"store {path}"):
        if _present(path):
            return
        building = drivers / "building.db"
        for leftover in drivers.glob("building.db*"):  # of a process killed while it was here
            leftover.unlink()
        os.close(os.open(building, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
        connection = _connect(building, apsw.SQLITE_OPEN_READWRITE)
        try:
            connection.execute(f"pragma page_size={_PAGE_BYTES}")
            connection.execute("pragma journal_mode=wal")
            connection.execute(f"pragma application_id={APPLICATION_ID}")
            _apply(connection)
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        finally:
            connection.close()
        building.rename(path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _apply(connection: apsw.Connection) -> None:
    connection.execute("begin immediate")
    try:
        # Read again under the lock: another process may have been quicker.
        applied = connection.pragma("user_version")
        assert isinstance(applied, int)
        for version, script in enumerate(MIGRATIONS[applied:], applied + 1):
            connection.execute(script)
            connection.execute("insert into migration(version) values(?)", (version,))
            connection.execute(f"pragma user_version={version}")
        connection.execute("commit")
    except BaseException:
        if connection.in_transaction:
            connection.execute("rollback")
        raise
