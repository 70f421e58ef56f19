"""The conversation as sent: append-only, shared, with a rolling digest.

An entry is rendered once and never changed, so a request is a view (a length) and not a copy, and n turns hash and
store O(n) bytes. The digest is keyed: without the run's key it says nothing about the text.
"""

import hmac
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import overload

from perdure.contracts.contract import Fact, canonical
from perdure.contracts.messages import AssistantTurn, Observation


class UserEntry(Fact, tag="user", tag_field="type", frozen=True):
    """Text from outside the model: the task, a notice of the runtime, a person's words."""

    text: str


class TurnEntry(Fact, tag="turn", tag_field="type", frozen=True):
    """A reply of the model. `id` is its call id; the calls in it are `id.0`, `id.1`, ..."""

    id: str
    turn: AssistantTurn


class ResultsEntry(Fact, tag="results", tag_field="type", frozen=True):
    """Observations for calls of the turn before, in call order."""

    observations: tuple[Observation, ...]


Entry = UserEntry | TurnEntry | ResultsEntry


def keyed_digest(key: bytes, data: bytes) -> str:
    """HMAC-SHA-256 under a run's key, its first 16 bytes in URL-safe base64 (22 characters)."""
    return _shown(hmac.new(key, data, "sha256"))


def _shown(code: hmac.HMAC) -> str:
    return urlsafe_b64encode(code.digest()[:16])[:22].decode("ascii")


class TranscriptView(Sequence[Entry]):
    """The first `length` entries of a transcript, shared and never copied."""

    __slots__ = ("_entries", "_length", "owner", "turns")

    def __init__(self, owner: "Transcript", entries: list[Entry], length: int, turns: int) -> None:
        self._entries, self._length = entries, length
        self.owner = owner
        """The transcript this is a view of; a reply to a request is appended there."""
        self.turns = turns
        """How many model turns the view holds."""

    @property
    def whole(self) -> bool:
        """Whether nothing was added to the transcript since."""
        return self._length == len(self._entries)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Entry]:
        return islice(self._entries, self._length)

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Entry]: ...
    def __getitem__(self, index: int | slice) -> Entry | Sequence[Entry]:
        if isinstance(index, slice):
            return self._entries[: self._length][index]
        return self._entries[range(self._length)[index]]


class Transcript:
    """An append-only log of entries. Views of it stay valid while it grows."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._turns = 0
        self._hashed = 0
        self._code: hmac.HMAC | None = None
        self._bytes = 0

    def append(self, entry: Entry) -> None:
        """Adds an entry; O(1)."""
        self._entries.append(entry)
        self._turns += isinstance(entry, TurnEntry)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def turns(self) -> int:
        """How many model turns it holds."""
        return self._turns

    def view(self) -> TranscriptView:
        """What is there now; later entries do not show in it."""
        return TranscriptView(self, self._entries, len(self._entries), self._turns)

    def digest(self, key: bytes) -> str:
        """The digest of all entries so far under the run's key; only entries not hashed before are read."""
        if self._code is None:
            self._code = hmac.new(key, digestmod="sha256")
        # A slice, not `islice`: that would step over every entry hashed before, and n turns would take O(n^2) steps.
        for entry in self._entries[self._hashed :]:
            form = canonical(entry)
            self._bytes += len(form)
            self._code.update(form)
        self._hashed = len(self._entries)
        return _shown(self._code)

    @property
    def hashed_bytes(self) -> int:
        """Size of the entries the digest covers, in bytes of their canonical form."""
        return self._bytes
