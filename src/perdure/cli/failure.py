"""From an error to what is printed and how the process ends."""

import sys
import traceback
from typing import TYPE_CHECKING

from perdure.cli import output
from perdure.errors import PerdureError

if TYPE_CHECKING:
    from perdure.contracts.contract import JsonObject

INTERRUPTED = 130


def report(error: PerdureError, *, as_json: bool) -> int:
    """Prints an error on standard error and returns the exit code that goes with it."""
    if as_json:
        output.note(output.json_text({"error": record(error)}))
        return error.exit_code
    place = f"{output.escaped(error.where)}: " if error.where else ""
    output.note(f"error: {place}{output.escaped(error.found)}")
    if error.next:
        output.note(f"  next: {output.escaped(error.next)}")
    return error.exit_code


def record(error: PerdureError) -> "JsonObject":
    """An error as `--json` gives it."""
    texts = {"message": str(error), "found": error.found, "where": error.where, "next": error.next}
    # What was written on the command line may hold bytes that are no UTF-8, which JSON cannot carry.
    return {"code": error.code, **{k: v.encode("utf-8", "backslashreplace").decode() for k, v in texts.items()}}


class UnexpectedError(PerdureError):
    """An error nobody foresaw."""

    code = "internal"


def report_unexpected(error: BaseException, *, as_json: bool) -> int:
    """Prints a defect: with its traceback for a person, who needs it for a report, as one record for a program."""
    if not as_json:
        traceback.print_exception(error, file=sys.stderr)
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    found = f"{type(error).__name__}: {error}"
    return report(
        UnexpectedError(found, where=where, next="this is a defect of Perdure: please report it"), as_json=as_json
    )
