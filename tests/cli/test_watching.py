"""watch, replay, doctor and completion, as processes."""

import json
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.cli.shell import Result, Shell, ended, wait_until


def started(shell: Shell, *argv: str) -> "subprocess.Popen[str]":
    """A command that is killed after two minutes: a test that reads from it must not wait for ever."""
    process = shell.start(*argv)
    timer = threading.Timer(120, process.kill)
    timer.daemon = True
    timer.start()
    return process


def rest(process: "subprocess.Popen[str]") -> Result:
    """What a command said after what was read of it already, and how it ended."""
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        out, err = process.stdout.read(), process.stderr.read()
        return Result(tuple(process.args), process.wait(60), out, err)


def rows(text: str) -> list[int]:
    """The seqs of lines as `watch --json` and `history --json` print them."""
    return [json.loads(line)["seq"] for line in text.splitlines()]


def test_watch_shows_a_run_that_another_process_drives_to_its_end(shell: Shell) -> None:
    shell.hold()
    driver = shell.start("run", "booking.toml", "--input", "go", "--run-id", "R")
    wait_until(lambda: shell.read("effects") == ["one"])
    watcher = started(shell, "watch", "R", "--json")
    assert watcher.stdout is not None
    assert json.loads(watcher.stdout.readline())["kind"] == "run_started"
    shell.let_go()
    watched = rest(watcher)
    assert ended(driver).code == 0
    assert watched.code == 0
    assert [0, *rows(watched.out)] == rows(shell.history("R"))


def test_a_watcher_that_left_rejoins_where_it_left_and_sees_each_event_once(shell: Shell) -> None:
    shell.killed_in_a_booking("R")
    events = len(shell.history("R").splitlines())
    watcher = started(shell, "watch", "R", "--json")
    assert watcher.stdout is not None
    first = "".join(watcher.stdout.readline() for _ in range(events))
    watcher.send_signal(signal.SIGINT)
    left = rest(watcher)
    assert left.code == 130
    assert f"perdure watch R --from {events}" in left.err
    again = started(shell, "watch", "R", "--from", str(events), "--json")
    shell("resolve", "R", "1.0", "--happened", '"booked one"', "--resume", check=0)
    rejoined = ended(again)
    assert rejoined.code == 0
    assert rows(first + left.out + rejoined.out) == rows(shell.history("R"))


def test_a_watcher_outlasts_the_death_of_the_driver(shell: Shell) -> None:
    """O17: it sees the resumed drive, and what the run waited for in between."""
    shell.hold()
    driver = shell.start("run", "booking.toml", "--input", "go", "--run-id", "R")
    wait_until(lambda: shell.read("effects") == ["one"])
    watcher = started(shell, "watch", "R", "--json")
    assert watcher.stderr is not None
    driver.kill()
    ended(driver)
    assert "parked: needs_reconciliation" in watcher.stderr.readline()
    shell.let_go()
    shell("resolve", "R", "1.0", "--happened", '"booked one"', "--resume", check=0)
    watched = rest(watcher)
    assert watched.code == 0
    assert rows(watched.out) == rows(shell.history("R"))


def test_watching_takes_no_lease_and_ends_as_the_run_did(shell: Shell) -> None:
    shell("run", "empty.toml", "--input", "x", "--run-id", "R")
    shell("abandon", "R")
    before = shell.history("R")
    assert shell("watch", "R").code == 1
    assert shell.history("R") == before
    assert shell("watch", "none", check=2).err.startswith("error: run none: there is no such run")
    assert "give 0 or more" in shell("watch", "R", "--from", "-1", check=2).err


def test_a_watcher_whose_reader_leaves_leaves_too(shell: Shell) -> None:
    """Also while no event comes: nobody drives the run, which is said."""
    shell.killed_in_a_booking("R")
    shell("resolve", "R", "1.0", "--happened", '"booked one"', check=0)
    watcher = started(shell, "watch", "R")
    assert watcher.stderr is not None
    assert watcher.stdout is not None
    said = watcher.stderr.readline() + watcher.stderr.readline()
    assert "nobody drives it" in said
    assert "perdure resume R" in said
    watcher.stdout.close()
    with watcher:
        assert watcher.wait(30) == 130


def test_watching_from_behind_the_end_of_an_ended_run_is_refused(shell: Shell) -> None:
    shell("run", "adding.toml", "--input", "x", "--run-id", "R", check=0)
    assert "the run has ended and has 10 events" in shell("watch", "R", "--from", "99", check=2).err


def test_watch_refuses_a_broken_chain(shell: Shell) -> None:
    shell("run", "adding.toml", "--input", "x", "--run-id", "R", check=0)
    store = sqlite3.connect(shell.folder / "perdure.db")
    changed = "cast(replace(cast(payload as text), 'three', 'seven') as blob)"
    store.execute(f"update event set payload = {changed} where kind = 'model_call_completed'")
    store.commit()
    store.close()
    assert "commitment" in shell("watch", "R", check=4).err


def test_replay_shows_a_run_as_it_was_at_an_event_without_calling_anything(shell: Shell) -> None:
    """R-116: folded from the record alone."""
    shell("run", "booking.toml", "--input", "go", "--run-id", "R", check=0)
    asked, effects, before = shell.read("asked"), shell.read("effects"), shell.history("R")
    for name in ("my_models.py", "my_tools.py", "booking.toml"):
        (shell.folder / name).unlink()
    last = shell("replay", "R", "--json", check=0).record
    shown = shell("show", "R", "--json", check=0).record
    at = last.pop("at")
    assert at["seq"] == shown["events"] - 1
    assert last.pop("lease") == {"held": False, "epoch": 1}
    shown.pop("lease")
    assert last == shown
    intent = next(json.loads(line)["seq"] for line in before.splitlines() if "tool_call_requested" in line)
    then = shell("replay", "R", "--to", str(intent), "--json", check=0).record
    assert (then["status"], then["events"], then["usage"]["tool_calls"]) == ("running", intent + 1, 1)
    assert [call["tool"] for call in then["open_calls"]] == ["book"]
    last = shown["events"] - 1
    assert f"as of event {intent}, of events 0 to {last}:" in shell("replay", "R", "--to", str(intent), check=0).out
    assert f"as of event {last}, the last of {last + 1}:" in shell("replay", "R", check=0).out
    assert (shell.read("asked"), shell.read("effects"), shell.history("R")) == (asked, effects, before)


@pytest.mark.parametrize("seq", ["-1", "99"])
def test_replay_to_an_event_that_is_not_there_is_refused(shell: Shell, seq: str) -> None:
    shell("run", "adding.toml", "--input", "x", "--run-id", "R", check=0)
    assert f"has no event {seq}" in shell("replay", "R", "--to", seq, check=2).err


def findings(shell: Shell, *arguments: str, check: int = 0) -> dict[str, dict[str, str]]:
    return {one["name"]: one for one in shell("doctor", *arguments, "--json", check=check).lines}


def test_doctor_finds_a_sound_machine_and_makes_no_file(shell: Shell) -> None:
    before = sorted(path.name for path in shell.folder.iterdir())
    found = findings(shell)
    assert {one["verdict"] for one in found.values()} <= {"ok", "warn"}
    assert {"python", "sqlite", "file system", "free space", "locks", "log", "store", "sandbox", "key"} <= set(found)
    assert "not there yet" in found["store"]["found"]
    assert sorted(path.name for path in shell.folder.iterdir() if path.name != "__pycache__") == before


def test_doctor_tells_keys_by_name_only(shell: Shell) -> None:
    shell.environment["OPENAI_API_KEY"] = "sk-very-secret-1234"
    said = shell("doctor", check=0).out + shell("doctor", "--json", check=0).out
    assert "OPENAI_API_KEY is set" in said
    assert "secret" not in said
    assert "19" not in said.partition("OPENAI_API_KEY")[2].splitlines()[0]


def test_doctor_counts_runs_and_drivers_and_says_who_may_read_the_store(shell: Shell) -> None:
    shell.hold()
    driver = shell.start("run", "booking.toml", "--input", "go", "--run-id", "R")
    wait_until(lambda: shell.read("effects") == ["one"])
    (shell.folder / "perdure.db").chmod(0o644)
    found = findings(shell)
    assert found["store"]["found"].endswith("1 run, 1 driven now, 1 driver alive")
    assert (found["permissions"]["verdict"], found["permissions"]["next"][:5]) == ("warn", "chmod")
    driver.kill()
    ended(driver)
    assert findings(shell)["store"]["found"].endswith("1 run, 0 driven now, 0 drivers alive")


def test_doctor_calls_a_foreign_file_or_a_folder_that_cannot_be_written_bad(shell: Shell) -> None:
    shell.write("perdure.db", "no store of ours, but a file of somebody's, long enough to be looked at" * 20)
    assert findings(shell, check=4)["store"]["verdict"] == "bad"
    locked = shell.folder / "locked"
    locked.mkdir(mode=0o555)
    done = shell("doctor", "--store", f"sqlite:{locked}/runs.db", "--json", check=4, file_modes_hold=True)
    found = {one["name"]: one for one in done.lines}
    assert found["directory"]["verdict"] == "bad"
    missing = findings(shell, "--store", f"sqlite:{shell.folder}/nowhere/runs.db", check=4)
    assert missing["directory"]["verdict"] == "bad"
    assert not (shell.folder / "nowhere").exists()


@pytest.mark.slow
def test_doctor_counts_one_damaged_run_as_one_and_two_as_two_and_names_the_stores_version(shell: Shell) -> None:
    for run_id in ("one", "two"):
        shell("run", "adding.toml", "--input", "x", "--run-id", run_id, check=0)
    path = shell.folder / "perdure.db"
    assert findings(shell)["store"]["found"] == f"{path}: version 1, 2 runs, 0 driven now, 0 drivers alive"
    for where, said in (("run_id = 'one'", "1 damaged run"), ("true", "2 damaged runs")):
        store = sqlite3.connect(path, isolation_level=None)
        store.execute(f"update run set phase = x'00' where {where}")
        store.close()
        assert findings(shell, check=4)["store"]["found"] == f"{path}: version 1, {said}"


def test_doctor_looks_beside_the_file_a_link_leads_to(shell: Shell) -> None:
    (shell.folder / "link.db").symlink_to("perdure.db")
    shell.hold()
    driver = shell.start("run", "booking.toml", "--input", "go", "--run-id", "R")
    wait_until(lambda: shell.read("effects") == ["one"])
    assert findings(shell, "--store", "sqlite:link.db")["store"]["found"].endswith("1 driver alive")
    driver.kill()
    ended(driver)


def test_doctor_calls_a_file_in_the_place_of_the_lock_files_bad(shell: Shell) -> None:
    locks = shell.write("perdure.db.drivers", "in the way")
    found = findings(shell, check=4)["lock files"]
    assert (found["verdict"], found["found"]) == (
        "bad",
        f"{locks}: it is no directory, and drivers keep their lock files there",
    )
    assert found["next"]
    locks.unlink()
    locks.symlink_to("perdure.db.drivers")
    assert findings(shell, check=4)["lock files"]["verdict"] == "bad"


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", ".drivers"])
def test_doctor_calls_a_file_of_the_store_bad_that_we_cannot_write(suffix: str, shell: Shell) -> None:
    """As one that another user's process left there."""
    shell.killed_in_a_booking("R")
    file = shell.folder / f"perdure.db{suffix}"
    assert file.exists()
    file.chmod(0o500 if file.is_dir() else 0o400)
    done = shell("doctor", "--json", check=4, file_modes_hold=True)
    (bad,) = (one for one in done.lines if one["name"] == "permissions")
    assert bad["verdict"] == "bad"
    assert bad["found"].startswith(
        f"{file.name} cannot be written by this user (mode {'5' if file.is_dir() else '4'}00"
    )
    assert bad["next"]


def test_doctor_advises_no_change_to_a_folder_that_is_no_store(shell: Shell) -> None:
    (shell.folder / "mine").mkdir(mode=0o755)
    done = shell("doctor", "--store", "sqlite:mine", "--json", check=4)
    advice = {one["name"]: one["next"] for one in done.lines if one["verdict"] == "bad" or one["name"] == "permissions"}
    assert advice == {"store": "name a file"}


def test_doctor_says_who_may_read_the_shared_memory(shell: Shell) -> None:
    shell.killed_in_a_booking("R")
    (shell.folder / "perdure.db-shm").chmod(0o644)
    found = findings(shell)["permissions"]
    assert (found["verdict"], found["found"]) == ("warn", "perdure.db-shm is open to others (mode 644)")


def test_doctor_takes_an_empty_file_for_no_store(shell: Shell) -> None:
    shell.write("perdure.db", "").chmod(0o600)
    assert "not there yet" in findings(shell)["store"]["found"]


UNREACHABLE = {"directory": "closed/in/x.db", "permissions": "n" * 300, "store": "file/x.db"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "path"), UNREACHABLE.items(), ids=UNREACHABLE)
def test_doctor_tells_what_it_cannot_look_at(name: str, path: str, shell: Shell) -> None:
    """C16: and goes on to the end."""
    shell.write("file", "")
    (shell.folder / "closed" / "in").mkdir(parents=True)
    (shell.folder / "closed").chmod(0)
    done = shell("doctor", "--store", f"sqlite:{path}", "--json", check=4, file_modes_hold=True)
    (shell.folder / "closed").chmod(0o700)
    assert "bad" in {one["verdict"] for one in done.lines if one["name"] == name}
    assert all(one["next"] for one in done.lines if one["verdict"] == "bad")
    assert done.lines[-1]["name"] == "store"
    assert done.err == ""


def completed(shell: Shell, words: str, at: int) -> list[str]:
    return offered(shell, {"COMP_WORDS": words, "COMP_CWORD": str(at), "_PERDURE_COMPLETE": "complete_bash"}).split()


def offered(shell: Shell, asked: dict[str, str]) -> str:
    environment = shell.environment | asked
    perdure = Path(sys.executable).with_name("perdure")
    done = subprocess.run(
        [str(perdure)], cwd=shell.folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""
    return done.stdout


HOSTILE = (
    *("app le", "app'le", 'app"le', "app:le", "app$(le)", "app`le`"),
    *("app;le", "app\nle", "app\\le", "app\x1b[2J", "app/le"),
)


@pytest.mark.slow
def test_a_shell_is_offered_no_id_that_it_would_read_as_something_else(shell: Shell) -> None:
    """O7. No run can be started with such an id; a store from elsewhere may hold one."""
    shell("run", "adding.toml", "--input", "x", "--run-id", "apples", check=0)
    store = sqlite3.connect(shell.folder / "perdure.db", isolation_level=None)
    for number, run_id in enumerate(("apple_pie", *(f"{name}{n}" for n in range(20) for name in HOSTILE)), 2):
        store.execute("insert into run values(?, ?, x'00', 'a', 'open', null, null, null)", (number, run_id))
    store.close()
    assert completed(shell, "perdure show app", 2) == ["apple_pie", "apples"]
    zsh = offered(shell, {"_TYPER_COMPLETE_ARGS": "perdure show app", "_PERDURE_COMPLETE": "complete_zsh"})
    assert re.findall('"(.*?)"', zsh) == ["apple_pie", "apples"]
    fish = {"_TYPER_COMPLETE_ARGS": "perdure show app", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    assert offered(shell, {**fish, "_PERDURE_COMPLETE": "complete_fish"}).split() == ["apple_pie", "apples"]


def test_a_shell_is_offered_verbs_and_ids_of_runs(shell: Shell) -> None:
    assert completed(shell, "perdure show x", 2) == []
    for run_id in ("apples", "apple_pie", "pears"):
        shell("run", "adding.toml", "--input", "x", "--run-id", run_id, check=0)
    assert completed(shell, "perdure wa", 1) == ["watch"]
    assert completed(shell, "perdure show app", 2) == ["apple_pie", "apples"]
    assert completed(shell, "perdure resume apple_", 2) == ["apple_pie"]
    shell.write("perdure.db", "damaged")
    assert completed(shell, "perdure show app", 2) == []


def test_the_shells_script_is_shown(shell: Shell) -> None:
    shown = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m perdure.cli --show-completion bash"],
        cwd=shell.folder,
        env=shell.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "_PERDURE_COMPLETE" in shown.stdout, shown.stderr
