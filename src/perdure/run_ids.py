"""Run ids: which texts can be one, and new ones: UUID version 7 (RFC 9562), so that ids sort by the time their runs
started."""

import re
import uuid

from perdure.ports import Clock, Entropy

_FORM = re.compile(r"[A-Za-z0-9._-]{1,64}")


def can_name_a_run(text: str) -> bool:
    """Whether the text can be a run's id: on a command line, where one that begins with `-` is an option and a shell
    reads some signs itself, and in paths, where `.` and `..` are other folders."""
    return _FORM.fullmatch(text) is not None and text not in {".", ".."} and not text.startswith("-")


def new_run_id(clock: Clock, entropy: Entropy) -> str:
    """48 bits of milliseconds, then version, variant and 74 random bits."""
    milliseconds = clock.now_ns() // 1_000_000
    random = int.from_bytes(entropy.draw(10), "big")
    value = (milliseconds & (2**48 - 1)) << 80 | random & (2**80 - 1)
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return str(uuid.UUID(int=value))
