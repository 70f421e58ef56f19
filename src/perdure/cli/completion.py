"""What a shell offers while a command is being written."""

from contextlib import suppress
from itertools import islice

MOST = 100
"""Run ids offered at most, the latest first."""


def known_run_ids(store: str, incomplete: str) -> list[str]:
    """Ids of the store's runs that begin so. None for whatever reason: a shell's prompt is no place for an error.

    Shells read what is offered as their own language, each with quoting of its own. Signs that would need it stand in
    no run's id, so what has them was not written by Perdure and is left out.
    """
    with suppress(Exception):
        import apsw

        from perdure.run_ids import can_name_a_run
        from perdure.stores.reading import run_ids
        from perdure.stores.url import parse_sqlite_url

        path, _ = parse_sqlite_url(store)
        connection = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY)
        try:
            known = (id for id in run_ids(connection, incomplete) if isinstance(id, str) and can_name_a_run(id))
            return list(islice(known, MOST))
        finally:
            connection.close()
    return []
