"""What `module:attribute` names: agents, models, tools, outputs, loops and worlds."""

import difflib
import importlib
import inspect
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perdure.errors import ConfigurationError, PerdureError

_IN_A_LOOP = "asyncio.run() cannot be called from a running event loop"


def import_named(module: str, attribute: str, *, folder: Path, where: str) -> Any:
    """The thing a module has under a name, dots included.

    Args:
        folder: where the imports start, for the error.
        where: what names it, for the error.

    Raises:
        ConfigurationError: the module cannot be imported, or has no such thing.
        PerdureError: what the module itself was refused with, as for a tool that cannot be defined.
    """
    try:
        found: Any = importlib.import_module(module)
    except PerdureError:
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # a module's own end must not end this process unsaid
        _close_coroutines(error)
        raise ConfigurationError(
            f"importing {module} failed: {type(error).__name__}: {error!s:.300}",
            where=where,
            next=f'put the call under `if __name__ == "__main__":` in {module}'
            if _IN_A_LOOP in str(error)
            else f"check the module; imports start at {folder}",
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            hint = nearest(part, [known for known in dir(found) if not known.startswith("_")])
            raise ConfigurationError(f"{module} has no {attribute!r:.80}", where=where, next=hint or "check the name")
        found = getattr(found, part)
    return found


def _close_coroutines(error: BaseException) -> None:
    """Closes what the module handed to `asyncio.run`: it never began, and Python would warn of that."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in list(frame.f_locals.values()):
            if inspect.iscoroutine(value) and inspect.getcoroutinestate(value) == inspect.CORO_CREATED:
                value.close()


def nearest(word: str, known: Sequence[str]) -> str:
    """The known word most like the given one, as a question; empty when none is like it."""
    near = difflib.get_close_matches(word, known, 1)
    return f"did you mean {near[0]!r}?" if near else ""
