"""`perdure crash-test`: a user's agent killed at every boundary, and what is said of each of its tools."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.demo.test_serving import eval_serve

TOOLS = '''
import os
import subprocess
import threading
import time

from perdure import CallContext, Suspend, tool
from perdure.testing import ScriptedModel, calls, text


def add(name, line):
    with open(name, "a") as file:
        file.write(line + "\\n")


@tool(effect="read")
def look(at: str) -> str:
    """Looks."""
    return at


@tool(effect="read")
def sneak(line: str) -> str:
    """Says it reads, and writes."""
    add("sneaked.txt", line)
    return "seen"


@tool(effect="idempotent")
def honour(line: str, call: CallContext) -> str:
    """Does it once per key."""
    if not os.path.exists(call.idempotency_key):
        with open("new", "w") as file:
            file.write(line + "\\n")
        os.replace("new", call.idempotency_key)  # whole or not at all: it may be killed anywhere
    return "done"


@tool(effect="idempotent")
def forget(line: str) -> str:
    """Takes no notice of the key."""
    add("forgot.txt", line)
    return "done"


@tool(effect="write")
def write(line: str) -> str:
    """Writes, and takes its time."""
    time.sleep(0.01)
    add("written.txt", line)
    time.sleep(0.01)
    return "written"


@tool(effect="write")
def halve(line: str) -> str:
    """Writes, and is half done for most of the time it takes."""
    with open("halved.txt", "w") as file:
        file.write("half a ")
        file.flush()
        time.sleep(0.3)
        file.write(line + "\\n")
    return "written"


kept = []


@tool(effect="idempotent")
def keep(line: str) -> str:
    """Keeps a line in memory."""
    kept.append(line)
    return "kept"


@tool(effect="write")
def save() -> str:
    """Saves what was kept."""
    for line in kept:
        add("saved.txt", line)
    return "saved"


@tool(effect="read")
async def ask() -> Suspend:
    """Asks."""
    return Suspend("go on?", {"type": "boolean"})


@tool(effect="read")
def stuck() -> str:
    """Never returns."""
    time.sleep(1000)
    return ""


@tool(effect="read")
async def forks() -> str:
    """Forks, and both return."""
    os.fork()
    return "forked"


@tool(effect="read")
def leaves() -> str:
    """Leaves a process behind."""
    subprocess.Popen(["sleep", "317"], start_new_session=True)
    return "left"


def model(*names):
    given = {"look": {"at": "x"}, "save": {}, "ask": {}, "stuck": {}, "forks": {}, "leaves": {}}
    return ScriptedModel([calls((name, given.get(name, {"line": name}))) for name in names] + [text("Done.")])


safe = model("look", "honour", "look")
unsafe = model("look", "forget", "sneak")
writing = model("write")
halving = model("halve")
losing = model("keep", "look", "save")
asking = model("ask", "honour")
sticking = model("stuck")
forking = model("forks")
leaving = model("look", "leaves", "look")

'''
THREADED = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), name='pool', daemon=True).start()\n"
NAMES = ("look", "sneak", "honour", "forget", "write", "halve", "keep", "save", "ask", "stuck", "forks", "leaves")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(TOOLS, "utf-8")
    return tmp_path


def agent(folder: Path, model: str, *tools: str) -> str:
    """An agent file with that scripted model and these tools."""
    names = ", ".join(f'"shop:{name}"' for name in tools or NAMES)
    (folder / f"{model}.toml").write_text(f'name = "shop"\nmodel = "shop:{model}"\ntools = [{names}]\n', "utf-8")
    return f"{model}.toml"


def perdure(folder: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-m", "perdure.cli", *arguments]
    places = {"PERDURE_STORE": "", "TMPDIR": str(folder)}
    return subprocess.run(
        argv,
        cwd=folder,
        env=os.environ | places | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def crash_test(folder: Path, *arguments: str, **environment: str) -> tuple[int, dict[str, Any]]:
    done = perdure(folder, "crash-test", *arguments, "--json", **environment)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    report["by_tool"] = {tool["tool"]: tool for tool in report["tools"]}
    return done.returncode, report


def test_a_safe_agent_is_clean_at_every_boundary(folder: Path) -> None:
    """O17: every event, and the end of every function."""
    code, report = crash_test(folder, agent(folder, "safe"), "--input", "go")
    assert (code, report["ok"]) == (0, True)
    assert report["effects"] == 1
    # A cut behind each event but the last, and one more at the end of each of the three functions.
    assert report["cuts"] >= report["events"] - 1 + 3
    assert all(tool["doubled"] == tool["lost"] == tool["blocked"] == 0 for tool in report["tools"])


def test_tools_that_are_not_what_they_say_are_named_with_the_smallest_cut(folder: Path) -> None:
    code, report = crash_test(folder, agent(folder, "unsafe"), "--input", "go")
    assert (code, report["ok"]) == (1, False)
    forget, sneak = report["by_tool"]["forget"], report["by_tool"]["sneak"]
    assert min(forget["doubled"], sneak["doubled"]) >= 1
    # On a loaded machine a function may take so long that it is killed inside as well, which comes first.
    assert re.match(r"killed (inside forget|when forget) \(call 2\.0\)", forget["smallest"])
    assert "forgot.txt: forget" in forget["detail"]
    assert "key is not honoured" in forget["next"]
    assert "is no read" in sneak["next"]
    assert report["by_tool"]["look"]["smallest"] is None


def test_a_plain_write_is_never_doubled_and_is_said_to_wait_for_a_person(folder: Path) -> None:
    """O10: killed before it began, inside it, and when it had returned."""
    code, report = crash_test(folder, agent(folder, "writing"), "--input", "go")
    assert (code, report["ok"]) == (0, True)
    write = report["by_tool"]["write"]
    assert (write["doubled"], write["lost"]) == (0, 0)
    assert write["blocked"] >= 2
    assert write["unclear"] <= 1


def test_the_half_done_work_of_a_killed_write_is_unclear_and_no_repeat(folder: Path) -> None:
    code, report = crash_test(folder, agent(folder, "halving"), "--input", "go")
    assert (code, report["ok"]) == (0, True)
    halve = report["by_tool"]["halve"]
    assert (halve["doubled"], halve["lost"], halve["unclear"]) == (0, 0, 1)


def test_an_effect_that_lives_in_memory_is_found_lost(folder: Path) -> None:
    code, report = crash_test(folder, agent(folder, "losing"), "--input", "go")
    assert (code, report["ok"]) == (1, False)
    assert report["by_tool"]["keep"]["lost"] > 0
    assert report["by_tool"]["save"]["lost"] == report["by_tool"]["look"]["lost"] == 0
    assert "saved.txt: keep" in report["by_tool"]["keep"]["detail"]


def test_a_recorded_run_is_tested_with_its_turns_and_its_answers(folder: Path) -> None:
    agent(folder, "asking")
    store = f"sqlite:{folder / 'runs.db'}"
    started = perdure(folder, "run", "asking.toml", "--input", "go", "--run-id", "r1", PERDURE_STORE=store)
    assert started.returncode == 3, started.stderr
    answered = perdure(folder, "answer", "r1", "1.0", "true", "--resume", PERDURE_STORE=store)
    assert answered.returncode == 0, answered.stderr
    before = perdure(folder, "history", "r1", "--json", PERDURE_STORE=store).stdout
    for file in list(folder.glob("????????*")):
        if file.is_file() and file.name not in {"shop.py", "asking.toml"} and not file.name.startswith("runs.db"):
            file.unlink()
    code, report = crash_test(folder, "r1", PERDURE_STORE=store)
    assert (code, report["ok"], report["effects"]) == (0, True, 1)
    assert perdure(folder, "history", "r1", "--json", PERDURE_STORE=store).stdout == before


def test_a_world_of_the_users_own_is_what_counts(folder: Path) -> None:
    (folder / "ground.py").write_text(
        """
import os
from pathlib import Path

FILE = Path(__file__).with_name("forgot.txt")


class Ground:
    def reset(self):
        FILE.unlink(missing_ok=True)

    def effects(self):
        return FILE.read_text().splitlines() if FILE.exists() else []
""",
        "utf-8",
    )
    code, report = crash_test(folder, agent(folder, "unsafe"), "--input", "go", "--world", "ground:Ground")
    assert code == 1
    assert report["by_tool"]["forget"]["detail"].endswith('"forget"')
    assert report["by_tool"]["sneak"]["doubled"] == 0
    refused = perdure(folder, "crash-test", "unsafe.toml", "--input", "go", "--world", "ground:FILE")
    assert refused.returncode == 2
    assert "reset() and effects()" in refused.stderr


def test_a_line_that_is_not_taken_away_after_a_kill_is_missed(folder: Path) -> None:
    """Effects are signed: what a tool removes counts as what it adds."""
    (folder / "given").mkdir()
    (folder / "given" / "list.txt").write_text("eggs\nmilk\n", "utf-8")
    tools = (folder / "shop.py").read_text("utf-8")
    (folder / "shop.py").write_text(
        tools
        + """

taken = []


@tool(effect="idempotent")
def take(line: str) -> str:
    \"\"\"Takes a line off, in memory.\"\"\"
    taken.append("eggs")
    return "taken"


@tool(effect="write")
def tidy(line: str) -> str:
    \"\"\"Writes the list anew.\"\"\"
    lines = [one for one in open("list.txt").read().splitlines() if one not in taken]
    open("list.txt", "w").write("\\n".join(lines) + "\\n")
    return "tidied"


tidying = model("take", "tidy")
""",
        "utf-8",
    )
    code, report = crash_test(folder, agent(folder, "tidying", "take", "tidy"), "--input", "go", "--files", "given")
    assert (code, report["effects"]) == (1, 1)
    assert "list.txt: eggs" in json.dumps(report)


def test_what_drives_begin_with_is_copied_for_each(folder: Path) -> None:
    (folder / "given").mkdir()
    (folder / "given" / "written.txt").write_text("there before\n", "utf-8")
    code, report = crash_test(folder, agent(folder, "writing"), "--input", "go", "--files", "given")
    assert (code, report["effects"]) == (0, 1)
    assert (folder / "given" / "written.txt").read_text("utf-8") == "there before\n"


def test_the_demos_agent_is_clean_and_without_its_key_it_is_not(tmp_path: Path) -> None:
    """O17: the issue's own words for this command, against the real job service."""
    names = eval_serve(tmp_path)
    environment = {**names, "PERDURE_STORE": "", "TMPDIR": str(tmp_path)}
    here = Path(__file__).parents[2] / "examples" / "job_recovery"
    task = ("--input", f"Recover job {names['PERDURE_DEMO_JOB']}")
    world = ("--world", "perdure.examples.job_recovery.crash_world:JobService")
    try:
        code, report = crash_test(tmp_path, str(here / "agent.toml"), *task, *world, **environment)
        assert (code, report["ok"], report["effects"]) == (0, True, 1)
        code, report = crash_test(
            tmp_path, str(here / "agent.toml"), *task, *world, **environment, PERDURE_DEMO_NO_KEY="1"
        )
        assert code == 1
        assert report["by_tool"]["job_retry"]["doubled"] >= 1
    finally:
        os.kill(int(names["PERDURE_DEMO_PID"]), 15)


def test_without_its_stage_the_demos_world_names_the_command_that_sets_it(folder: Path) -> None:
    world = ("--world", "perdure.examples.job_recovery.crash_world:JobService")
    done = perdure(folder, "crash-test", agent(folder, "writing"), "--input", "go", *world)
    assert done.returncode == 2
    assert "PERDURE_DEMO_FOLDER is not set" in done.stderr
    assert 'next: run: eval "$(perdure demo --serve)"' in done.stderr
    assert leftovers(folder) == []


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("perdure-crash-test-*")]


@pytest.mark.parametrize(
    ("model", "arguments", "says"),
    [
        ("sticking", ("--timeout", "2"), "stuck (call 1.0) did not return within 2 s"),
        ("forking", (), "forks (call 1.0) forks, and the copy returns"),
        ("asking", (), "it waits: suspended at call 1.0"),
    ],
)
def test_a_run_that_cannot_be_tested_is_refused_by_name_and_leaves_nothing(
    folder: Path, model: str, arguments: tuple[str, ...], says: str
) -> None:
    done = perdure(folder, "crash-test", agent(folder, model), "--input", "go", *arguments)
    assert done.returncode == 1, done.stdout
    assert says in done.stderr
    assert leftovers(folder) == []


def test_a_tool_that_leaves_processes_behind_is_named_and_they_are_ended(folder: Path) -> None:
    """H27."""
    code, report = crash_test(folder, agent(folder, "leaving"), "--input", "go")
    assert code == 0
    assert report["left_behind"] > 0
    assert "leaves" in report["left_by"]
    assert subprocess.run(["pgrep", "-f", "^sleep 317$"], capture_output=True, check=False).stdout == b""


def test_an_agent_that_cannot_be_imported_is_named_and_nothing_is_left(folder: Path) -> None:
    (folder / "gone.toml").write_text('name = "gone"\nmodel = "nowhere:model"\ntools = ["nowhere:tool"]\n', "utf-8")
    done = perdure(folder, "crash-test", "gone.toml", "--input", "go")
    assert done.returncode == 2
    assert "importing nowhere failed" in done.stderr
    (folder / "threaded.py").write_text(THREADED + (folder / "shop.py").read_text("utf-8"), "utf-8")
    (folder / "threaded.toml").write_text('name = "t"\nmodel = "threaded:safe"\ntools = ["threaded:look"]\n', "utf-8")
    done = perdure(folder, "crash-test", "threaded.toml", "--input", "go")
    assert done.returncode == 2
    assert "has threads (pool)" in done.stderr
    assert leftovers(folder) == []


def test_a_folder_that_is_not_empty_is_not_used(folder: Path) -> None:
    done = perdure(folder, "crash-test", agent(folder, "safe"), "--input", "go", "--keep", str(folder))
    assert done.returncode == 2
    assert "it is not empty" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("safe.toml",), "no input is given"),
        (("r1", "--input", "go"), "a task is given for a recorded run"),
        (("safe.toml", "--input", "go", "--timeout", "0"), "the time limit is 0 s"),
        (("safe.toml", "--input", "go", "--files", "nowhere"), "it is no directory"),
        (("safe.toml", "--input", "go", "--files", ".", "--world", "a:b"), "both given"),
    ],
)
def test_bad_options_of_a_crash_test_are_refused_in_words(folder: Path, arguments: tuple[str, ...], says: str) -> None:
    agent(folder, "safe")
    done = perdure(folder, "crash-test", *arguments)
    assert done.returncode == 2, done.stdout
    assert says in done.stderr


def test_the_table_says_what_to_do(folder: Path) -> None:
    done = perdure(folder, "crash-test", agent(folder, "unsafe"), "--input", "go")
    assert done.returncode == 1
    assert "NOT SAFE" in done.stdout
    assert "next: the key is not honoured: hand call.idempotency_key to what it calls" in done.stdout
