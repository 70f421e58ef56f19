"""The conversation as sent: append-only, shared, and hashed once."""

from itertools import pairwise

from perdure.contracts.messages import AssistantTurn, TextPart
from perdure.journal.transcript import Entry, Transcript, TurnEntry, UserEntry, keyed_digest

KEY = b"k" * 32


def turn(number: int, size: int = 100) -> list[Entry]:
    reply = AssistantTurn((TextPart("x" * size),))
    return [TurnEntry(str(number), reply), UserEntry(f"go on {number}")]


def filled(turns: int) -> Transcript:
    transcript = Transcript()
    for number in range(turns):
        for entry in turn(number):
            transcript.append(entry)
    return transcript


def test_a_view_is_a_length_over_shared_entries_and_does_not_grow() -> None:
    """R-014."""
    transcript = filled(2)
    view = transcript.view()
    transcript.append(UserEntry("later"))
    assert len(view) == 4
    assert view.turns == 2
    assert list(view)[-1] == UserEntry("go on 1")
    assert view[-1] == UserEntry("go on 1")
    assert list(view[1:2]) == [UserEntry("go on 0")]
    assert view.owner is transcript
    assert len(transcript.view()) == 5


def test_equal_entries_have_equal_digests_and_any_difference_shows() -> None:
    """S-015, O12."""
    assert filled(3).digest(KEY) == filled(3).digest(KEY)
    assert filled(3).digest(KEY) != filled(2).digest(KEY)
    assert filled(3).digest(KEY) != filled(3).digest(b"o" * 32)
    longer = filled(3)
    longer.append(UserEntry(""))
    assert longer.digest(KEY) != filled(3).digest(KEY)


def test_the_digest_does_not_depend_on_when_it_was_asked_for() -> None:
    """S-015, O12."""
    stepwise = Transcript()
    for number in range(5):
        for entry in turn(number):
            stepwise.append(entry)
            stepwise.digest(KEY)
    assert stepwise.digest(KEY) == filled(5).digest(KEY)


def test_n_turns_hash_their_bytes_once() -> None:
    """S-078: n turns hash O(n) bytes, however often a digest is asked for."""
    transcript, after = Transcript(), []
    for number in range(100):
        for entry in turn(number):
            transcript.append(entry)
        transcript.digest(KEY)
        after.append(transcript.hashed_bytes)
    steps = {later - earlier for earlier, later in pairwise(after[9:])}
    assert max(steps) - min(steps) < 10
    assert after[-1] < 100 * 300


def test_a_keyed_digest_is_short_url_safe_and_says_nothing_without_the_key() -> None:
    """S-078."""
    digest = keyed_digest(KEY, b"text")
    assert len(digest) == 22
    assert set(digest) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
    assert keyed_digest(b"o" * 32, b"text") != digest
