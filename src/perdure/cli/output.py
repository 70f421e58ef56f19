"""What is printed, and where: results on standard output, everything said along the way on standard error.

Text of models and tools is escaped here, so that nothing they wrote can steer a terminal.
"""

import os
import re
import select
import sys
from typing import TYPE_CHECKING, TextIO

from perdure.errors import PerdureError

if TYPE_CHECKING:
    from perdure.contracts.contract import JsonValue

# Control characters, and those that reorder, hide or break the text around them (Unicode's bidirectional controls, line
# and paragraph separators, the byte order mark, halves of surrogate pairs).
_UNPRINTABLE = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff"
_STEERING = re.compile(f"[{_UNPRINTABLE}]")
_STEERING_IN_LINES = re.compile(f"(?![\\t\\n])[{_UNPRINTABLE}]")


def escaped(text: str) -> str:
    r"""The text on one line: a control character is shown as its escape, as `\x1b`."""
    return _STEERING.sub(_escape, text)


def escaped_lines(text: str) -> str:
    """As `escaped`, but line breaks and tabs stay."""
    return _STEERING_IN_LINES.sub(_escape, text.replace("\r\n", "\n"))


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


def counted(number: int, thing: str) -> str:
    """A number of things, in words: `1 run`, `2 runs`."""
    return f"{number} {thing}" + ("" if number == 1 else "s")


def json_text(record: "JsonValue") -> str:
    """A record as one line of JSON that is safe on a terminal."""
    import msgspec

    # JSON leaves DEL and the C1 controls as they are; outside of strings there are none, so each can be escaped.
    text = msgspec.json.encode(record).decode("utf-8")
    return _STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def say(text: str) -> None:
    """A line, or several, of the result. The text is already safe.

    Raises:
        OutputError: it cannot be written, for another reason than a reader that left.
    """
    _write(sys.stdout, text + "\n")


def say_json(record: "JsonValue") -> None:
    """One record of the result."""
    say(json_text(record))


def note(text: str) -> None:
    """A line on standard error. The text is already safe."""
    _write(sys.stderr, text + "\n")


def watched() -> bool:
    """Whether a person sees what is said along the way."""
    return sys.stderr is not None and sys.stderr.isatty()


def unread() -> bool:
    """Whether nobody reads standard output any more: what it was piped to has left."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        left = any(state & (select.POLLERR | select.POLLHUP | select.POLLNVAL) for _, state in poll.poll(0))
        return left or sys.stdout.name in _discarded
    except (AttributeError, OSError, ValueError):  # closed before we began, or no file
        return sys.stdout is None


def prepare() -> None:
    """Makes both streams able to carry any text."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


class OutputError(PerdureError):
    """The result could not be written. What was recorded is recorded all the same."""

    code = "output"


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # closed before we began
        return
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        # The reader left: the rest is not wanted, and the exit code stays what the command earned.
        _discard(stream)
    except OSError as error:
        _discard(stream)
        if stream is sys.stdout:
            raise OutputError(f"it cannot be written: {error.strerror}", where="standard output") from error


_discarded: set[str] = set()
"""Names of streams whose reader has left."""


def _discard(stream: TextIO) -> None:
    """From here on nothing written to the stream goes anywhere, what is still buffered included."""
    _discarded.add(stream.name)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
