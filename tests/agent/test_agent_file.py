"""From a file or a module to an agent."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.agent_file import load_agent
from perdure.contracts.agents import Settings
from perdure.contracts.limits import Price
from perdure.errors import ConfigurationError, ToolDefinitionError

WHOLE = """
name = "job-recovery"
model = "openai:some-model"
base_url = "http://127.0.0.1:8000/v1"
instructions_file = "prompt.md"
tools = ["job_tools:job_status", "job_tools:job_retry"]
output = "job_tools:Report"
loop = "job_tools:my_loop"
strategy = "react"
batch = "strict"
resume_mode = "conservative"
on_exhausted = "finish"
approval = "auto"
on_reject = "end"

[settings]
temperature = 0
max_output_tokens = 100
seed = 7

[limits]
max_model_turns = 9
deadline_seconds = 60

[price]
input = 1
output = 2
currency = "EUR"

[labels]
team = "x"
"""

TOOLS = """
import dataclasses
from perdure.tools.define import tool

@dataclasses.dataclass
class Report:
    status: str

@tool(effect="read")
async def job_status(job_id: str) -> str:
    "Looks."
    return job_id

@tool
def job_retry(job_id: str) -> str:
    "Acts."
    import lazily
    return lazily.WORD + job_id

def plain(a: int) -> int:
    return a

async def my_loop(ctx, task):
    return task
"""


@pytest.fixture(autouse=True)
def _own_imports() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name in ("job_tools", "lazily", "more", "agents_here", "broken", "leaving"):
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job_tools.py").write_text(TOOLS)
    (tmp_path / "lazily.py").write_text("WORD = 'again '\n")
    (tmp_path / "prompt.md").write_text("Recover the jöb.\n")
    (tmp_path / "agent.toml").write_text(WHOLE)
    return tmp_path


def test_a_whole_file_gives_the_agent_it_declares(folder: Path) -> None:
    agent = load_agent(str(folder / "agent.toml"))
    spec = agent.spec
    assert (agent.name, agent.model, agent.base_url) == (
        "job-recovery",
        "openai:some-model",
        "http://127.0.0.1:8000/v1",
    )
    assert spec.instructions == "Recover the jöb.\n"
    assert [one.name for one in spec.tools] == ["job_status", "job_retry", "answer"]
    assert spec.loop == "job_tools:my_loop"
    assert spec.settings == Settings(temperature=0.0, max_output_tokens=100, seed=7)
    policy = spec.policy
    assert (policy.batch, policy.resume_mode, policy.on_exhausted, policy.on_reject) == (
        "strict",
        "conservative",
        "finish",
        "end",
    )
    assert (policy.limits.max_model_turns, policy.limits.max_tool_calls, policy.limits.deadline_seconds) == (9, 200, 60)
    assert policy.price == Price(1, 2, None, "EUR")
    assert agent.labels == {"team": "x"}
    assert agent.ref == str(folder / "agent.toml")


def test_a_file_is_found_from_its_base_and_from_the_working_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_agent("agent.toml", base=folder).ref == str(folder / "agent.toml")
    (folder / "below").mkdir()
    monkeypatch.chdir(folder / "below")
    assert load_agent("../agent.toml").ref == str(folder / "agent.toml")


def test_an_import_inside_a_tool_still_finds_the_files_beside_it(folder: Path) -> None:
    agent = load_agent(str(folder / "agent.toml"))
    assert sys.path[0] != str(folder)
    assert agent.tools_by_name["job_retry"]("7") == "again 7"  # type: ignore[operator]


def test_a_file_read_twice_gives_an_equal_definition(folder: Path) -> None:
    """R-031."""
    first, second = (load_agent(str(folder / "agent.toml")) for _ in range(2))
    assert first.spec == second.spec
    assert sys.path.count(str(folder)) == 1


def test_a_file_may_carry_its_output_as_a_schema(folder: Path) -> None:
    """S-040."""
    (folder / "report.json").write_text('{"type": "object", "properties": {"n": {"type": "integer"}}}')
    (folder / "agent.toml").write_text('name = "a"\noutput_schema = "report.json"\n')
    agent = load_agent(str(folder / "agent.toml"))
    assert agent.spec.output_schema == {"type": "object", "properties": {"n": {"type": "integer"}}}


def test_a_module_attribute_names_an_agent_too(folder: Path) -> None:
    (folder / "agents_here.py").write_text(
        "from perdure.agent import Agent\nclass Kept:\n    mine = Agent(name='a')\nmine = Agent(name='b')\nnone = 3\n"
    )
    assert load_agent("agents_here:mine", base=folder).name == "b"
    assert load_agent("agents_here:Kept.mine", base=folder).ref == "agents_here:Kept.mine"
    with pytest.raises(ConfigurationError, match=r"'agents_here:none'.*no Agent \(int\)"):
        load_agent("agents_here:none", base=folder)


BAD_FILES: dict[str, tuple[str, str, str]] = {
    "no TOML": ('name = "a"\nmodel = \n', "at line 2, column 9", "correct that line"),
    "an unfinished file": ('name = "a', "it is no TOML", "correct that line"),
    "an unknown key": ('name = "a"\ninstruction = "x"', "no key 'instruction'", "did you mean 'instructions'?"),
    "an unknown key in a table": (
        'name = "a"\n[limits]\nmax_model_turn = 5',
        "no key 'limits.max_model_turn'",
        "did you mean 'max_model_turns'?",
    ),
    "an unknown setting": ('name = "a"\n[settings]\nzzz = 5', "no key 'settings.zzz'", "known keys: temperature"),
    "an unknown price": ('name = "a"\n[price]\ninputs = 5', "no key 'price.inputs'", "did you mean 'input'?"),
    "MCP servers": ('name = "a"\n[[mcp]]\nurl = "x"', "no key 'mcp'", "not available in this release"),
    "no name": ('model = "openai:a"', "name", "correct that key"),
    "a number for text": ("name = 5", "name: Expected `text`, got `integer`", "correct that key"),
    "text for a number": (
        'name = "a"\n[limits]\nmax_model_turns = "5"',
        "limits.max_model_turns: Expected `integer`, got `text`",
        "correct that key",
    ),
    "a value for a table": ('name = "a"\nlimits = 5', "limits: Expected `table`, got `integer`", "correct that key"),
    "a label that is a number": ('name = "a"\n[labels]\nk = 1', "labels", "correct that key"),
    "half a price": ('name = "a"\n[price]\ninput = 5', "output", "correct that key"),
    "two instructions": ('name = "a"\ninstructions = "x"\ninstructions_file = "prompt.md"', "both given", "keep one"),
    "no instructions file": ('name = "a"\ninstructions_file = "no.md"', "there is no file", "check the path"),
    "a folder of instructions": ('name = "a"\ninstructions_file = "."', "cannot be read", "check the path"),
    "a tool without attribute": ('name = "a"\ntools = ["job_tools"]', "no module:attribute", 'write "job_tools:NAME"'),
    "a tool with a dot": ('name = "a"\ntools = ["my.tools.act"]', "no module:attribute", 'write "my.tools:act"'),
    "a tool in a .py": ('name = "a"\ntools = ["job_tools.py"]', "no module:attribute", 'write "job_tools:NAME"'),
    "a tool of no module": ('name = "a"\ntools = [":act"]', "no module:attribute", 'write "MODULE:act"'),
    "a tool of a module beside": ('name = "a"\ntools = [".job_tools:act"]', "no module:attr", 'write "job_tools:act"'),
    "one tool for a list": ('name = "a"\ntools = "job_tools:act"', "tools is a text", 'tools = ["job_tools:act"]'),
    "a tool that is not there": (
        'name = "a"\ntools = ["job_tools:job_statu"]',
        "job_tools has no 'job_statu'",
        "did you mean 'job_status'?",
    ),
    "a module that is not there": (
        'name = "a"\ntools = ["nowhere_tools:x"]',
        "importing nowhere_tools failed",
        "start at",
    ),
    "a module that breaks": ('name = "a"\ntools = ["broken:x"]', "importing broken failed: ZeroDivisionError", "check"),
    "a module that leaves": ('name = "a"\ntools = ["leaving:x"]', "importing leaving failed: SystemExit", "check"),
    "a function that is no tool": ('name = "a"\ntools = ["job_tools:plain"]', "plain is no tool", "decorate"),
    "an output that is not there": ('name = "a"\noutput = "job_tools:Repor"', "no 'Repor'", "did you mean 'Report'?"),
    "an output that is no model": ('name = "a"\noutput = "job_tools:plain"', "it is <function plain", "pydantic model"),
    "an output schema that is no JSON": ('name = "a"\noutput_schema = "prompt.md"', "is no JSON", "correct that line"),
    "a loop that is not async": ('name = "a"\nloop = "job_tools:plain"', "the loop is", "async def"),
    "a plan": ('name = "a"\nstrategy = "plan_react"', "not available in this release", "use 'react'"),
    "a zero limit": ('name = "a"\n[limits]\nmax_tool_calls = 0', "max_tool_calls is 0", "correct"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_file_that_cannot_be_used_is_refused_with_file_key_and_next_step(folder: Path, case: str) -> None:
    """R-071."""
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "leaving.py").write_text("raise SystemExit(3)\n")
    text, found, step = BAD_FILES[case]
    (folder / "agent.toml").write_text(text)
    with pytest.raises(ConfigurationError) as raised:
        load_agent(str(folder / "agent.toml"))
    assert raised.value.where.startswith(str(folder / "agent.toml"))
    assert found in raised.value.found
    assert step in raised.value.next
    assert sys.path[0] != str(folder)


def test_a_tool_that_cannot_be_defined_names_its_function_and_parameter(folder: Path) -> None:
    """R-031."""
    (folder / "job_tools.py").write_text("from perdure.tools.define import tool\n@tool\ndef act(a): ...\n")
    with pytest.raises(ToolDefinitionError, match=r"tool function job_tools.act, parameter a: it has no type"):
        load_agent(str(folder / "agent.toml"))


@pytest.mark.parametrize("ref", ["no.toml", "below/no.toml", "nothing", "below/agent"])
def test_a_reference_to_nothing_is_refused(folder: Path, ref: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        load_agent(ref, base=folder)
    assert raised.value.next


def test_a_file_that_is_no_text_is_refused(folder: Path) -> None:
    (folder / "agent.toml").write_bytes(b'name = "\xff"')
    with pytest.raises(ConfigurationError, match=r"not UTF-8 \(byte 8\)"):
        load_agent(str(folder / "agent.toml"))


def test_two_folders_with_one_module_name_do_not_mix(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    load_agent(str(folder / "agent.toml"))
    other = tmp_path_factory.mktemp("other")
    (other / "job_tools.py").write_text(TOOLS)
    (other / "agent.toml").write_text('name = "a"\ntools = ["job_tools:job_status"]')
    with pytest.raises(ConfigurationError, match=r"another one was loaded from .*job_tools\.py"):
        load_agent(str(other / "agent.toml"))


def test_a_namesake_behind_an_import_is_found_too(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    load_agent(str(folder / "agent.toml"))
    other = tmp_path_factory.mktemp("other")
    (other / "job_tools.py").write_text(TOOLS)
    (other / "more.py").write_text("from job_tools import job_status as status, plain\n")
    (other / "agent.toml").write_text('name = "a"\ntools = ["more:status"]')
    with pytest.raises(ConfigurationError, match=r"the module job_tools of .*other"):
        load_agent(str(other / "agent.toml"))


def test_a_namesake_nobody_imports_is_no_obstacle(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    load_agent(str(folder / "agent.toml"))
    other = tmp_path_factory.mktemp("other")
    (other / "job_tools.py").write_text(TOOLS)
    (other / "agent.toml").write_text('name = "a"\n')
    assert load_agent(str(other / "agent.toml")).name == "a"
