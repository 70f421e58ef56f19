"""`python -m perdure.testing.wire PROTOCOL --replies module:name`: a stand-in as a process of its own.

Prints one line `{"base_url": "..."}` once it listens, and serves until SIGTERM or SIGINT.
"""

import argparse
import asyncio
import importlib
import json
import signal
import sys
from pathlib import Path

from perdure.errors import ConfigurationError, PerdureError
from perdure.testing.wire.server import PROTOCOLS, Replies, serve


def _replies(ref: str) -> Replies:
    module_name, colon, name = ref.partition(":")
    if not (module_name and colon and name):
        raise ConfigurationError("replies are named module:attribute", where=f"--replies {ref!r}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except ImportError as error:
        raise ConfigurationError(f"importing {module_name} failed: {error}", where=f"--replies {ref!r}") from error
    if not callable(found) and not isinstance(found, list | tuple):
        what = "nothing" if found is None else type(found).__name__
        raise ConfigurationError(
            f"{name!r} is {what}", where=f"--replies {ref!r}", next="name a function of the request body, or a list"
        )
    replies: Replies = found
    return replies


async def _serve(options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    replies = _replies(options.replies)
    async with serve(
        options.protocol,
        replies,
        port=options.port,
        chunk=options.chunk,
        delay_ms=options.delay_ms,
        log=options.request_log,
    ) as server:
        print(json.dumps({"base_url": server.base_url}), flush=True)
        await stop.wait()


def main() -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m perdure.testing.wire", description="A stand-in for a provider.")
    parser.add_argument("protocol", help=f"one of: {', '.join(sorted(PROTOCOLS))}")
    parser.add_argument(
        "--replies", required=True, help="module:name of a function of the body, or of a list of replies"
    )
    parser.add_argument("--port", type=int, default=0, help="port of 127.0.0.1; 0 picks a free one")
    parser.add_argument("--chunk", type=int, default=16, help="characters per fragment; 0: in one piece")
    parser.add_argument("--delay-ms", type=int, default=0, help="wait before each reply, in milliseconds")
    parser.add_argument("--request-log", type=Path, help="a file that gets one JSON line per request")
    try:
        asyncio.run(_serve(parser.parse_args()))
    except PerdureError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: cannot listen: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
