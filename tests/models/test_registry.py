"""From a model's name to its client."""

import subprocess
import sys
from pathlib import Path

import pytest

from perdure.errors import ConfigurationError
from perdure.models.registry import found_client
from perdure.testing.scripted import ScriptedModel, text

CLIENT = ScriptedModel([text("hi")])


def make() -> ScriptedModel:
    return CLIENT


def program(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(__file__).parents[2] / "src")
    clean = {"PATH": "/usr/bin:/bin", "PYTHONPATH": source, **environment}
    return subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=False)


def test_a_provider_and_a_name_give_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """D-070."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    client = found_client("openai:gpt-x:fine-tuned", base_url="http://127.0.0.1:1/v1")[0]
    assert (client.target, client.strict) == ("openai:gpt-x:fine-tuned", True)


def test_a_module_and_an_attribute_give_the_client_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O14."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_models.py").write_text(
        "from perdure.testing.scripted import ScriptedModel, text\n"
        "client = ScriptedModel([text('hi')])\n"
        "def make():\n    return client\n"
        "other = 3\n"
    )
    assert found_client("my_models:client")[0].target == "scripted:script"
    assert found_client("my_models:make")[0] is found_client("my_models:client")[0]
    with pytest.raises(ConfigurationError, match="'other' in my_models is no ModelClient"):
        found_client("my_models:other")[0]
    with pytest.raises(ConfigurationError, match="my_models has no 'clien'; did you mean 'client'"):
        found_client("my_models:clien")[0]
    with pytest.raises(ConfigurationError, match="importing no\\.such\\.module failed"):
        found_client("no.such.module:client")[0]


@pytest.mark.parametrize(
    ("ref", "says"),
    [
        ("opneai:gpt", "did you mean openai"),
        ("nowhere_at_all:gpt", "known providers are "),
        ("openai:", "written provider:name"),
        ("gpt", "written provider:name"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_with_the_nearest_known_one(ref: str, says: str) -> None:
    """O15."""
    with pytest.raises(ConfigurationError, match=says) as caught:
        found_client(ref)[0]
    assert ref in str(caught.value)


def test_a_missing_key_is_named_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """O15."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigurationError, match="set OPENAI_API_KEY"):
        found_client("openai:gpt")[0]


def test_a_missing_sdk_is_named_with_the_command_that_installs_it() -> None:
    """O15."""
    code = (
        "import sys\nsys.modules['openai'] = None\n"
        "from perdure.models.registry import found_client\n"
        "from perdure.errors import ConfigurationError\n"
        "try:\n    found_client('openai:gpt')\nexcept ConfigurationError as error:\n    print(error)\n"
    )
    done = program(code, OPENAI_API_KEY="none")
    assert "pip install 'perdure[openai]'" in done.stdout, done.stderr


def test_importing_the_adapters_imports_no_sdk() -> None:
    """Importing is light and opens nothing."""
    code = (
        "import sys\nimport perdure.models.registry, perdure.models.openai_chat, perdure.testing.wire\n"
        "print([name for name in ('openai', 'h11', 'pydantic') if name in sys.modules])\n"
    )
    done = program(code)
    assert done.stdout == "[]\n", done.stderr
