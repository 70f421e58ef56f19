"""The floor of a durable turn: two raw 800-byte commits, one connection. Usage: floor.py FILE TURNS; prints JSON."""

import json
import sys
import time

import apsw

connection = apsw.Connection(sys.argv[1])
connection.execute("pragma journal_mode=wal")
connection.execute("pragma synchronous=full")
connection.execute("create table row(id integer primary key, data blob)")
turns, data = int(sys.argv[2]), bytes(800)
cpu, began = time.process_time(), time.perf_counter()
for _ in range(2 * turns):
    connection.execute("insert into row(data) values(?)", (data,))
seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
connection.close()
print(json.dumps({"turns": turns, "seconds": seconds, "cpu_seconds": cpu_seconds}))
