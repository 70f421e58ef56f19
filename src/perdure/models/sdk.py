"""What every adapter over an official SDK needs: the SDK there, a key, and a connection that cannot be flooded."""

import importlib.util
import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from perdure.contracts.limits import LARGEST
from perdure.errors import ConfigurationError, StreamFaultError

MAX_REPLY_BYTES = 64 << 20
"""Bytes of one answer's body, an error's included; far above what the caps on a turn can come to on the wire."""


def must_be_installed(package: str, extra: str, where: str) -> None:
    """Finds the SDK without importing it.

    Raises:
        ConfigurationError: it is not there; says which extra brings it.
    """
    try:
        there = importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent of a dotted name is missing
        there = False
    if not there:
        raise ConfigurationError(
            f"the package {package} is not installed", where=where, next=f"run: pip install 'perdure[{extra}]'"
        )


def key_from(variables: Sequence[str], given: str | None, where: str, *, hint: str = "") -> Callable[[], str]:
    """The key, behind a function, so that no repr, log line or pickle of its owner shows it.

    Args:
        variables: looked at in order, when none is given.
        given: a key handed over in code.
        where: who needs it.
        hint: what else can be done, shown with the error.

    Raises:
        ConfigurationError: there is none; names the variable.
    """
    key = given or next((os.environ[name] for name in variables if os.environ.get(name)), "")
    if not key:
        raise ConfigurationError("there is no API key", where=where, next=f"set {' or '.join(variables)}{hint}")
    return lambda: key


def count(value: object) -> int | None:
    """A count of tokens; None for what is no count, or none that a store could hold: it says nothing."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST else None


def bounded_hook(httpx: Any, target: str) -> Callable[[Any], Any]:
    """An event hook for responses (`event_hooks={"response": [hook]}`) that ends a body over `MAX_REPLY_BYTES` with a
    `StreamFaultError`. An SDK would read it to its end, whatever it is.

    Args:
        httpx: the module the SDK uses: `httpx` or `httpx2`.
        target: who is asked, as `provider:name`.
    """

    class Bounded(httpx.AsyncByteStream):  # type: ignore[misc]  # the base is the module's own
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        async def __aiter__(self) -> AsyncIterator[bytes]:
            left = MAX_REPLY_BYTES
            async for piece in self._inner:
                left -= len(piece)
                if left < 0:
                    raise StreamFaultError(
                        "too_large", f"the body of the answer is over {MAX_REPLY_BYTES} bytes", where=target
                    )
                yield piece

        async def aclose(self) -> None:
            await self._inner.aclose()

    async def hook(response: Any) -> None:
        response.stream = Bounded(response.stream)

    return hook


def cause_of(error: BaseException) -> StreamFaultError | None:
    """The fault of ours that an SDK wrapped into an error of its own; None when there is none."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, StreamFaultError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None
