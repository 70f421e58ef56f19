"""Where the process begins and ends: every error becomes a message and an exit code."""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from perdure.cli import failure, output
from perdure.errors import PerdureError, UsageError

PROGRAM = "perdure"


def main() -> NoReturn:
    """Runs the command line and leaves the process with its exit code.

    0 completed, 1 any unsuccessful end, 2 usage, configuration or an unknown thing, 3 parked, 4 refused, 130
    interrupted.
    """
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """One command; returns its exit code."""
    output.prepare()
    as_json = "--json" in argv
    try:
        return _command(argv)
    except PerdureError as error:
        return failure.report(error, as_json=as_json)
    except KeyboardInterrupt:
        return failure.INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the outermost place: what nobody foresaw is reported, as JSON if asked
        if isinstance(error, FileNotFoundError) and not _stands_somewhere():
            gone = UsageError("the working directory is no longer there", next="change to one that is")
            return failure.report(gone, as_json=as_json)
        return failure.report_unexpected(error, as_json=as_json)


def _stands_somewhere() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 - pathlib costs every start of a command more than this is worth
    except FileNotFoundError:
        return False
    return True


def _command(argv: Sequence[str]) -> int:
    import typer.main

    from perdure.cli.verbs import app

    command = typer.main.get_command(app)
    try:
        code = command.main(list(argv), prog_name=PROGRAM, standalone_mode=False)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        where = PROGRAM if context is None else context.command_path
        found = " ".join(error.format_message().split())
        raise UsageError(found.rstrip("."), where=where, next=f"see `{where} --help`") from error
    except typer.Abort:
        return failure.INTERRUPTED
    return code if isinstance(code, int) else 0
