"""The envelope of one event and the chain that binds it to the one before.

    commitment = sha256(salt || payload)
    digest     = sha256(previous || canonical JSON of [run_id, seq, kind, recorded_at, active_ns, schema_version,
    commitment])

The first previous is 32 zero bytes. A payload and its salt can be erased; the commitment stays in the digest's input,
so the chain goes on proving everything else.
"""

from collections.abc import Iterable
from hashlib import sha256

import msgspec

from perdure.contracts.contract import canonical
from perdure.errors import MalformedJournalError, PayloadErasedError

SCHEMA_VERSION = 1
FIRST_PREVIOUS = bytes(32)
SALT_BYTES = 16


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """One stored event. Bytes are as stored: what is hashed is what is read back."""

    run_id: str
    seq: int
    """0-based and contiguous within the run."""
    kind: str
    recorded_at: int
    """UTC, nanoseconds since the epoch."""
    active_ns: int
    """Steady time since the drive began, in nanoseconds."""
    schema_version: int
    commitment: bytes
    salt: bytes | None
    """None once erased."""
    payload: bytes | None
    """Canonical JSON; None once erased."""
    digest: bytes


def commitment_of(salt: bytes, payload: bytes) -> bytes:
    """Binds a payload without revealing it: 32 bytes."""
    return sha256(salt + payload).digest()


def digest_of(
    previous: bytes,
    run_id: str,
    seq: int,
    kind: str,
    recorded_at: int,
    active_ns: int,
    schema_version: int,
    commitment: bytes,
) -> bytes:
    """The chain's next link: 32 bytes."""
    framed = canonical([run_id, seq, kind, recorded_at, active_ns, schema_version, commitment.hex()])
    return sha256(previous + framed).digest()


def seal(
    previous: bytes, run_id: str, seq: int, kind: str, recorded_at: int, active_ns: int, salt: bytes, payload: bytes
) -> Envelope:
    """Frames a payload as the event that follows `previous`."""
    commitment = commitment_of(salt, payload)
    digest = digest_of(previous, run_id, seq, kind, recorded_at, active_ns, SCHEMA_VERSION, commitment)
    return Envelope(run_id, seq, kind, recorded_at, active_ns, SCHEMA_VERSION, commitment, salt, payload, digest)


def check_chain(
    run_id: str, envelopes: Iterable[Envelope], *, previous: bytes = FIRST_PREVIOUS, first: int = 0
) -> bytes:
    """Proves that the events are one unbroken chain; returns its head (32 zero bytes when empty).

    Args:
        previous: head of the events before these.
        first: seq of the first of these.

    Raises:
        MalformedJournalError: naming the first event that is out of place, changed or foreign.
    """
    for expected, event in enumerate(envelopes, first):
        problem = chain_problem(previous, run_id, expected, event)
        if problem is not None:
            raise MalformedJournalError(run_id, event.seq, event.kind, problem)
        previous = event.digest
    return previous


def chain_problem(previous: bytes, run_id: str, expected_seq: int, event: Envelope) -> str | None:
    """What is wrong with an event as the follower of `previous`; None when nothing is."""
    if event.run_id != run_id:
        return f"an event of run {event.run_id} stands in this run"
    if event.seq != expected_seq:
        return f"event {expected_seq} is missing or out of order (found {event.seq})"
    if event.schema_version > SCHEMA_VERSION:
        return f"schema version {event.schema_version} is newer than this release reads ({SCHEMA_VERSION})"
    if (event.payload is None) != (event.salt is None):
        return "payload and salt must be erased together"
    if event.payload is not None and event.salt is not None:
        if len(event.salt) != SALT_BYTES:
            return "the salt has a wrong length"
        if commitment_of(event.salt, event.payload) != event.commitment:
            return "the payload does not match its commitment"
    digest = digest_of(
        previous,
        run_id,
        event.seq,
        event.kind,
        event.recorded_at,
        event.active_ns,
        event.schema_version,
        event.commitment,
    )
    return None if digest == event.digest else "the digest does not follow from the event before it"


def payload_of(event: Envelope) -> bytes:
    """The stored payload.

    Raises:
        PayloadErasedError: it was erased.
    """
    if event.payload is None:
        raise PayloadErasedError(
            "the payload was erased",
            where=f"run {event.run_id}, event {event.seq} ({event.kind})",
            next="the run cannot be replayed past this point; `perdure verify` still proves the rest",
        )
    return event.payload
