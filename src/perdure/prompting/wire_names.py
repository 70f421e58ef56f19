"""Tool names as every provider takes them, made from the true name alone.

The strictest rule of all providers holds for each, so a run may change its provider and a name on the wire stays what
it was: 1 to 64 letters, digits, `_` and `-` (OpenAI, Anthropic), beginning with a letter or `_` (Gemini). What does not
fit is made to fit and told apart by a digest, so two names stay two, whatever else is on offer and in whatever order.
Journals, limits and people see true names only.
"""

import hashlib
import re
from collections.abc import Iterable

LONGEST = 64
"""Characters of a name on the wire."""
_TAKEN = re.compile(rf"[a-zA-Z_][a-zA-Z0-9_-]{{0,{LONGEST - 1}}}")
_OTHER = re.compile(r"[^a-zA-Z0-9_-]")
_DIGEST = 8


def wire_name(name: str) -> str:
    """The name as it goes on the wire: itself when every provider takes it."""
    if _TAKEN.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST]
    legal = _OTHER.sub("_", name)
    if not re.match(r"[a-zA-Z_]", legal):
        legal = f"_{legal}"
    return f"{legal[: LONGEST - _DIGEST - 1]}_{digest}"


def true_names(names: Iterable[str]) -> dict[str, str]:
    """By name on the wire, the true name of each that has another one."""
    return {made: name for name in names if (made := wire_name(name)) != name}
