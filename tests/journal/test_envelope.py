"""The chain over a run's events: what it proves, what it finds, and what erasing leaves."""

import hashlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import MalformedJournalError, PayloadErasedError
from perdure.journal import events as ev
from perdure.journal.envelope import (
    FIRST_PREVIOUS,
    SALT_BYTES,
    SCHEMA_VERSION,
    Envelope,
    chain_problem,
    check_chain,
    payload_of,
    seal,
)

RUN = "run-1"


def chain(count: int = 5) -> list[Envelope]:
    previous, events = FIRST_PREVIOUS, []
    for seq in range(count):
        payload = ev.payload_bytes(ev.NowObserved(f"0.{seq}", seq))
        events.append(seal(previous, RUN, seq, "now_observed", 1000 + seq, seq, bytes([seq]) * SALT_BYTES, payload))
        previous = events[-1].digest
    return events


def changed(event: Envelope, **fields: Any) -> Envelope:
    return msgspec.structs.replace(event, **fields)


def test_a_digest_is_what_the_format_says() -> None:
    """S-073: anyone can recompute it from the stored columns."""
    event = chain(1)[0]
    assert event.payload is not None
    assert event.salt is not None
    commitment = hashlib.sha256(event.salt + event.payload).digest()
    framed = json.dumps(
        [RUN, 0, "now_observed", 1000, 0, SCHEMA_VERSION, commitment.hex()], separators=(",", ":")
    ).encode()
    assert event.commitment == commitment
    assert event.digest == hashlib.sha256(bytes(32) + framed).digest()


def test_an_unbroken_chain_gives_its_head() -> None:
    """S-073."""
    events = chain()
    assert check_chain(RUN, events) == events[-1].digest
    assert check_chain(RUN, []) == FIRST_PREVIOUS


FIELDS = [
    ("run_id", "run-2"),
    ("seq", 3),
    ("kind", "entropy_observed"),
    ("recorded_at", 1003),
    ("active_ns", 3),
    ("schema_version", 0),
    ("commitment", bytes(32)),
    ("salt", bytes(SALT_BYTES)),
    ("payload", b'{"call":"0.2","now_ns":3}'),
    ("digest", bytes(32)),
]


@pytest.mark.parametrize(("field", "value"), FIELDS)
def test_a_change_of_any_field_is_found_at_its_event_or_the_next(field: str, value: object) -> None:
    """S-073, H06, C15: named by place and kind."""
    events = chain()
    events[2] = changed(events[2], **{field: value})
    with pytest.raises(MalformedJournalError) as found:
        check_chain(RUN, events)
    assert found.value.seq in (2, 3)
    assert found.value.kind
    assert found.value.problem


@given(st.integers(0, 2), st.sampled_from(["commitment", "salt", "payload", "digest"]), st.integers(0, 400))
def test_any_flipped_bit_is_found(place: int, field: str, bit: int) -> None:
    """S-073, H06."""
    events = chain(3)
    data = bytearray(getattr(events[place], field))
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    events[place] = changed(events[place], **{field: bytes(data)})
    with pytest.raises(MalformedJournalError):
        check_chain(RUN, events)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda events: [*events[:2], *events[3:]], id="one deleted"),
        pytest.param(lambda events: [*events[:2], events[3], events[2], events[4]], id="two swapped"),
        pytest.param(lambda events: [*events[:3], events[2], *events[3:]], id="one doubled"),
        pytest.param(lambda events: events[1:], id="the first deleted"),
        pytest.param(lambda events: [*events[:2], *chain(5)[1:]], id="one written over with another"),
    ],
)
def test_a_gap_a_swap_and_a_double_are_found(damage: Any) -> None:
    """S-070, S-073, H06, C15."""
    with pytest.raises(MalformedJournalError):
        check_chain(RUN, damage(chain()))


def test_a_chain_that_was_made_with_a_hole_is_found_though_every_link_holds() -> None:
    """S-070, C15."""
    first = chain(1)[0]
    payload = ev.payload_bytes(ev.NowObserved("0.1", 1))
    third = seal(first.digest, RUN, 2, "now_observed", 1, 1, bytes(SALT_BYTES), payload)
    with pytest.raises(MalformedJournalError, match="event 1 is missing"):
        check_chain(RUN, [first, third])


def test_an_event_cannot_be_moved_into_another_place_of_an_equal_chain() -> None:
    """S-073: the frame holds the place, so an event with the same payload elsewhere does not fit."""
    events = chain()
    moved = changed(events[2], seq=3)
    assert chain_problem(events[2].digest, RUN, 3, moved) is not None


def test_events_of_two_runs_do_not_mix() -> None:
    """S-070."""
    with pytest.raises(MalformedJournalError, match="run-1"):
        check_chain("run-2", chain())


def test_a_newer_schema_is_refused_with_both_numbers() -> None:
    """S-062: an old release does not guess at what it does not know."""
    events = chain(1)
    newer = changed(events[0], schema_version=SCHEMA_VERSION + 1)
    assert f"newer than this release reads ({SCHEMA_VERSION})" in str(chain_problem(FIRST_PREVIOUS, RUN, 0, newer))


def test_an_erased_payload_leaves_the_rest_provable_and_is_not_read() -> None:
    """S-073."""
    events = chain()
    events[2] = changed(events[2], payload=None, salt=None)
    assert check_chain(RUN, events) == events[-1].digest
    with pytest.raises(PayloadErasedError, match="event 2"):
        payload_of(events[2])
    with pytest.raises(PayloadErasedError):
        ev.decode(events[2])


@pytest.mark.parametrize("half", ["payload", "salt"])
def test_a_payload_and_its_salt_go_together(half: str) -> None:
    """S-073."""
    events = chain()
    events[2] = changed(events[2], **{half: None})
    with pytest.raises(MalformedJournalError, match="together"):
        check_chain(RUN, events)


def test_equal_payloads_have_different_commitments_under_different_salts() -> None:
    """S-078: what is kept when a payload is erased says nothing about it."""
    payload = b'{"call":"0.0","now_ns":1}'
    one = seal(FIRST_PREVIOUS, RUN, 0, "now_observed", 1, 1, bytes(16), payload)
    other = seal(FIRST_PREVIOUS, RUN, 0, "now_observed", 1, 1, b"x" * 16, payload)
    assert one.commitment != other.commitment


def test_a_kind_or_payload_that_cannot_be_read_is_damage_named_by_place() -> None:
    """C16, S-070."""
    salt = bytes(SALT_BYTES)
    unknown = seal(FIRST_PREVIOUS, RUN, 0, "teleported", 1, 1, salt, b"{}")
    with pytest.raises(MalformedJournalError, match="teleported"):
        ev.decode(unknown)
    unfit = seal(FIRST_PREVIOUS, RUN, 0, "now_observed", 1, 1, salt, b'{"call":7}')
    with pytest.raises(MalformedJournalError, match="now_observed"):
        ev.decode(unfit)


def test_a_field_added_by_a_later_release_is_ignored_on_reading() -> None:
    """C16."""
    later = seal(FIRST_PREVIOUS, RUN, 0, "woken", 1, 1, bytes(16), b'{"call":"1.0","mood":"fine"}')
    assert ev.decode(later) == ev.Woken("1.0")


@pytest.mark.parametrize("kind", ev.KINDS)
def test_every_kind_is_named_in_snake_case_and_its_payload_reads_back(kind: str) -> None:
    """C14, S-062."""
    assert kind == kind.lower()
    assert "-" not in kind
    assert ev.KINDS[kind].event_kind == kind
