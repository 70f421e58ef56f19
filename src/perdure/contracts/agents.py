"""An agent as data: what a run pins at its start, and the digest that names a definition."""

from perdure.contracts.contract import Contract, Fact, JsonObject, canonical, content_digest, without_defaults
from perdure.contracts.limits import Policy
from perdure.contracts.messages import ToolDescriptor

ANSWER_TOOL = "answer"
"""Name of the tool that carries a structured answer; an agent with an output schema may not own a tool of this name."""


class Settings(Contract, frozen=True):
    """How the model is asked."""

    temperature: float | None = None
    max_output_tokens: int = 4096
    seed: int | None = None
    timeout_s: float = 120.0
    """Longest time for one whole model call, in seconds."""
    idle_timeout_s: float = 60.0
    """Longest silence of a stream, in seconds."""


class AgentSpec(Fact, frozen=True):
    """An agent's definition as recorded in the head of each of its runs. The model is a binding and stands apart."""

    name: str
    instructions: str
    tools: tuple[ToolDescriptor, ...]
    """As offered to the model, the answer tool included when there is an output schema."""
    policy: Policy
    settings: Settings = Settings()
    output_schema: JsonObject | None = None
    loop: str = "react"
    """`react`, or `module:attribute` of the agent's own loop."""

    def parts(self) -> dict[str, bytes]:
        """The parts a changed definition is told apart by, each in canonical form."""
        return {
            "name": canonical(self.name),
            "instructions": canonical(self.instructions),
            "tools": canonical(self.tools),
            "output": canonical(self.output_schema),
            "settings": canonical(without_defaults(self.settings)),
            "policy": canonical(without_defaults(self.policy)),
            "loop": canonical(self.loop),
        }

    def tool_changes(self, other: "AgentSpec") -> list[str]:
        """How the tools of another definition differ from these, a tool each."""
        mine, theirs = ({tool.name: tool for tool in spec.tools} for spec in (self, other))
        changes = [f"{name} removed" for name in mine if name not in theirs]
        changes += [f"{name} added" for name in theirs if name not in mine]
        for name in mine.keys() & theirs.keys():
            one, two = mine[name], theirs[name]
            fields = [field for field in one.__struct_fields__ if getattr(one, field) != getattr(two, field)]
            if fields:
                changes.append(f"{name} changed in {', '.join(fields)}")
        return sorted(changes) or ["their order"]

    def digest(self) -> str:
        """Names this definition: equal for equal definitions (64 hex characters)."""
        return content_digest(canonical({name: content_digest(part) for name, part in self.parts().items()}))
