"""The ReAct loop. Deliberately unprivileged: whatever it does, a loop written outside can do.

ask the model
calls: run the batch; the answer tool, taken, ends the loop
no calls: the text ends the loop, unless it cannot be the answer; then the model is told why and asked again
"""

from perdure.contracts.contract import JsonValue
from perdure.contracts.messages import ObservationStatus
from perdure.prompting.assemble import assemble, unusable
from perdure.runtime.context import RunContext


async def react(ctx: RunContext, task: str) -> JsonValue:  # noqa: ARG001 - the task stands in the transcript already
    """Drives an agent to its final answer: text, or the arguments of the answer tool under an output schema."""
    notice = None
    while True:
        await ctx.check_limits()
        turn = await ctx.ask(assemble(ctx.agent, ctx.transcript.view(), notice))
        notice = None
        if calls := turn.calls:
            seen = await ctx.use(calls)
            if seen[0].status is ObservationStatus.ANSWER:
                return seen[0].output
        else:
            notice = unusable(turn, ctx.agent)
            if notice is None:
                return turn.text
