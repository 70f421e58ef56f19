"""Where things lie in an SQLite file (https://sqlite.org/fileformat.html), for tests that damage it."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import apsw

from perdure.stores.schema import EVENT_COLUMNS


class Cell(NamedTuple):
    """One event's row: offsets in the file of its place, of its record header, and of each column's bytes."""

    place: range
    header: range
    columns: dict[str, range]
    """Empty for the integers 0 and 1, which live in the record header."""


def event_cells(path: Path) -> list[Cell]:
    """Every event's row, in the order of the file's tree."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    root = connection.execute("select rootpage from sqlite_schema where name = 'event'").get
    connection.close()
    return list(_cells(path.read_bytes(), root))


def _cells(data: bytes, page: int) -> Iterator[Cell]:
    (size,) = struct.unpack_from(">H", data, 16)
    start = (page - 1) * size
    kind, count = data[start], struct.unpack_from(">H", data, start + 3)[0]
    pointers = struct.unpack_from(f">{count}H", data, start + (12 if kind == 5 else 8))
    if kind == 5:
        children = [struct.unpack_from(">I", data, start + pointer)[0] for pointer in pointers]
        for child in (*children, struct.unpack_from(">I", data, start + 8)[0]):
            yield from _cells(data, child)
        return
    assert kind == 13
    for pointer in pointers:
        yield _cell(data, start + pointer)


def _cell(data: bytes, offset: int) -> Cell:
    _, place_at = _varint(data, offset)
    _, header_at = _varint(data, place_at)
    header_bytes, at = _varint(data, header_at)
    body = header_at + header_bytes
    columns = {}
    for name in EVENT_COLUMNS.split(", "):
        serial, at = _varint(data, at)
        length = (serial - 12) // 2 if serial >= 12 else (0, 1, 2, 3, 4, 6, 8, 8, 0, 0)[serial]
        columns[name] = range(body, body + length)
        body += length
    return Cell(range(place_at, header_at), range(header_at, header_at + header_bytes), columns)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for count in range(9):
        byte = data[at + count]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at + count + 1
    raise AssertionError("no number of this test is longer than eight bytes")
