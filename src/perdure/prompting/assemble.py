"""From an agent's definition and a transcript to a model request, and from a reply to what is wrong with it. Pure."""

from perdure.contracts.agents import AgentSpec
from perdure.contracts.messages import AssistantTurn, StopReason
from perdure.contracts.notices import Notice, NoticeKind
from perdure.journal.transcript import TranscriptView
from perdure.prompting import texts
from perdure.prompting.request import ModelRequest


def assemble(agent: AgentSpec, transcript: TranscriptView, notice: Notice | None = None) -> ModelRequest:
    """The next request of an agent: its instructions and tools as pinned, the conversation so far, and a notice if
    one is due."""
    return ModelRequest(
        instructions=agent.instructions,
        tools=agent.tools,
        transcript=transcript,
        settings=agent.settings,
        tool_choice="any" if agent.output_schema is not None else "auto",
        notice=notice,
    )


def unusable(turn: AssistantTurn, agent: AgentSpec) -> Notice | None:
    """Why a reply without a call cannot be the final answer, as the notice that asks again; None when it can."""
    if turn.stop is StopReason.LENGTH:
        return Notice(NoticeKind.CUT_REPLY, texts.CUT_REPLY)
    if turn.stop is StopReason.REFUSED:
        return Notice(NoticeKind.FILTERED_REPLY, texts.FILTERED_REPLY)
    if not turn.text.strip():
        return Notice(NoticeKind.EMPTY_REPLY, texts.EMPTY_REPLY)
    if agent.output_schema is not None:
        return Notice(NoticeKind.NO_CALL, texts.NO_CALL)
    return None
