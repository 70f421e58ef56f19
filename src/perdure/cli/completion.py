"""What a shell offers while a command is being written."""

from contextlib import suppress

MOST = 100
"""Run ids offered at most, the latest first."""


def known_run_ids(store: str, incomplete: str) -> list[str]:
    """Ids of the store's runs that begin so. None for whatever reason: a shell's prompt is no place for an error."""
    with suppress(Exception):
        import apsw

        from perdure.stores.reading import run_ids
        from perdure.stores.url import parse_sqlite_url

        path, _ = parse_sqlite_url(store)
        connection = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY)
        try:
            return run_ids(connection, incomplete, MOST)
        finally:
            connection.close()
    return []
