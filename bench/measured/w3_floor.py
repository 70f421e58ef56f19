"""The floor of a replay: read the rows, prove the chain, decode each payload. Nothing is folded or matched.

Usage: python -m bench.measured.w3_floor FILE TURNS; prints JSON.
"""

import sys
from hashlib import sha256

import apsw
import msgspec
from bench.measured.w3_cut import RUN
from bench.measured.work import Spent, peak_bytes, tell

ROWS = """
select event.run_id, seq, kind, recorded_at, active_ns, schema_version, commitment, salt, payload, digest
from event join run on event.rowid >= run_no << 32 and event.rowid < (run_no + 1) << 32
where run.run_id = ? order by event.rowid
"""

connection = apsw.Connection(sys.argv[1], flags=apsw.SQLITE_OPEN_READONLY)
encode, decode = msgspec.json.Encoder().encode, msgspec.json.Decoder().decode
previous, events = bytes(32), 0
with Spent() as spent:
    for *head, commitment, salt, payload, digest in connection.execute(ROWS, (RUN,)):
        if sha256(salt + payload).digest() != commitment:
            sys.exit(f"event {head[1]} does not match its commitment")
        previous = sha256(previous + encode([*head, commitment.hex()])).digest()
        if previous != digest:
            sys.exit(f"the chain breaks at event {head[1]}")
        decode(payload)
        events += 1
turns = int(sys.argv[2])
if events < 4 * turns:
    sys.exit(f"{events} events are too few for {turns} turns")
tell(turns=turns, events=events, peak_bytes=peak_bytes(), **spent.figures())
