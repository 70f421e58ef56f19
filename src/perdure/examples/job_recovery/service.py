"""The reference job service: HTTP on loopback over its own SQLite file, in its own process.

    GET  /jobs/ID          {"job_id", "title", "state": "failed|running|completed", "runs", "progress_percent"}
    GET  /jobs/ID/logs     {"job_id", "lines": [...]}
    GET  /jobs/ID/result   text/csv: line,customer,amount; 409 while the job has no result
    POST /jobs/ID/retry    {"reason"} -> 202 {"receipt", "job_id", "run"}

A retry starts the job again: that is the effect. The effect, its receipt under the Idempotency-Key and the record of
the request are one transaction. The same key with the same request gives the stored receipt; with another request, 409.
Without a key every request is a new effect.

Faults are switched on by files in the `--switches` folder, each of which serves one request: `lose_response` (commit,
then close the connection without an answer), and `hold_after_commit`, `hold_logs`, `hold_result` (work, then keep the
answer back). A hold announces itself by renaming its file to `held_...`, and ends when that file is removed or, at the
latest, after the number of seconds written in it.
"""

import argparse
import csv
import io
import json
import signal
import sys
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from typing_extensions import override

from perdure.examples.job_recovery.jobs import Jobs, KeyConflictError, NoResultError, UnknownJobError
from perdure.examples.job_recovery.world import SCENARIOS, draw_world

_LONGEST_BODY = 64 * 1024
_LONGEST_HOLD_S = 600.0
_LOOK_INTERVAL_S = 0.01


class Switches:
    """The folder of fault switches. Taking one is a rename or a removal, so exactly one request gets it."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def take(self, name: str) -> bool:
        """Whether the switch was on; it is off afterwards."""
        if self._folder is None:
            return False
        try:
            (self._folder / name).unlink()
        except FileNotFoundError:
            return False
        return True

    def hold(self, name: str) -> None:
        """When `hold_<name>` is on: announces it and waits until `held_<name>` is removed or its time has passed."""
        if self._folder is None:
            return
        held = self._folder / f"held_{name}"
        try:
            (self._folder / f"hold_{name}").rename(held)
            seconds = min(float(held.read_text() or _LONGEST_HOLD_S), _LONGEST_HOLD_S)
        except FileNotFoundError:
            return
        deadline = time.monotonic() + seconds
        while held.exists() and time.monotonic() < deadline:
            time.sleep(_LOOK_INTERVAL_S)
        held.unlink(missing_ok=True)


class JobServer(ThreadingHTTPServer):
    """A thread a connection; an ephemeral port of the loopback interface unless told otherwise."""

    daemon_threads = True

    def __init__(self, jobs: Jobs, switches: Switches, port: int = 0) -> None:
        self.jobs, self.switches = jobs, switches
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def origin(self) -> str:
        """`http://127.0.0.1:PORT`."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that was killed while its answer was held is the point of the demo, not a fault of the service.
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: JobServer
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        match self._place():
            case ["jobs", job_id]:
                self._answer(lambda: self.server.jobs.look(job_id))
            case ["jobs", job_id, "logs"]:
                self._answer(lambda: {"job_id": job_id, "lines": self.server.jobs.logs(job_id)}, hold="logs")
            case ["jobs", job_id, "result"]:
                self._answer(lambda: _as_csv(self.server.jobs.result(job_id)), hold="result")
            case _:
                self._send(HTTPStatus.NOT_FOUND, {"error": f"nothing at {self.path}"})

    def do_POST(self) -> None:
        body = self._body()
        match self._place():
            case ["jobs", job_id, "retry"] if isinstance(body, dict) and isinstance(body.get("reason"), str):
                key = self.headers.get("Idempotency-Key")
                self._answer(
                    lambda: self.server.jobs.retry(job_id, body["reason"], key),
                    HTTPStatus.ACCEPTED,
                    hold="after_commit",
                )
            case ["jobs", _, "retry"]:
                self._send(HTTPStatus.BAD_REQUEST, {"error": 'the body must be a JSON object with a text "reason"'})
            case _:
                self._send(HTTPStatus.NOT_FOUND, {"error": f"nothing at {self.path}"})

    def _place(self) -> list[str]:
        return [unquote(part) for part in self.path.partition("?")[0].strip("/").split("/")]

    def _body(self) -> Any:
        length = int(self.headers.get("Content-Length") or 0)
        if length > _LONGEST_BODY:
            self.close_connection = True
            return None
        try:
            return json.loads(self.rfile.read(length))
        except ValueError:
            return None

    def _answer(self, work: Any, status: HTTPStatus = HTTPStatus.OK, *, hold: str | None = None) -> None:
        try:
            payload = work()
        except UnknownJobError as error:
            self._send(HTTPStatus.NOT_FOUND, {"error": str(error)})
            return
        except (NoResultError, KeyConflictError) as error:
            self._send(HTTPStatus.CONFLICT, {"error": str(error)})
            return
        if status is HTTPStatus.ACCEPTED and self.server.switches.take("lose_response"):
            self.close_connection = True
            return
        if hold is not None:
            self.server.switches.hold(hold)
        self._send(status, payload)

    def _send(self, status: HTTPStatus, payload: Any) -> None:
        text = isinstance(payload, str)
        data = (payload if text else json.dumps(payload)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/csv; charset=utf-8" if text else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: what was asked stands in the database."""


def _as_csv(rows: list[tuple[int, str, int]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("line", "customer", "amount"))
    writer.writerows((line, customer, f"{cents // 100}.{cents % 100:02d}") for line, customer, cents in rows)
    return out.getvalue()


def main() -> None:
    """Serves until SIGTERM or SIGINT; prints one line {"origin": ...} once it listens."""
    parser = argparse.ArgumentParser(description="The reference job service.")
    parser.add_argument("--db", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--switches", type=Path, default=None)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        jobs = Jobs(options.db)
        jobs.create(draw_world(options.seed, options.scenario))
        with JobServer(jobs, Switches(options.switches), options.port) as server:
            print(json.dumps({"origin": server.origin}), flush=True)
            server.serve_forever(poll_interval=0.05)
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main()
