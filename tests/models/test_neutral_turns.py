"""One form of a turn, whoever it comes from."""

import pytest

from perdure.journal.transcript import Transcript, UserEntry
from perdure.models.openai_chat import OpenAIChat
from perdure.ports import ModelClient
from perdure.prompting.request import ModelRequest
from perdure.runtime.turns import assemble
from perdure.testing import ScriptedModel, calls, wire

REPLY = calls(("read", {"path": "a", "lines": [1, 2]}), ("read", {"path": "ü"}), text="Both at once.")


async def turn_of(model: ModelClient) -> object:
    transcript = Transcript()
    transcript.append(UserEntry("go"))
    stream = model.stream(ModelRequest("", (), transcript.view()))
    turn = await assemble(stream, strict=model.strict, idle_timeout_s=5, timeout_s=5)
    return [(call.name, call.arguments, call.fault) for call in turn.calls], turn.text, turn.stop


@pytest.mark.slow
async def test_a_script_and_a_provider_give_the_same_turn_for_the_same_reply() -> None:
    """O9: nothing of a protocol is left in a turn."""
    async with wire.serve("openai-chat", [REPLY]) as server:
        client = OpenAIChat("any", base_url=server.base_url, api_key="sk-none")
        try:
            provider = await turn_of(client)
        finally:
            await client.close()
    assert provider == await turn_of(ScriptedModel([REPLY]))
