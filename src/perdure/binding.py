"""What a run is bound to when it starts or comes back: its agent, checked against what is recorded, and the model to
ask."""

from contextlib import suppress
from dataclasses import dataclass

from perdure.agent import Agent, label_problems
from perdure.agent_file import load_agent
from perdure.contracts.values import to_json
from perdure.errors import ConfigurationError, DefinitionChangedError, UsageError
from perdure.journal import events as ev
from perdure.journal.fold import RunState
from perdure.journal.render import resume_command
from perdure.models.registry import found_client
from perdure.ports import ModelClient
from perdure.release import VERSION
from perdure.run_ids import can_name_a_run

KEY_BYTES = 32
"""Length of a run's random key for keyed digests."""


@dataclass(frozen=True)
class Binding:
    """The model a drive asks."""

    client: ModelClient
    name: str
    own: bool
    """Made here from its name, and so closed here."""

    async def discard(self) -> None:
        """Gives the client back when no drive came of it."""
        if self.own:
            await self.client.close()


def checked_run_id(run_id: str) -> str:
    """The id, once it can name a run.

    Raises:
        UsageError: it cannot.
    """
    if not can_name_a_run(run_id):
        raise UsageError(
            f"the run id {run_id!r:.80} cannot be used",
            next="use 1 to 64 of A-Z a-z 0-9 . _ - and no `-` in front; `.` and `..` name folders",
        )
    return run_id


def bind(model: str | ModelClient | None, agent: Agent) -> Binding:
    """A model to ask: a client as it is, a name as the client it stands for.

    Raises:
        ConfigurationError: none is named, or nothing is there by that name.
    """
    if model is None:
        raise ConfigurationError(
            "no model is named", where=f"agent {agent.name}", next="give the agent a model, or name one"
        )
    if isinstance(model, str):
        client, made = found_client(model, base_url=agent.base_url)
        return Binding(client, model, own=made)
    return Binding(model, model.target, own=False)


async def rebind(state: RunState, agent: Agent, model: str | ModelClient | None) -> Binding:
    """The model to ask from here on: the one named now, else the agent's own client, else the one bound last.

    Raises:
        ConfigurationError: nothing is there by the name that is recorded.
    """
    if model is not None:
        return bind(model, agent)
    if agent.model is not None and not isinstance(agent.model, str):
        return bind(agent.model, agent)
    own = await _own_client(state, agent)
    if own is not None:
        return own
    try:
        return bind(state.model, agent)
    except ConfigurationError as error:
        hint = "if it was a client made in code, name the model anew: `perdure resume ... --model MODULE:ATTRIBUTE`"
        raise type(error)(error.found, where=error.where, next=f"{error.next}; {hint} (in Python: model=)") from error


async def _own_client(state: RunState, agent: Agent) -> Binding | None:
    """The client the agent names, if it is the one the run was bound to last. What a run records of a client that was
    given as an object is its target, and that need not lead to it."""
    if agent.model is None or agent.model == state.model:
        return None
    with suppress(ConfigurationError):
        named = bind(agent.model, agent)
        if named.client.target == state.model:
            return named
        await named.discard()
    return None


def rebound(state: RunState, binding: Binding) -> tuple[ev.ModelBound, ...]:
    """The event that says so, when the model to ask is not the one bound last."""
    return () if state.model in (binding.name, binding.client.target) else (ev.ModelBound(binding.name),)


def recorded_agent(state: RunState) -> Agent:
    """The agent found where the run's head says."""
    ref = state.started.agent_ref
    if ref is None:
        raise ConfigurationError(
            "the run does not say where its agent is",
            where=f"run {state.run_id}",
            next=f"{resume_command(state.run_id, None)}; in Python: engine.resume(run_id, agent)",
        )
    try:
        return load_agent(ref)
    except ConfigurationError as error:
        hint = "if the agent lies elsewhere now, name it: --agent REF"
        raise type(error)(
            error.found, where=error.where, next=f"{error.next}; {hint}" if error.next else hint
        ) from error


def must_be_unchanged(state: RunState, agent: Agent) -> None:
    """Refuses an agent that is not the one the run started with.

    Raises:
        DefinitionChangedError: naming the parts that differ.
    """
    recorded, present = state.started.agent.parts(), agent.spec.parts()
    changed = tuple(name for name, part in present.items() if recorded[name] != part)
    if changed:
        tools = state.started.agent.tool_changes(agent.spec) if "tools" in changed else []
        raise DefinitionChangedError(state.run_id, changed, f"; tools: {'; '.join(tools)}" if tools else "")


def head_events(
    agent: Agent, binding: Binding, input: object, labels: dict[str, str] | None = None
) -> tuple[ev.RunStarted, *tuple[ev.ExecutionDegraded, ...]]:
    """What a new run begins with: everything it pins, and what is done in a weaker way than asked."""
    checked = _checked_labels({**agent.labels, **(labels or {})})
    started = ev.RunStarted(agent.spec, to_json(input), binding.name, VERSION, agent.ref, checked)
    return started, *_degradations(agent)


def _checked_labels(labels: dict[str, str]) -> dict[str, str]:
    problems = label_problems(labels)
    if problems:
        raise ConfigurationError("; ".join(problems), where="labels", next="correct them")
    return labels


def _degradations(agent: Agent) -> list[ev.ExecutionDegraded]:
    if agent.limits.max_cost_microunits is None or agent.price is not None:
        return []
    summary = "a cost limit is set, but no price is known: cost_enforced is false and the limit is not applied"
    return [ev.ExecutionDegraded("cost_unenforced", summary)]
