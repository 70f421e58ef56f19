"""Perdure: a durable agent runtime. Importing it opens nothing; each name is loaded when it is first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.agent import Agent
    from perdure.agent_file import load_agent
    from perdure.calls import CallContext, Media, ProcessResult, Sleep, Suspend, ToolFailed, Unknown
    from perdure.contracts.agents import AgentSpec, Settings
    from perdure.contracts.limits import Limits, Price
    from perdure.contracts.messages import (
        AssistantTurn,
        Effect,
        Observation,
        ObservationStatus,
        StopReason,
        ToolCall,
        Usage,
    )
    from perdure.contracts.notices import Notice, NoticeKind
    from perdure.contracts.outcomes import Outcome
    from perdure.embedded import EmbeddedRun, run_embedded
    from perdure.engine import Engine
    from perdure.errors import (
        CallFailedError,
        ConcurrentUseError,
        ConfigurationError,
        DefinitionChangedError,
        DivergedError,
        InvalidAnswerError,
        LeaseHeldError,
        LeaseLostError,
        MalformedJournalError,
        ModelError,
        Parked,
        PayloadErasedError,
        PerdureError,
        RefusedError,
        StoreError,
        StreamFaultError,
        ToolDefinitionError,
        UnknownError,
        UsageError,
        ValueFormError,
    )
    from perdure.journal.transcript import Transcript
    from perdure.loops.react import react
    from perdure.prompting.assemble import assemble, unusable
    from perdure.prompting.request import ModelRequest
    from perdure.runs import Run
    from perdure.runtime.context import RunContext
    from perdure.tools.define import tool

_HOMES = {
    "perdure.agent": ("Agent",),
    "perdure.agent_file": ("load_agent",),
    "perdure.calls": ("CallContext", "Media", "ProcessResult", "Sleep", "Suspend", "ToolFailed", "Unknown"),
    "perdure.contracts.agents": ("AgentSpec", "Settings"),
    "perdure.contracts.limits": ("Limits", "Price"),
    "perdure.contracts.messages": (
        "AssistantTurn", "Effect", "Observation", "ObservationStatus", "StopReason", "ToolCall", "Usage",
    ),
    "perdure.contracts.notices": ("Notice", "NoticeKind"),
    "perdure.contracts.outcomes": ("Outcome",),
    "perdure.embedded": ("EmbeddedRun", "run_embedded"),
    "perdure.engine": ("Engine",),
    "perdure.errors": (
        "CallFailedError", "ConcurrentUseError", "ConfigurationError", "DefinitionChangedError", "DivergedError",
        "InvalidAnswerError", "LeaseHeldError", "LeaseLostError", "LoopStoppedError", "MalformedJournalError",
        "ModelError", "Parked", "PayloadErasedError", "PerdureError", "RefusedError", "StoreError", "StreamFaultError",
        "ToolDefinitionError", "UnknownError", "UsageError", "ValueFormError",
    ),
    "perdure.journal.transcript": ("Transcript",),
    "perdure.loops.react": ("react",),
    "perdure.prompting.assemble": ("assemble", "unusable"),
    "perdure.prompting.request": ("ModelRequest",),
    "perdure.runs": ("Run",),
    "perdure.runtime.context": ("RunContext",),
    "perdure.tools.define": ("tool",),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Agent",
    "AgentSpec",
    "AssistantTurn",
    "CallContext",
    "CallFailedError",
    "ConcurrentUseError",
    "ConfigurationError",
    "DefinitionChangedError",
    "DivergedError",
    "Effect",
    "EmbeddedRun",
    "Engine",
    "InvalidAnswerError",
    "LeaseHeldError",
    "LeaseLostError",
    "Limits",
    "LoopStoppedError",
    "MalformedJournalError",
    "Media",
    "ModelError",
    "ModelRequest",
    "Notice",
    "NoticeKind",
    "Observation",
    "ObservationStatus",
    "Outcome",
    "Parked",
    "PayloadErasedError",
    "PerdureError",
    "Price",
    "ProcessResult",
    "RefusedError",
    "Run",
    "RunContext",
    "Settings",
    "Sleep",
    "StopReason",
    "StoreError",
    "StreamFaultError",
    "Suspend",
    "ToolCall",
    "ToolDefinitionError",
    "ToolFailed",
    "Transcript",
    "Unknown",
    "UnknownError",
    "Usage",
    "UsageError",
    "ValueFormError",
    "assemble",
    "load_agent",
    "react",
    "run_embedded",
    "tool",
    "unusable",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'perdure' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
