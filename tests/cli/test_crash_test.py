"""`perdure crash-test`: a user's agent killed at every boundary, and what is said of each of its tools."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
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


@tool(effect="read")
def lingers() -> str:
    """Leaves a process behind, says which, and never returns."""
    left = subprocess.Popen(["sleep", "318"], start_new_session=True)
    with open(os.environ["LINGERS"] + ".new", "w") as file:
        file.write(str(left.pid))
    os.replace(os.environ["LINGERS"] + ".new", os.environ["LINGERS"])
    time.sleep(1000)
    return ""


@tool(effect="read")
def moves() -> str:
    """Goes into another folder."""
    os.makedirs("elsewhere", exist_ok=True)
    os.chdir("elsewhere")
    return "moved"


@tool(effect="read")
def razes() -> str:
    """Removes the folder it stands in."""
    os.rmdir(os.getcwd())
    return "razed"


@tool(effect="idempotent")
def odd() -> str:
    """Writes a file whose name is no UTF-8."""
    with open(b"odd-" + bytes([255]), "w") as file:
        file.write("odd")
    return "written"


BARE = ("save", "ask", "stuck", "forks", "leaves", "lingers", "moves", "razes", "odd")


def model(*names):
    given = {"look": {"at": "x"}} | dict.fromkeys(BARE, {})
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
lingering = model("lingers")
moving = model("moves", "honour")
razing = model("razes", "honour")
naming = model("odd")

'''
THREADED = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), name='pool', daemon=True).start()\n"
NAMES = ("look", "sneak", "honour", "forget", "write", "halve", "keep", "save", "ask", "stuck", "forks", "leaves")
NAMES = (*NAMES, "lingers", "moves", "razes", "odd")


FAILING = """

@tool(effect="write")
def find(line: str) -> str:
    \"\"\"Needs a file that is not there.\"\"\"
    return open("absent.txt").read()


@tool(effect="idempotent")
def outside(line: str) -> str:
    \"\"\"Changes something that is no file here.\"\"\"
    return "done"


finding = model("honour", "find")
misnaming = model("honour", "misnamed")
unseen = model("outside", "look")
looking = model("look")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(TOOLS, "utf-8")
    return tmp_path


def agent(folder: Path, model: str, *tools: str, more: str = "") -> str:
    """An agent file with that scripted model, these tools and these lines more."""
    names = ", ".join(f'"shop:{name}"' for name in tools or NAMES)
    lines = f'name = "shop"\nmodel = "shop:{model}"\ntools = [{names}]\n{more}\n'
    (folder / f"{model}.toml").write_text(lines, "utf-8")
    return f"{model}.toml"


PERDURE = (sys.executable, "-m", "perdure.cli")


def surroundings(folder: Path, environment: dict[str, str]) -> dict[str, str]:
    return os.environ | {"PERDURE_STORE": "", "TMPDIR": str(folder)} | environment


def perdure(folder: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*PERDURE, *arguments],
        cwd=folder,
        env=surroundings(folder, environment),
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


@pytest.mark.parametrize("on_exhausted", ["", 'on_exhausted = "finish"'])
def test_an_agent_that_exactly_meets_its_limits_is_safe_and_said_to_pass_them_when_killed(
    folder: Path, on_exhausted: str
) -> None:
    exact = f"{on_exhausted}\n[limits]\nmax_tool_calls = 3\nmax_model_turns = 4"
    code, report = crash_test(folder, agent(folder, "safe", more=exact), "--input", "go")
    assert (code, report["ok"], report["ended_otherwise"]) == (0, True, 0)
    assert report["past_limits"].keys() == {"max_tool_calls", "max_model_turns"}
    assert all(0 < cuts < report["cuts"] for cuts in report["past_limits"].values())
    said = perdure(folder, "crash-test", "safe.toml", "--input", "go").stdout
    assert re.search(r"at \d+ cuts? the run used more than max_tool_calls allows", said)
    _, roomy = crash_test(folder, agent(folder, "safe"), "--input", "go")
    assert roomy["past_limits"] == {}


def test_a_run_that_ends_at_a_limit_undisturbed_is_refused(folder: Path) -> None:
    """A repeat counts, so its killed runs would have to do less."""
    short = 'on_exhausted = "finish"\n[limits]\nmax_tool_calls = 2'
    done = perdure(folder, "crash-test", agent(folder, "safe", more=short), "--input", "go")
    assert done.returncode == 1
    assert "it ends at a limit (max_tool_calls)" in done.stderr


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


def eventually(met: Callable[[], bool]) -> bool:
    """Whether it is met within a minute."""
    deadline = time.monotonic() + 60
    while not met():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


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
        ("moving", (), "moves (call 1.0) ran, and the process no longer stands in its working directory"),
        ("razing", (), "razes (call 1.0) ran, and the process no longer stands in its working directory"),
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_crash_test_told_to_stop_leaves_no_folder_and_no_process(folder: Path, number: signal.Signals) -> None:
    """H27: a process in a session of its own included."""
    said = folder / "lingers"
    argv = [*PERDURE, "crash-test", agent(folder, "lingering"), "--input", "go"]
    environment = surroundings(folder, {"LINGERS": str(said)})

    # Under nohup the tests themselves ignore one of them, and what they start would, too.
    heeding = ["env", f"--default-signal={number.name.removeprefix('SIG')}", *argv]
    with subprocess.Popen(heeding, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as test:
        assert eventually(said.exists)
        test.send_signal(number)
        _, complaint = test.communicate(timeout=60)
    assert (test.returncode, complaint) == (128 + number, "")
    assert leftovers(folder) == []
    assert eventually(lambda: not Path(f"/proc/{said.read_text()}").exists())


def test_a_second_request_to_stop_does_not_cut_the_cleaning_up_short(folder: Path) -> None:
    said = folder / "lingers"
    argv = [*PERDURE, "crash-test", agent(folder, "lingering"), "--input", "go"]
    environment = surroundings(folder, {"LINGERS": str(said)})
    with subprocess.Popen(argv, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as test:
        assert eventually(said.exists)
        while test.poll() is None:
            test.send_signal(signal.SIGTERM)
            time.sleep(0.001)
        assert test.stderr is not None
        assert (test.returncode, test.stderr.read()) == (143, "")
    assert leftovers(folder) == []
    assert eventually(lambda: not Path(f"/proc/{said.read_text()}").exists())


FORKING = """
import os, signal, sys
from pathlib import Path
from perdure.cli.stopping import Interrupted, unwinding
from perdure.testing.killing.processes import fork


def told():
    os.kill(os.getpid(), signal.SIGTERM)
    sum(range(10))  # here Python would see it


os.register_at_fork(after_in_parent=told)
try:
    with unwinding():
        fork(lambda: 0, Path(sys.argv[1]))
except Interrupted as interrupted:
    sys.exit(interrupted.exit_code)
"""


def test_a_request_to_stop_while_a_process_is_forked_is_not_lost(tmp_path: Path) -> None:
    """Python swallows what is raised in what runs at a fork."""
    done = subprocess.run(
        [sys.executable, "-c", FORKING, str(tmp_path / "output")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (143, "")


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


def test_a_file_whose_name_is_no_utf8_is_an_effect_like_any_other(folder: Path) -> None:
    code, report = crash_test(folder, agent(folder, "naming"), "--input", "go")
    assert (code, report["ok"], report["effects"]) == (0, True, 1)


@pytest.mark.parametrize("room", ["16k", "128k", "512k", "1200k"])
def test_a_full_disk_is_named(folder: Path, room: str) -> None:
    """A real file system that small, in a mount namespace of its own."""
    own_mounts = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    small = folder / "small"
    small.mkdir()
    mounted = ["sh", "-c", 'mount -t tmpfs -o size="$1" tmpfs "$2" && shift 2 && exec "$@"', "sh", room, str(small)]
    done = subprocess.run(
        [*own_mounts, *mounted, *PERDURE, "crash-test", agent(folder, "safe"), "--input", "go"],
        cwd=folder,
        env=surroundings(folder, {"TMPDIR": str(small)}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    found = r"(\d+ cuts, [^\n]*\n)?error: \S+: the disk is full\n  next: make room there, or [^\n]*\n"
    assert re.fullmatch(found, done.stderr)


WORLDS = """
import os


class World:
    def reset(self):
        pass

    def effects(self):
        return []


class Sleeping(World):
    async def reset(self):
        raise AssertionError


class Lazy(World):
    def reset(self):
        yield


class Asking(World):
    async def effects(self):
        return []


class Worded(World):
    def effects(self):
        return "words"


class Mapped(World):
    def effects(self):
        return {"a": 1}


class Odd(World):
    def effects(self):
        return [object()]


class Leaving(World):
    def reset(self):
        os._exit(0)


class Exiting(World):
    def effects(self):
        os._exit(0)


class Raising(World):
    def effects(self):
        raise KeyError("gone")


class Stubborn(World):
    def reset(self):
        raise SystemExit(0)


class Needy(World):
    def __init__(self, address):
        pass


class Touchy(World):
    @property
    def reset(self):
        raise ValueError("not now")
"""


@pytest.mark.parametrize(
    ("world", "says"),
    [
        ("Sleeping", "reset() is asynchronous or a generator"),
        ("Lazy", "reset() is asynchronous or a generator"),
        ("Asking", "effects() is asynchronous or a generator"),
        ("Worded", "effects() gave str, and not a list of effects"),
        ("Mapped", "effects() gave dict, and not a list of effects"),
        ("Odd", "effects() failed: ValueFormError"),
        ("Leaving", "reset() ended its process (exit code 0)"),
        ("Exiting", "effects() ended its process (exit code 0)"),
        ("Raising", "effects() failed: KeyError: 'gone'"),
        ("Stubborn", "reset() failed: SystemExit: 0"),
        ("Needy", "it cannot be made: TypeError"),
        ("Touchy", "it cannot be made: ValueError: not now"),
    ],
)
def test_a_world_that_cannot_be_used_is_refused_in_words(folder: Path, world: str, says: str) -> None:
    (folder / "worlds.py").write_text(WORLDS, "utf-8")
    done = perdure(folder, "crash-test", agent(folder, "safe"), "--input", "go", "--world", f"worlds:{world}")
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert_only_words(done)
    assert leftovers(folder) == []


def assert_only_words(done: "subprocess.CompletedProcess[str]") -> None:
    """What was found and where on one line, what to do on another, and nothing else."""
    assert done.stdout == ""
    assert re.fullmatch(r"error: [^\n]+: [^\n]+\n  next: [^\n]+\n", done.stderr), done.stderr


LONG = 300 * "x"


@pytest.mark.parametrize(
    ("option", "place", "says"),
    [
        ("--keep", "/proc/perdure", "it cannot be used: No such file or directory"),
        ("--keep", "loop", "it cannot be used: Too many levels of symbolic links"),
        ("--keep", LONG, "it cannot be used: File name too long"),
        ("--keep", "shop.py", "it is no folder"),
        ("--files", "loop", "it is no directory"),
        ("--files", LONG, "it cannot be used: File name too long"),
        ("--timeout", "1e-9", "the time limit is 1e-09 s"),
    ],
)
def test_a_place_or_a_time_that_cannot_be_used_is_refused_in_words(
    folder: Path, option: str, place: str, says: str
) -> None:
    (folder / "loop").symlink_to("loop")
    done = perdure(folder, "crash-test", agent(folder, "safe"), "--input", "go", option, place)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert_only_words(done)


@pytest.mark.parametrize(
    ("subject", "says"),
    [
        ("loop.toml", "it cannot be found: Symlink loop"),
        (f"{LONG}.toml", "cannot be read (File name too long)"),
        (f"{LONG}:agent", "No module named"),
    ],
)
def test_an_agent_whose_name_leads_nowhere_is_refused_in_words(folder: Path, subject: str, says: str) -> None:
    (folder / "loop.toml").symlink_to("loop.toml")
    done = perdure(folder, "crash-test", subject, "--input", "go")
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert_only_words(done)


def test_a_pipe_among_the_files_to_begin_with_is_named(folder: Path) -> None:
    (folder / "given").mkdir()
    os.mkfifo(folder / "given" / "pipe")
    done = perdure(folder, "crash-test", agent(folder, "safe"), "--input", "go", "--files", "given", "--timeout", "20")
    assert done.returncode == 2, done.stderr
    assert "given/pipe is a device, a pipe or a socket" in done.stderr
    assert_only_words(done)


def test_a_folder_that_is_not_empty_is_not_used(folder: Path) -> None:
    done = perdure(folder, "crash-test", agent(folder, "safe"), "--input", "go", "--keep", str(folder))
    assert done.returncode == 2
    assert "it is not empty" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("safe.toml",), "perdure crash-test: no input is given"),
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


def failing(folder: Path) -> None:
    tools = folder / "shop.py"
    tools.write_text(tools.read_text("utf-8") + FAILING, "utf-8")


@pytest.mark.parametrize(
    ("model", "tools", "seen", "verdict"),
    [
        ("unseen", ("outside", "look"), False, "clean as far as could be seen"),
        ("looking", ("look",), True, "clean"),
        ("safe", ("look", "honour"), True, "clean"),
    ],
)
def test_an_agent_that_acts_and_changes_nothing_that_is_seen_is_not_called_clean(
    folder: Path, model: str, tools: tuple[str, ...], seen: bool, verdict: str
) -> None:
    failing(folder)
    code, report = crash_test(folder, agent(folder, model, *tools), "--input", "go")
    assert (code, report["ok"], report["seen"], report["failed"]) == (0, True, seen, {})
    said = perdure(folder, "crash-test", f"{model}.toml", "--input", "go").stdout
    assert re.search(rf" s: {verdict}$", said, re.MULTILINE), said
    if not seen:
        assert re.search(r"no effect was seen: .* --world.* --files", said)


@pytest.mark.parametrize(
    ("model", "name", "why"),
    [("finding", "find", "No such file or directory: 'absent.txt'"), ("misnaming", "misnamed", "misnamed")],
)
def test_a_tool_of_which_no_call_succeeds_undisturbed_is_named(folder: Path, model: str, name: str, why: str) -> None:
    failing(folder)
    code, report = crash_test(folder, agent(folder, model, "honour", "find"), "--input", "go")
    assert (code, report["seen"]) == (0, False)
    assert report["failed"].keys() == {name}
    assert why in report["failed"][name]
    said = perdure(folder, "crash-test", f"{model}.toml", "--input", "go").stdout
    assert f"{name}: no call of it succeeded undisturbed: " in said
    assert said.splitlines()[-1].endswith("clean as far as could be seen")


def test_before_the_first_cut_it_is_said_how_many_there_are_and_how_long_that_takes(folder: Path) -> None:
    done = perdure(folder, "crash-test", agent(folder, "halving"), "--input", "go")
    told = re.match(r"(\d+) cuts, after a run of (\d+\.\d) s: this takes about (\d+) s or more\n", done.stderr)
    assert told, done.stderr
    cuts, run, whole = int(told[1]), float(told[2]), int(told[3])
    assert done.stdout.splitlines()[-1].startswith(f"{cuts} cuts of a run")
    assert run >= 0.3
    assert whole == pytest.approx(cuts * run, abs=cuts * 0.1 + 1)
    assert perdure(folder, "crash-test", "halving.toml", "--input", "go", "--json").stderr == ""


def test_the_table_says_what_to_do(folder: Path) -> None:
    done = perdure(folder, "crash-test", agent(folder, "unsafe"), "--input", "go")
    assert done.returncode == 1
    assert "NOT SAFE" in done.stdout
    assert "next: the key is not honoured: hand call.idempotency_key to what it calls" in done.stdout
