"""A model request as a loop states it: parts that stay equal over a run, a view of the transcript, and what is new."""

from typing import Literal

import msgspec

from perdure.contracts.agents import Settings
from perdure.contracts.messages import ToolDescriptor
from perdure.contracts.notices import Notice
from perdure.journal.transcript import TranscriptView


class ModelRequest(msgspec.Struct, frozen=True):
    """What a model is asked. Equal recorded facts give an equal request."""

    instructions: str
    tools: tuple[ToolDescriptor, ...]
    """As offered, in a stable order."""
    transcript: TranscriptView
    settings: Settings = Settings()
    tool_choice: Literal["auto", "any"] = "auto"
    """`any`: some tool must be called (asked for under an output schema)."""
    notice: Notice | None = None
    """Appended to the transcript before the request is sent."""
