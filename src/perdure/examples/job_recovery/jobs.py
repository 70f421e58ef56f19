"""The job service's SQLite file: jobs, logs, results, retries and their receipts. It knows no HTTP and no agent."""

import hashlib
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure.examples.job_recovery.world import World

_SCHEMA = """
CREATE TABLE job(
    id TEXT PRIMARY KEY, title TEXT NOT NULL, state TEXT NOT NULL, error_code TEXT NOT NULL, runs INTEGER NOT NULL,
    looks INTEGER NOT NULL, looks_left INTEGER NOT NULL, after_retry TEXT NOT NULL);
CREATE TABLE log(n INTEGER PRIMARY KEY, job_id TEXT NOT NULL, line TEXT NOT NULL);
CREATE TABLE amount(job_id TEXT NOT NULL, line INTEGER NOT NULL, customer TEXT NOT NULL, cents INTEGER NOT NULL);
CREATE TABLE effect(n INTEGER PRIMARY KEY, job_id TEXT NOT NULL, receipt TEXT NOT NULL UNIQUE, reason TEXT NOT NULL);
CREATE TABLE receipt(key TEXT PRIMARY KEY, request TEXT NOT NULL, answer TEXT NOT NULL);
CREATE TABLE post(n INTEGER PRIMARY KEY, job_id TEXT NOT NULL, key TEXT, outcome TEXT NOT NULL);
"""


class UnknownJobError(Exception):
    """No such job."""


class NoResultError(Exception):
    """The job has no result: it has not completed."""


class KeyConflictError(Exception):
    """The idempotency key came with another request before."""


@dataclass(frozen=True)
class Counts:
    """What the service itself recorded."""

    posts: int
    """Requests to retry, answered or not."""
    distinct_keys: int
    effects: int
    """Retries that happened, over all jobs."""
    jobs_touched: tuple[str, ...]
    """Every job a retry was asked for."""


class Jobs:
    """The file. Each method opens it, runs one transaction, and closes it; safe to call from any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def create(self, world: World) -> None:
        """Fills a new file with the world. A file that holds a world already is kept as it is."""
        with closing(self._connect()) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            if connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'job'").fetchone():
                return
        with self._transaction() as connection:
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            _fill(connection, world)

    def reset(self, world: World) -> None:
        """Makes the file what it was before anything was asked of it."""
        with self._transaction() as connection:
            for (table,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall():
                connection.execute(f"DELETE FROM {table}")  # noqa: S608 - a table of our own
            _fill(connection, world)

    def effects(self) -> list[str]:
        """The jobs that were retried, each as often as it was, in order."""
        with self._transaction() as connection:
            return [job_id for (job_id,) in connection.execute("SELECT job_id FROM effect ORDER BY n")]

    def look(self, job_id: str) -> dict[str, Any]:
        """The job's state. A running job moves on with each look, so that a demo needs no clock.

        Raises:
            UnknownJobError: no such job.
        """
        with self._transaction() as connection:
            job = _job(connection, job_id)
            if job["state"] == "running" and job["looks_left"] == 0:
                _end_run(connection, job)
                job = _job(connection, job_id)
            elif job["state"] == "running":
                connection.execute("UPDATE job SET looks_left = looks_left - 1 WHERE id = ?", (job_id,))
            seen = job["looks"] - job["looks_left"] + 1
            progress = 100 * seen // (job["looks"] + 2) if job["state"] == "running" else None
        return {
            "job_id": job_id,
            "title": job["title"],
            "state": job["state"],
            "runs": job["runs"],
            "progress_percent": progress,
        }

    def logs(self, job_id: str) -> list[str]:
        """The job's log lines, oldest first.

        Raises:
            UnknownJobError: no such job.
        """
        with self._transaction() as connection:
            _job(connection, job_id)
            return [
                line for (line,) in connection.execute("SELECT line FROM log WHERE job_id = ? ORDER BY n", (job_id,))
            ]

    def result(self, job_id: str) -> list[tuple[int, str, int]]:
        """Line number, customer and cents of each row.

        Raises:
            UnknownJobError: no such job.
            NoResultError: it has not completed.
        """
        with self._transaction() as connection:
            state = _job(connection, job_id)["state"]
            if state != "completed":
                raise NoResultError(f"job {job_id} is {state} and has no result")
            rows = connection.execute(
                "SELECT line, customer, cents FROM amount WHERE job_id = ? ORDER BY line", (job_id,)
            )
            return [(line, customer, cents) for line, customer, cents in rows]

    def retry(self, job_id: str, reason: str, key: str | None) -> dict[str, Any]:
        """Starts the job again and returns the receipt; under a key that was used before, returns its receipt instead.

        Raises:
            UnknownJobError: no such job.
            KeyConflictError: the key came with another request before; recorded, without an effect.
        """
        request = hashlib.sha256(json.dumps([job_id, reason]).encode()).hexdigest()
        with self._transaction() as connection:
            job = _job(connection, job_id)
            stored = connection.execute("SELECT request, answer FROM receipt WHERE key = ?", (key,)).fetchone()
            outcome = "accepted" if stored is None else "replayed" if stored["request"] == request else "conflict"
            connection.execute("INSERT INTO post(job_id, key, outcome) VALUES (?, ?, ?)", (job_id, key, outcome))
            if outcome == "accepted":
                answer = _start_again(connection, job, reason)
                if key is not None:
                    connection.execute("INSERT INTO receipt VALUES (?, ?, ?)", (key, request, json.dumps(answer)))
                return answer
        if outcome == "conflict":
            raise KeyConflictError(f"idempotency key {key} was used for another request")
        replayed: dict[str, Any] = json.loads(stored["answer"])
        return replayed

    def counts(self) -> Counts:
        """What was asked and what happened."""
        with self._transaction() as connection:
            posts, keys = connection.execute("SELECT count(*), count(DISTINCT key) FROM post").fetchone()
            (effects,) = connection.execute("SELECT count(*) FROM effect").fetchone()
            touched = connection.execute(
                "SELECT job_id FROM post UNION SELECT job_id FROM effect ORDER BY 1"
            ).fetchall()
        return Counts(posts, keys, effects, tuple(job_id for (job_id,) in touched))

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=10, isolation_level=None)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA synchronous=FULL")
        return connection

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Commits when the block ends or returns, rolls back when it raises."""
        with closing(self._connect()) as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")


def _fill(connection: sqlite3.Connection, world: World) -> None:
    job = (world.title, world.state, world.error_code, 1, world.looks, 0, world.after_retry)
    connection.execute("INSERT INTO job VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (world.job_id, *job))
    other = (world.title, "failed", world.error_code, 1, world.looks, 0, world.after_retry)
    connection.execute("INSERT INTO job VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (world.other_job_id, *other))
    connection.executemany("INSERT INTO log(job_id, line) VALUES (?, ?)", [(world.job_id, one) for one in world.logs])
    connection.executemany(
        "INSERT INTO amount VALUES (?, ?, ?, ?)",
        [(world.job_id, n, name, cents) for n, (name, cents) in enumerate(world.amounts, 1)],
    )


def _job(connection: sqlite3.Connection, job_id: str) -> sqlite3.Row:
    row: sqlite3.Row | None = connection.execute("SELECT * FROM job WHERE id = ?", (job_id,)).fetchone()
    if row is None:
        raise UnknownJobError(f"no job {job_id}")
    return row


def _start_again(connection: sqlite3.Connection, job: sqlite3.Row, reason: str) -> dict[str, Any]:
    number = connection.execute("SELECT count(*) + 1 FROM effect").fetchone()[0]
    run = job["runs"] + 1
    receipt = f"{job['id']}-{number:03d}"
    connection.execute("INSERT INTO effect(job_id, receipt, reason) VALUES (?, ?, ?)", (job["id"], receipt, reason))
    connection.execute("UPDATE job SET state = 'running', runs = ?, looks_left = looks WHERE id = ?", (run, job["id"]))
    _log(connection, job["id"], f"INFO run {run} started")
    return {"receipt": receipt, "job_id": job["id"], "run": run}


def _end_run(connection: sqlite3.Connection, job: sqlite3.Row) -> None:
    state = job["after_retry"]
    connection.execute("UPDATE job SET state = ? WHERE id = ?", (state, job["id"]))
    _log(
        connection,
        job["id"],
        "INFO job completed" if state == "completed" else f"ERROR {job['error_code']} again, giving up",
    )


def _log(connection: sqlite3.Connection, job_id: str, text: str) -> None:
    (number,) = connection.execute("SELECT count(*) FROM log WHERE job_id = ?", (job_id,)).fetchone()
    connection.execute(
        "INSERT INTO log(job_id, line) VALUES (?, ?)", (job_id, f"2026-03-02T06:{number % 60:02d}:00Z {text}")
    )
