"""What the runtime says to the model between turns; stored with the request that carries it."""

from enum import StrEnum

from perdure.contracts.contract import Fact


class NoticeKind(StrEnum):
    """Why the runtime speaks to the model. Each spends one repair, except `no_call`, which costs a turn only."""

    EMPTY_REPLY = "empty_reply"
    CUT_REPLY = "cut_reply"
    FILTERED_REPLY = "filtered_reply"
    NO_CALL = "no_call"
    """A reply without a call where the answer tool was asked for."""


class Notice(Fact, frozen=True):
    """Text of the runtime, appended to the transcript as a user entry."""

    kind: NoticeKind
    text: str
