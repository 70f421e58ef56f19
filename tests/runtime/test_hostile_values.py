"""What a loop, a tool, a provider or a path may really be, whatever its annotation says."""

import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.runs import agent_of, decoded, embedded, script, state_of

from perdure import Suspend, tool
from perdure.errors import ConfigurationError, StoreError, UsageError
from perdure.journal import events as ev
from perdure.settlement import limit
from perdure.stores.sqlite import SqliteStore
from perdure.testing import calls, text
from perdure.testing.clocks import ManualClock, SeededEntropy


def test_what_no_reader_would_take_is_not_written() -> None:
    """S-073, C16: an event with a field of a wrong type is refused before it is sealed."""
    wrong: Any = 5
    with pytest.raises(ConfigurationError, match="event patch_observed: it cannot be recorded"):
        ev.payload_bytes(ev.PatchObserved("0.0", wrong))


async def test_a_loop_that_exits_ends_its_run_and_not_the_process() -> None:
    """O13: the code of the user's does not choose how the command line exits."""

    async def leaves(ctx: Any, task: str) -> Any:
        sys.exit(0)

    run = await embedded(agent_of(loop=leaves), script())
    assert (run.outcome.status, run.outcome.terminal_reason) == ("failed", "loop_error")


@pytest.mark.parametrize("call", ["do", "patched", "wait", "sleep"])
async def test_a_call_with_a_value_of_a_wrong_type_records_nothing_unreadable(call: str) -> None:
    """C16: what is on record can be read back, and the run ends saying why."""
    wrong: Any = 5

    async def loop(ctx: Any, task: str) -> Any:
        match call:
            case "do":
                await ctx.do(wrong, lambda: 1)
            case "patched":
                await ctx.patched(wrong)
            case "wait":
                await ctx.wait(wrong, schema={})
            case _:
                await ctx.sleep(wrong)

    run = await embedded(agent_of(loop=loop), script())
    assert decoded(run.envelopes)
    assert (run.outcome.status, run.outcome.terminal_reason) == ("failed", "loop_error")


async def test_a_tool_that_asks_to_wait_with_no_text_has_failed() -> None:
    """S-057: the failure names the tool, and the run goes on."""
    wrong: Any = 5

    @tool(effect="read")
    async def odd() -> Any:
        """Asks oddly."""
        return Suspend(wrong, {}, "question")

    run = await embedded(agent_of(odd), script(calls(("odd", {})), text("Done.")))
    assert run.outcome.output == "Done."
    assert [event.reason for event in decoded(run.envelopes) if isinstance(event, ev.ToolCallFailed)] == ["output_form"]


async def test_a_pipe_is_not_replaced_by_a_store(tmp_path: Path) -> None:
    """S-073: what is no file is refused and stays what it is."""
    place = tmp_path / "pipe.db"
    os.mkfifo(place)
    with pytest.raises(StoreError, match="device, pipe or socket"):
        await SqliteStore.open(place, clock=ManualClock(), entropy=SeededEntropy())
    assert stat.S_ISFIFO(place.stat().st_mode)


@pytest.mark.parametrize("total", ["²", "9" * 5000])
async def test_a_total_that_is_no_sane_number_is_refused(total: str) -> None:
    """S-036: nothing is recorded."""
    run = await embedded(agent_of(), script(text("Done.")))
    state = state_of(run.envelopes[:1])
    with pytest.raises(UsageError, match="no whole number"):
        limit(state, {"max_model_turns": total}, None)
