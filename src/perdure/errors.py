"""The one error tree, and the signal that a run waits.

PerdureError
├── UsageError                 something named or written wrongly; nothing was done        (exit code 2)
│   ├── ConfigurationError     an agent, tool, limit or file that cannot be used as written
│   │   ├── ToolDefinitionError
│   │   └── AnswerToolNameTakenError
│   ├── UnknownError           a run, call or tool that is not there
│   ├── InvalidAnswerError     an answer, resolution or limit that does not fit what waits
│   └── ConcurrentUseError     a second call on a context while one is open
├── RefusedError               the run stays as it was; nothing was recorded               (exit code 4)
│   ├── LeaseHeldError         another driver holds the run
│   ├── LeaseLostError         this driver's lease is gone; nothing it does counts any more
│   ├── DivergedError          the code asks for something else than the journal holds
│   ├── DefinitionChangedError the agent is not the one the run started with
│   ├── MalformedJournalError  damage, a gap or a broken chain
│   ├── PayloadErasedError     replay reached a payload that was erased
│   ├── LoopStoppedError       the loop raised or returned while a call of its own was open
│   └── StoreError             the store cannot be used, or failed
├── ValueFormError             a value with no agreed JSON form
├── CallFailedError            an inline call (`RunContext.do`) that failed or whose outcome is unknown
└── ModelError                 a model call that failed for good
    └── StreamFaultError       one attempt's stream broke its protocol, or ended early

Parked (BaseException)         the run waits durably; raised by a context, caught by the engine
"""

from typing import Any, ClassVar


class PerdureError(Exception):
    """Base of every error: what was found, where, and what to do next."""

    code: ClassVar[str] = "error"
    """Stable name for programs."""
    exit_code: ClassVar[int] = 1

    def __init__(self, found: str, *, where: str = "", next: str = "") -> None:
        self.found, self.where, self.next = found, where, next
        head = f"{where}: {found}" if where else found
        super().__init__(f"{head}; {next}" if next else head)


class UsageError(PerdureError):
    """Something was named or written wrongly; nothing was done."""

    code = "usage"
    exit_code = 2


class ConfigurationError(UsageError):
    """An agent, limit or file that cannot be used as written."""

    code = "configuration"


class ToolDefinitionError(ConfigurationError):
    """A function that cannot be offered as a tool."""

    code = "tool_definition"


class AnswerToolNameTakenError(ConfigurationError):
    """An agent with an output owns a tool of the answer tool's name: the two could not be told apart in a reply."""

    code = "answer_tool_name_taken"


class UnknownError(UsageError):
    """A run, call or tool that is not there."""

    code = "unknown"


class InvalidAnswerError(UsageError):
    """An answer, resolution or limit that does not fit what the run waits for; nothing was recorded."""

    code = "invalid_answer"


class ConcurrentUseError(UsageError):
    """A second call on a context while one is open; nothing was recorded. Use one batch for concurrent calls."""

    code = "concurrent_use"


class RefusedError(PerdureError):
    """The run stays as it was; nothing was recorded."""

    code = "refused"
    exit_code = 4


class LeaseHeldError(RefusedError):
    """Another driver holds the run."""

    code = "lease_held"


class LeaseLostError(RefusedError):
    """This driver's lease is gone: another took the run over, or it could not be renewed in time."""

    code = "lease_lost"


class DivergedError(RefusedError):
    """The code asks for something else than the journal holds at this place."""

    code = "divergence"

    def __init__(self, call: str, recorded: str, asked: str, part: str) -> None:
        self.call, self.recorded, self.asked, self.part = call, recorded, asked, part
        super().__init__(
            f"the journal holds {recorded}, the loop asked for {asked} (differs in: {part})",
            where=f"call {call}",
            next="run it with the code that started it",
        )


class DefinitionChangedError(RefusedError):
    """The agent is not the one the run started with."""

    code = "definition_changed"

    def __init__(self, run_id: str, parts: tuple[str, ...], details: str = "") -> None:
        self.parts = parts
        super().__init__(
            f"the agent's definition changed since the run started (differs in: {', '.join(parts)}{details})",
            where=f"run {run_id}",
            next="resume it with the agent as it was, or give it up with "
            f"`perdure abandon {run_id}` and start a new run",
        )


class MalformedJournalError(RefusedError):
    """Damage, a gap or a broken chain; fails closed."""

    code = "malformed_journal"

    def __init__(self, run_id: str, seq: int | None, kind: str | None, problem: str) -> None:
        self.run_id, self.seq, self.kind, self.problem = run_id, seq, kind, problem
        place = f"run {run_id}" + ("" if seq is None else f", event {seq}") + ("" if kind is None else f" ({kind})")
        super().__init__(problem, where=place, next="restore the store from a copy that `perdure verify` accepts")


class PayloadErasedError(RefusedError):
    """Replay reached a payload that was erased."""

    code = "payload_erased"


class LoopStoppedError(RefusedError):
    """The loop raised or returned while a call of its own was open: what became of that call is not known, so no end
    was recorded. What the loop raised, if anything, is the cause; `calls` names the open calls."""

    code = "loop_stopped"

    def __init__(self, run_id: str, calls: tuple[str, ...], found: str) -> None:
        self.calls = calls
        super().__init__(
            f"{found} while a call of its own was open: {', '.join(calls)}",
            where=f"run {run_id}",
            next="await every call in the loop, then resume the run",
        )


class StoreError(RefusedError):
    """The store cannot be used, or failed; what was not confirmed may or may not be stored and is read at the next
    open."""

    code = "store_error"


class ValueFormError(PerdureError):
    """A value with no agreed JSON form."""

    code = "value_form"

    def __init__(self, path: str, found: str) -> None:
        self.path = path
        super().__init__(found, where=path, next="return JSON types, records, enums, Decimals or aware datetimes")


class CallFailedError(PerdureError):
    """An inline call that failed, or whose outcome is unknown (`unknown` is then true)."""

    code = "call_failed"

    def __init__(self, call: str, name: str, message: str, *, unknown: bool = False) -> None:
        self.call, self.name, self.unknown = call, name, unknown
        super().__init__(message, where=f"call {call} ({name})")


RETRYABLE_KINDS = ("rate_limited", "overloaded", "timeout", "connection")
"""Kinds of a model error after which the same request may be sent again."""


class ModelError(PerdureError):
    """A model call that failed. `kind` is a stable word; `retryable` says whether the same request may be sent
    again."""

    code = "model_error"

    def __init__(
        self,
        kind: str,
        found: str,
        *,
        where: str = "",
        next: str = "",
        retryable: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        self.kind, self.retryable, self.retry_after_s = kind, retryable, retry_after_s
        super().__init__(found, where=where, next=next)


class StreamFaultError(ModelError):
    """One attempt's stream broke its protocol or ended early: nothing of it runs, nothing of it is the answer."""

    code = "stream_fault"

    def __init__(self, kind: str, found: str, *, where: str = "", usage: Any = None) -> None:
        self.usage = usage
        super().__init__(kind, found, where=where, next="the call is tried again within the limits", retryable=True)


class Parked(BaseException):
    """The run waits durably. A BaseException, so that a tool's or loop's `except Exception` cannot swallow it.

    Attributes:
        kind: one of the park kinds, or `interrupted` when the process was asked to stop.
        detail: what the run waits for.
    """

    def __init__(self, kind: str, detail: dict[str, Any]) -> None:
        self.kind, self.detail = kind, detail
        super().__init__(f"parked: {kind}")
