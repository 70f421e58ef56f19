"""What is written wrongly or refused: a typed error, the right exit code, and everything as it was."""

import json
import sqlite3
import subprocess
import sys

import pytest
from tests.cli.shell import Shell

pytestmark = pytest.mark.slow

GOOD = 'name = "adding"\nmodel = "my_models:adding"\ntools = ["my_tools:add"]\n'


BAD_AGENTS = {
    GOOD + "colour = 1\n": ("configuration", "colour"),
    GOOD + "[limits]\nmax_model_turn = 1\n": ("configuration", "did you mean 'max_model_turns'?"),
    GOOD + "[limits]\nmax_model_turns = 0\n": ("configuration", "max_model_turns"),
    GOOD.replace(":add", ":untyped"): ("tool_definition", "untyped"),
    GOOD.replace(":add", ":nothing"): ("configuration", "nothing"),
    GOOD.replace('adding"\ntools', 'addin"\ntools'): (
        "configuration",
        "my_models has no 'addin'; did you mean 'adding'",
    ),
    GOOD.replace('["my_tools:add"]', '"my_tools:add"'): ("configuration", 'write tools = ["my_tools:add"]'),
    GOOD.replace("my_tools", "no_tools"): ("configuration", "no_tools"),
    GOOD + 'output = "builtins:set"\n': ("configuration", "output"),
    GOOD + "batch = = 1\n": ("configuration", "line 4, column 9"),
    GOOD.replace("my_models:adding", "nobody:model"): ("configuration", "nobody"),
    GOOD.replace("my_models:adding", "my_models:nothing"): ("configuration", "nothing"),
    GOOD + f"[limits]\nmax_total_tokens = {2**63}\n": ("configuration", "max_total_tokens"),
    GOOD + f"[limits]\nmax_total_tokens = {'9' * 5000}\n": ("configuration", "cannot be read"),
    GOOD + f"[settings]\nseed = {-(2**64)}\n": ("configuration", "seed"),
    GOOD + f"[price]\ninput = {10**30}\noutput = 1\n": ("configuration", "input is a whole number of 100 bits"),
    GOOD + f"x = {'[' * 5000}\n": ("configuration", "cannot be read"),
}


def test_an_agent_that_cannot_be_used_exits_2_naming_the_thing_and_leaves_no_run(shell: Shell) -> None:
    """S-042, C16, C21."""
    for agent, (code, says) in BAD_AGENTS.items():
        shell.write("bad.toml", agent)
        refused = shell("run", "bad.toml", "--input", "x", "--run-id", "R", "--json", check=2)
        assert refused.error["code"] == code, agent
        assert says in refused.error["message"], agent
        assert refused.error["where"], agent
        assert refused.error["next"], agent
        assert refused.out == ""
    assert shell("show", "R", "--json", check=2).error["code"] == "unknown"


@pytest.mark.parametrize("ends", ["KeyboardInterrupt", "SystemExit(0)"])
@pytest.mark.parametrize("part", ["tools", "model"])
def test_a_module_that_ends_the_process_when_it_is_imported_is_named(ends: str, part: str, shell: Shell) -> None:
    """C16: the command must not end as if somebody had interrupted it, nor as if all were well."""
    shell.write("leaving.py", f"raise {ends}\n")
    good = {"tools": GOOD.replace("my_tools:add", "leaving:x"), "model": GOOD.replace("my_models:adding", "leaving:x")}
    shell.write("bad.toml", good[part])
    refused = shell("run", "bad.toml", "--input", "x", "--json", check=2)
    assert refused.error["code"] == "configuration"
    assert f"importing leaving failed: {ends.partition('(')[0]}" in refused.error["message"]


def test_in_a_directory_that_is_gone_every_command_says_so_and_exits_2(shell: Shell) -> None:
    """C16."""
    gone = shell.folder / "gone"
    temporary = shell.folder / "temporary"
    temporary.mkdir()
    agent, store = str(shell.folder / "adding.toml"), f"sqlite:{shell.folder}/perdure.db"
    for argv in (
        *(("run", "a.toml", "--input", "x"), ("run", agent, "--input", "x", "--store", store)),
        *(("list",), ("watch", "R"), ("resume", "R"), ("recover",), ("verify",), ("doctor",), ("cancel", "R")),
        *(("demo",), ("demo", "--serve"), ("crash-test", "a.toml", "--input", "x")),
    ):
        gone.mkdir()
        program = "import os, sys; os.chdir(sys.argv[1]); os.rmdir(sys.argv[1]); os.execv(sys.executable, sys.argv[2:])"
        command = [sys.executable, "-c", program, str(gone), sys.executable, "-m", "perdure.cli", *argv, "--json"]
        done = subprocess.run(
            command,
            env=shell.environment | {"TMPDIR": str(temporary)},
            cwd=shell.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        error = json.loads(done.stderr)["error"]
        assert error["found"] == "the working directory is no longer there", argv
        assert error["next"]
    assert not (shell.folder / "perdure.db").exists()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("run_id", [".", "..", "--", "-R", "a/b", "", "a" * 65, "é"])
def test_an_id_that_is_an_option_or_another_folder_names_no_run(run_id: str, shell: Shell) -> None:
    """S-042, S-077."""
    refused = shell(*RUN, f"--run-id={run_id}", "--json", check=2)
    assert refused.error["code"] == "usage", refused
    assert "cannot be used" in refused.error["message"]
    assert list(shell.folder.glob("perdure.db*")) == []


def test_an_id_with_dots_and_dashes_inside_names_a_run(shell: Shell) -> None:
    for run_id in ("...", "_-.", ".a", "a-", "a" * 64):
        assert shell(*RUN, "--run-id", run_id, "--json", check=0).record["run_id"] == run_id


RUN = ("run", "adding.toml", "--input", "x")
BEFORE_THE_STORE = (
    ("run",),
    ("run", "adding.toml"),
    (*RUN, "--input-json", "1"),
    ("run", "adding.toml", "--input", "@nothing.txt"),
    ("run", "adding.toml", "--input-json", "{"),
    (*RUN, "--label", "novalue"),
    (*RUN, "--store", "mysql:x"),
    (*RUN, "--detach"),
    ("run", "nothing.toml", "--input", "x"),
    ("run", "nothing:x", "--input", "x"),
    ("run", "adding", "--input", "x"),
    ("runs",),
    ("demo", "--seed", "many"),
    ("demo", "--scenario", "nothing"),
)


def test_what_is_written_wrongly_exits_2_and_makes_no_store(shell: Shell) -> None:
    for argv in BEFORE_THE_STORE:
        refused = shell(*argv, "--json", check=2)
        assert refused.error["code"] in {"usage", "configuration"}, refused
        assert refused.out == ""
    assert list(shell.folder.glob("perdure.db*")) == []


def test_what_the_store_would_have_to_hold_wrongly_exits_2_and_leaves_no_run(shell: Shell) -> None:
    """S-042, S-077."""
    for argv in (("--run-id", "no/slash"), ("--model", "nobody:x"), ("--label", f"{'k' * 65}=v")):
        refused = shell(*RUN, *argv, "--json", check=2)
        assert refused.error["code"] in {"usage", "configuration"}, refused
    assert shell("list", "--json", check=0).out == ""


def test_without_a_verb_the_help_is_shown_and_2_returned(shell: Shell) -> None:
    result = shell(check=2)
    assert "Usage: perdure" in result.err
    assert result.out == ""


def test_an_error_for_a_person_says_what_where_and_what_to_do(shell: Shell) -> None:
    shell("run", "adding.toml", "--input", "x", "--run-id", "R", check=0)
    result = shell("show", "nobody", check=2)
    assert result.err == "error: run nobody: there is no such run\n  next: `perdure list` shows what there is\n"
    assert "No such command 'shwo'. Did you mean 'show'" in shell("shwo", check=2).err


NAMING_A_RUN = (
    ("show",),
    ("history",),
    ("resume",),
    ("verify",),
    ("cancel",),
    ("abandon",),
    ("answer", "1.0", "true"),
    ("resolve", "1.0", "--did-not-happen"),
    ("limit", "max_model_turns=9"),
)


def test_an_unknown_run_exits_2_naming_it(shell: Shell) -> None:
    shell("run", "adding.toml", "--input", "x", "--run-id", "R", check=0)
    for verb, *rest in NAMING_A_RUN:
        refused = shell(verb, "nobody", *rest, "--json", check=2)
        assert refused.error["code"] == "unknown", refused
        assert "nobody" in refused.error["where"]


def test_a_run_id_that_is_taken_exits_2_and_the_run_stays_as_it_was(shell: Shell) -> None:
    shell("run", "adding.toml", "--input", "x", "--run-id", "R", check=0)
    before, asked = shell.history("R"), shell.read("asked")
    assert shell("run", "adding.toml", "--input", "y", "--run-id", "R", "--json", check=2).error["code"] == "usage"
    assert (shell.history("R"), shell.read("asked")) == (before, asked)


OPENING = (RUN, ("list",), ("verify",), ("resume", "R"))


ON_A_STORE = (RUN, ("list",), ("recover",), ("doctor",), *((verb, "R", *rest) for verb, *rest in NAMING_A_RUN))


@pytest.mark.parametrize("url", ["sqlite:/", "sqlite:loop.db"])
def test_a_store_whose_path_names_no_file_is_one_error_and_2_for_every_verb(url: str, shell: Shell) -> None:
    """C16."""
    (shell.folder / "loop.db").symlink_to("loop.db")
    said = set()
    for argv in (*ON_A_STORE, ("verify",), ("watch", "R"), ("replay", "R"), ("crash-test", "R")):
        refused = shell(*argv, "--store", url, "--json", check=2)
        assert refused.out == ""
        said.add(tuple(refused.error.values()))
    (error,) = said
    assert all(error)
    assert error[0] == "configuration"


def test_a_file_of_another_program_is_refused_and_left_as_it_was(shell: Shell) -> None:
    path = shell.folder / "perdure.db"
    store = sqlite3.connect(path)
    store.execute("create table mine(x)")
    store.commit()
    store.close()
    before = path.read_bytes()
    for argv in OPENING:
        refused = shell(*argv, "--json", check=4)
        assert refused.error["code"] == "store_error"
        assert "perdure.db" in refused.error["where"]
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_refused_and_left_as_it_was(shell: Shell) -> None:
    path = shell.write("perdure.db", "no database at all, but long enough to look like one to whoever opens it\n" * 20)
    before = path.read_bytes()
    for argv in OPENING:
        assert shell(*argv, "--json", check=4).error["code"] == "store_error"
    assert path.read_bytes() == before


def test_a_store_of_a_later_release_is_refused(shell: Shell) -> None:
    shell("run", "adding.toml", "--input", "x", "--run-id", "R", check=0)
    store = sqlite3.connect(shell.folder / "perdure.db", isolation_level=None)
    store.execute("pragma user_version = 99")
    store.close()
    for argv in OPENING:
        refused = shell(*argv, check=4)
        assert "version 99" in refused.err
        assert refused.out == ""


def test_a_read_only_store_is_refused_for_writing_and_can_be_looked_at(shell: Shell) -> None:
    shell("run", "asking.toml", "--input", "x", "--run-id", "R", check=3)
    before, asked = shell.history("R"), shell.read("asked")
    (shell.folder / "perdure.db").chmod(0o400)
    for argv in (RUN, ("resume", "R"), ("answer", "R", "1.0", '{"yes": true}')):
        refused = shell(*argv, "--json", check=4, file_modes_hold=True)
        assert refused.error["code"] == "store_error"
        assert "read-only" in refused.error["found"]
    for argv in (("list",), ("show", "R"), ("history", "R"), ("verify",)):
        shell(*argv, check=0, file_modes_hold=True)
    (shell.folder / "perdure.db").chmod(0o600)
    assert (shell.history("R"), shell.read("asked")) == (before, asked)


def test_bytes_that_are_no_text_are_an_error_in_words(shell: Shell) -> None:
    result = shell("show", "R\udcff", "--json", check=2)
    assert result.error["code"] in {"usage", "unknown"}
    (shell.folder / "task.txt").write_bytes(b"ab\xff")
    refused = shell("run", "adding.toml", "--input", "@task.txt", "--json", check=2)
    assert "byte 2" in refused.error["found"]


@pytest.mark.parametrize("head", ["", "xyz", "0" * 63, "0" * 65, "g" * 64])
def test_a_head_that_is_no_digest_is_refused_as_usage(shell: Shell, head: str) -> None:
    shell("run", "adding.toml", "--input", "x", "--run-id", "R", check=0)
    assert "is no head" in shell("verify", "R", "--head", head, check=2).err


def test_an_unknown_limit_names_the_nearest_known_one(shell: Shell) -> None:
    shell("run", "asking.toml", "--input", "x", "--run-id", "R", check=3)
    assert "did you mean 'max_model_turns'?" in shell("limit", "R", "max_model_turn=3", check=2).err


def test_a_changed_definition_names_the_tools_that_differ(shell: Shell) -> None:
    """R-019: what was added, what is gone, and in what a tool differs."""
    shell("run", "asking.toml", "--input", "x", "--run-id", "R", check=3)
    agent = (shell.folder / "asking.toml").read_text()
    tools = (shell.folder / "my_tools.py").read_text()
    shell.write("asking.toml", agent.replace('["my_tools:ask"]', '["my_tools:add"]'))
    assert "differs in: tools; tools: add added; ask removed" in shell("resume", "R", check=4).err
    shell.write("asking.toml", agent)
    shell.write("my_tools.py", tools.replace('"""Asks a person."""', '"""Asks somebody else."""'))
    assert "tools: ask changed in description" in shell("resume", "R", check=4).err


def test_a_changed_definition_names_the_two_ways_out(shell: Shell) -> None:
    """R-019."""
    shell("run", "asking.toml", "--input", "x", "--run-id", "R", check=3)
    shell.write("asking.toml", 'instructions = "other"' + (shell.folder / "asking.toml").read_text())
    refused = shell("resume", "R", check=4).err
    assert "next: resume it with the agent as it was, or give it up with `perdure abandon R` and start a new" in refused


def test_every_verb_is_summed_up_on_one_whole_line_of_the_help(shell: Shell) -> None:
    """In a window of 80 columns, which is what a pipe gets too."""
    verbs = shell("--help", check=0).out.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert len(verbs) == 17
    assert [line for line in verbs if not line.endswith(".") or line.endswith("...") or not line[2].isalpha()] == []


def test_an_abandoned_run_lists_no_open_doubt(shell: Shell) -> None:
    shell.killed_in_a_booking("R")
    assert "in doubt:" in shell("show", "R", check=0).out
    shell("abandon", "R", check=0)
    shown = shell("show", "R", check=0).out
    assert "in doubt:" not in shown
    assert "Calls whose effect may have happened: 1.0" in shown
