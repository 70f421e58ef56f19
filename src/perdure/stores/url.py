"""Opens a store by its URL."""

from urllib.parse import parse_qsl

from perdure.errors import ConfigurationError
from perdure.ports import Clock, Entropy, Store

_FORM = "sqlite:PATH, with ?force_network=1 for a file on a network file system"


async def open_store(
    url: str,
    *,
    clock: Clock,
    entropy: Entropy,
    lease_seconds: float = 10.0,
    create: bool = True,
    read_only: bool = False,
) -> Store:
    """Opens the store that a URL names: `sqlite:PATH`, relative to the working directory unless PATH begins with a
    slash.

    Raises:
        ConfigurationError: the URL has another form, or its path names no file.
        UnknownError: the file is missing and is not to be created.
        StoreError: the store cannot be used.
    """
    path, force_network = parse_sqlite_url(url)
    # SQLite is loaded by the first store that is opened.
    from perdure.stores.sqlite import SqliteStore

    return await SqliteStore.open(
        path,
        clock=clock,
        entropy=entropy,
        lease_seconds=lease_seconds,
        create=create,
        read_only=read_only,
        force_network=force_network,
    )


def parse_sqlite_url(url: str) -> tuple[str, bool]:
    """The path, and whether a network file system is accepted.

    Raises:
        ConfigurationError: the URL has another form.
    """
    scheme, colon, rest = url.partition(":")
    if not colon or scheme != "sqlite":
        raise _bad(url, f"{'no scheme' if not colon else f'the scheme {scheme!r}'} (known: sqlite)")
    path, question, query = rest.partition("?")
    if path.startswith("//"):
        raise _bad(url, "two slashes after the colon: a store's URL has no host")
    if path in {"", ":memory:"}:
        raise _bad(url, "no file name: a store is a file")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if (
        (question and not options)
        or options.get("force_network", "1") not in {"0", "1"}
        or options.keys() - {"force_network"}
    ):
        raise _bad(url, f"the option {query!r} (known: force_network=1)")
    return path, options.get("force_network") == "1"


def _bad(url: str, found: str) -> ConfigurationError:
    return ConfigurationError(found, where=f"store URL {url!r}", next=f"write {_FORM}")
