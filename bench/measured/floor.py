"""The floor of a durable turn: two raw 800-byte commits, one connection.

Usage: python -m bench.measured.floor FILE TURNS; prints JSON.
"""

import sys

import apsw
from bench.measured.work import Spent, tell

connection = apsw.Connection(sys.argv[1])
connection.execute("pragma journal_mode=wal")
connection.execute("pragma synchronous=full")
connection.execute("create table row(id integer primary key, data blob)")
turns, data = int(sys.argv[2]), bytes(800)
with Spent() as spent:
    for _ in range(2 * turns):
        connection.execute("insert into row(data) values(?)", (data,))
connection.close()
tell(turns=turns, **spent.figures())
