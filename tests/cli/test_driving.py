"""run, resume and recover, as processes: what they print and how they end."""

import json
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cli.shell import Shell, ended, signalled, wait_until

SHOWN = {
    "run_id", "agent", "status", "outcome", "terminal_reason", "assurance", "park", "output", "answer", "evidence",
    "usage", "limits", "doubts", "open_calls", "degradations", "events", "drives", "started_at", "updated_at", "lease",
}  # fmt: skip


def test_a_completed_run_prints_its_answer_alone_and_exits_0(shell: Shell) -> None:
    """S-039."""
    result = shell("run", "adding.toml", "--input", "1 + 2", "--run-id", "R", check=0)
    assert result.out == "three\n"
    assert result.err == ""


def test_the_last_line_of_a_run_with_json_is_the_record_of_show(shell: Shell) -> None:
    """O13."""
    record = shell("run", "adding.toml", "--input", "1 + 2", "--run-id", "R", "--json", check=0).record
    assert set(record) >= SHOWN
    assert record == shell("show", "R", "--json", check=0).record
    assert (record["status"], record["outcome"], record["terminal_reason"]) == ("completed", "success", "final")
    assert record["output"] == record["answer"] == "three"


def test_verbose_says_each_event_on_standard_error(shell: Shell) -> None:
    result = shell("run", "adding.toml", "--input", "1 + 2", "--run-id", "R", "-v", check=0)
    assert result.out == "three\n"
    told = [line.split()[2] for line in result.err.splitlines() if line.lstrip()[0].isdigit()]
    assert told == shell.kinds("R")


@pytest.mark.slow
def test_input_comes_from_text_a_file_or_json(shell: Shell) -> None:
    shell.write("task.txt", "from a file: ä\n")
    shell("run", "adding.toml", "--input", "@task.txt", "--run-id", "file", check=0)
    shell("run", "adding.toml", "--input-json", '{"a": [1, null]}', "--run-id", "json", check=0)
    heads = [json.loads(shell.history(run_id).splitlines()[0]) for run_id in ("file", "json")]
    assert [head["payload"]["input"] for head in heads] == ["from a file: ä\n", {"a": [1, None]}]


@pytest.mark.slow
def test_labels_are_recorded_and_shown(shell: Shell) -> None:
    """S-077."""
    argv = ("run", "adding.toml", "--input", "x", "--label", "team=ops", "--label", "url=a=b", "--json")
    assert shell(*argv, check=0).record["labels"] == {"team": "ops", "url": "a=b"}


@pytest.mark.slow
def test_an_unsuccessful_end_exits_1_and_says_why(shell: Shell) -> None:
    """H14, O13."""
    shell.write("empty.toml", 'on_exhausted = "finish"' + (shell.folder / "empty.toml").read_text())
    result = shell("run", "empty.toml", "--input", "x", "--run-id", "R", check=1)
    assert "run R failed (failed, invalid_decision)" in result.out
    assert shell("resume", "R", check=1).out == result.out


@pytest.mark.slow
def test_resuming_a_run_that_ended_prints_its_outcome_and_drives_nothing(shell: Shell) -> None:
    """S-016."""
    shell("run", "adding.toml", "--input", "1 + 2", "--run-id", "R", check=0)
    before, asked = shell.history("R"), shell.read("asked")
    (shell.folder / "adding.toml").unlink()  # an ended run needs no agent
    assert shell("resume", "R", check=0).out == "three\n"
    assert shell("resume", "R", "--agent", "adding.toml", "--json", check=0).record["status"] == "completed"
    assert (shell.history("R"), shell.read("asked")) == (before, asked)


def test_a_killed_run_is_resumed_without_asking_again(shell: Shell) -> None:
    """H02, S-064, S-065."""
    shell.killed_in_a_booking("R")
    assert shell("show", "R", "--json", check=0).record["open_calls"][0]["tool"] == "book"
    parked = shell("resume", "R", check=3)
    assert "needs_reconciliation" in parked.out
    assert "next: perdure resolve R 1.0" in parked.out
    assert shell("resolve", "R", "1.0", "--happened", '"booked one"', "--resume", check=0).out == "booked\n"
    assert shell.read("effects") == ["one", "two"]
    assert shell.read("asked") == ["0", "1", "2"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_parks_in_good_order_and_resume_finishes(shell: Shell, number: signal.Signals) -> None:
    """S-064, O17."""
    shell.hold()
    process = shell.start("run", "booking.toml", "--input", "go", "--run-id", "R")
    wait_until(lambda: shell.read("effects") == ["one"])
    signalled(process, number)
    shell.let_go()
    stopped = ended(process)
    assert stopped.code == 130
    assert "perdure resume R" in stopped.out
    shown = shell("show", "R", "--json", check=0).record
    assert (shown["status"], shown["open_calls"], shown["lease"]["held"]) == ("idle", [], False)
    assert shell("resume", "R", check=0).out == "booked\n"
    assert shell.read("effects") == ["one", "two"]
    assert shell.read("asked") == ["0", "1", "2"]


@pytest.mark.slow
def test_a_second_signal_leaves_at_once(shell: Shell) -> None:
    shell.hold()
    process = shell.start("run", "booking.toml", "--input", "go", "--run-id", "R")
    wait_until(lambda: shell.read("effects") == ["one"])
    signalled(process, signal.SIGINT)
    assert process.stderr is not None
    assert "safe point" in process.stderr.readline()
    signalled(process, signal.SIGINT)
    assert process.wait(10) == 130  # the tool is still held
    shell.let_go()
    ended(process)
    assert shell("show", "R", "--json", check=0).record["doubts"][0]["call"] == "1.0"


def test_of_two_resumes_one_drives_and_the_other_exits_4_having_asked_nothing(shell: Shell) -> None:
    """O17, H08."""
    shell.killed_in_a_booking("R")
    shell("resolve", "R", "1.0", "--happened", '"booked one"', check=0)
    shell.hold()
    first = shell.start("resume", "R")
    wait_until(lambda: shell.read("effects") == ["one", "two"])
    before, asked = shell.history("R"), shell.read("asked")
    for verb in (("resume", "R"), ("cancel", "R"), ("limit", "R", "max_model_turns=9"), ("abandon", "R")):
        refused = shell(*verb, "--json", check=4)
        assert refused.error["code"] == "lease_held"
        assert "R" in refused.error["where"]
        assert f"another driver holds it (process {first.pid}, " in refused.error["found"]
    assert (shell.history("R"), shell.read("asked")) == (before, asked)
    assert shell("show", "R", "--json", check=0).record["status"] == "running"
    shell.let_go()
    assert ended(first).code == 0
    assert shell.read("effects") == ["one", "two"]
    assert shell.read("asked") == ["0", "1", "2"]


@pytest.mark.slow
def test_two_resumes_at_the_same_moment_ask_each_question_once(shell: Shell) -> None:
    """O17, H08."""
    shell.killed_in_a_booking("R")
    shell("resolve", "R", "1.0", "--happened", '"booked one"', check=0)
    both = [shell.start("resume", "R"), shell.start("resume", "R")]
    codes = sorted(ended(process).code for process in both)
    # The slower one may also come after the end, and then only prints it.
    assert codes in ([0, 4], [0, 0])
    assert shell.read("effects") == ["one", "two"]
    assert shell.read("asked") == ["0", "1", "2"]


@pytest.mark.slow
def test_a_changed_definition_exits_4_with_nothing_recorded(shell: Shell) -> None:
    """S-071, C17."""
    shell.killed_in_a_booking("R")
    shell("resolve", "R", "1.0", "--happened", '"booked one"', check=0)
    before = shell.history("R")
    shell.write("booking.toml", 'instructions = "other"' + (shell.folder / "booking.toml").read_text())
    refused = shell("resume", "R", "--json", check=4)
    assert refused.error["code"] == "definition_changed"
    assert "instructions" in refused.error["found"]
    assert shell.history("R") == before
    assert shell("show", "R", "--json", check=0).record["lease"]["held"] is False


@pytest.mark.slow
def test_another_model_can_finish_a_run(shell: Shell) -> None:
    """C17."""
    shell.killed_in_a_booking("R")
    shell("resolve", "R", "1.0", "--happened", '"booked one"', check=0)
    models = shell.folder / "my_models.py"
    models.write_text(models.read_text() + '\nother = scripted(*[text("by another")] * 9)\n')
    result = shell("resume", "R", "--model", "my_models:other", "--json", check=0)
    assert result.record["answer"] == "by another"
    assert "model_bound" in shell.kinds("R")


@pytest.mark.slow
def test_recover_drives_what_is_due_and_leaves_the_rest(shell: Shell) -> None:
    """O17."""
    shell("run", "asking.toml", "--input", "x", "--run-id", "waits", check=3)
    shell("run", "adding.toml", "--input", "x", "--run-id", "ended", check=0)
    for run_id in ("one", "two"):
        shell.killed_in_a_booking(run_id)
        shell("resolve", run_id, "1.0", "--happened", '"booked one"', check=0)
        (shell.folder / "effects").unlink()
    assert {line["run_id"]: line["status"] for line in shell("recover", "--json", check=0).lines} == {
        "one": "completed",
        "two": "completed",
    }
    assert shell("recover", check=0).out == "no run is due\n"
    assert shell("show", "waits", "--json", check=0).record["status"] == "parked"


@pytest.mark.slow
def test_recover_counts_one_as_one_and_more_as_more(shell: Shell) -> None:
    model = 'once = scripted(calls(("book", {"what": "one"})), text("booked"))\n'
    shell.write("my_models.py", (shell.folder / "my_models.py").read_text() + model)
    booking = (shell.folder / "booking.toml").read_text()
    shell.write("once.toml", booking.replace(':booking"', ':once"'))
    shell.killed_in_a_booking("more")
    (shell.folder / "effects").unlink()
    shell.hold()
    process = shell.start("run", "once.toml", "--input", "go", "--run-id", "one")
    wait_until(lambda: shell.read("effects") == ["one"])
    process.kill()
    ended(process)
    shell.let_go()
    for run_id in ("more", "one"):
        shell("resolve", run_id, "1.0", "--happened", '"booked one"', check=0)
    said = shell("recover", check=0).err
    assert "run one completed (unverified): 2 model turns, 1 tool call\n" in said
    assert "run more completed (unverified): 3 model turns, 2 tool calls\n" in said


@pytest.mark.slow
def test_an_agent_file_that_was_moved_since_the_run_began_is_asked_for_and_taken_from_its_new_place(
    shell: Shell,
) -> None:
    """R-019: the definition is the same, so the run goes on."""
    shell("run", "asking.toml", "--input", "x", "--run-id", "R", check=3)
    shell("answer", "R", "1.0", '{"yes": true}', check=0)
    (shell.folder / "asking.toml").rename(shell.folder / "moved.toml")
    before = shell.history("R")
    for verb in (("resume", "R"), ("recover",)):
        refused = shell(*verb, "--json", check=2)
        assert refused.error["code"] == "configuration"
        assert "asking.toml" in refused.error["where"]
        assert refused.error["next"].endswith("if the agent lies elsewhere now, name it: --agent REF")
    assert shell.history("R") == before
    assert shell("resume", "R", "--agent", "moved.toml", check=0).out == "published\n"


@pytest.mark.slow
def test_recover_wakes_a_run_whose_time_has_come(shell: Shell) -> None:
    """S-012."""
    shell.write("nap", "0.5")
    parked = shell("run", "napping.toml", "--input", "x", "--run-id", "R", check=3)
    assert "sleeping" in parked.out
    wait_until(lambda: "rested" in shell("recover", check=0).out)
    assert shell("show", "R", "--json", check=0).record["status"] == "completed"


@pytest.mark.slow
def test_recover_exits_with_the_worst_that_happened(shell: Shell) -> None:
    """S-071, O17."""
    shell.killed_in_a_booking("good")
    (shell.folder / "effects").unlink()
    shell.write("other.toml", (shell.folder / "booking.toml").read_text())
    shell.hold()
    process = shell.start("run", "other.toml", "--input", "go", "--run-id", "changed")
    wait_until(lambda: shell.read("effects") == ["one"])
    process.kill()
    ended(process)
    shell.let_go()
    for run_id in ("good", "changed"):
        shell("resolve", run_id, "1.0", "--did-not-happen", check=0)
    shell.write("other.toml", 'instructions = "other"' + (shell.folder / "other.toml").read_text())
    result = shell("recover", "--json", check=4)
    assert [line["run_id"] for line in result.lines] == ["good"]
    assert result.error["code"] == "definition_changed"


@pytest.mark.slow
def test_a_store_that_fills_up_stops_the_run_with_exit_4_and_it_can_be_resumed(shell: Shell) -> None:
    """O17, H08."""
    argv = ("run", "counting.toml", "--input", "x", "--run-id", "R", "--json")
    refused = shell(*argv, check=4, largest_file=1_000_000)
    assert refused.error["code"] == "store_error"
    assert "perdure.db" in refused.error["where"]
    assert 1 < len(shell.read("asked")) < 101
    assert shell("show", "R", "--json", check=0).record["status"] == "idle"
    assert shell("resume", "R", check=0).out == "counted\n"
    # What was under way when the store failed may have been asked twice, and nothing else.
    assert len(shell.read("asked")) - len(set(shell.read("asked"))) <= 1
    assert shell("verify", "--json", check=0).record["ok"] is True


@pytest.mark.slow
def test_an_agent_can_be_named_in_python(shell: Shell) -> None:
    shell.write(
        "my_agents.py",
        "import my_models, my_tools\nfrom perdure import Agent\n"
        "adder = Agent(name='adder', model=my_models.adding, tools=[my_tools.add])\n",
    )
    assert shell("run", "my_agents:adder", "--input", "1 + 2", "--run-id", "R", check=0).out == "three\n"
    assert shell("show", "R", "--json", check=0).record["agent"]["ref"] == "my_agents:adder"


def test_a_reader_that_leaves_is_no_error(shell: Shell) -> None:
    shell("run", "adding.toml", "--input", "1 + 2", "--run-id", "R", check=0)
    process = shell.start("history", "R", "--json")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.wait(30) == 0
    assert process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.slow
def test_a_result_that_cannot_be_written_is_an_error_in_words(shell: Shell) -> None:
    shell("run", "adding.toml", "--input", "1 + 2", "--run-id", "R", check=0)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "perdure.cli", "show", "R"],
            cwd=shell.folder, env=shell.environment, stdout=full, stderr=subprocess.PIPE, check=False, timeout=60,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.decode() == "error: standard output: it cannot be written: No space left on device\n"


def test_damage_in_the_middle_exits_4_naming_the_event_and_the_journal_stays_as_it_was(shell: Shell) -> None:
    """H06, S-073, S-070."""
    shell.killed_in_a_booking("R")
    store = shell.folder / "perdure.db"
    connection = sqlite3.connect(store, isolation_level=None)
    connection.execute("update event set payload = cast(replace(payload, 'book', 'cook') as blob) where seq = 3")
    connection.close()
    asked = shell.read("asked")
    before = _rows(shell)
    for verb in (("resume", "R"), ("show", "R"), ("history", "R"), ("resolve", "R", "1.0", "--did-not-happen")):
        refused = shell(*verb, "--json", check=4)
        assert refused.error["code"] == "malformed_journal"
        assert "event 3 (model_call_completed)" in refused.error["where"]
        assert refused.out == ""
    assert (_rows(shell), shell.read("asked")) == (before, asked)
    proof = shell("verify", "--json", check=4)
    bad = proof.record["first_bad"]
    assert (proof.record["ok"], bad["run_id"], bad["seq"], bad["kind"]) == (False, "R", 3, "model_call_completed")
    assert "run R event 3 (model_call_completed)" in proof.err


def _rows(shell: Shell) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(shell.folder / "perdure.db")
    try:
        return connection.execute("select * from event order by run_id, seq").fetchall()
    finally:
        connection.close()


@pytest.mark.slow
def test_recover_drives_the_sound_runs_and_names_the_damaged_ones_in_the_end(shell: Shell) -> None:
    """H06. One is damaged in the list of runs, one in its journal."""
    for number in range(4):
        shell.write("nap", "1")
        shell("run", "napping.toml", "--input", "x", "--run-id", f"R{number}", check=3)
    store = sqlite3.connect(shell.folder / "perdure.db", isolation_level=None)
    store.execute("update run set wake_at = 'soon' where run_id = 'R1'")
    store.execute("update event set salt = x'00' where run_id = 'R2' and seq = 3")
    store.close()
    time.sleep(1.1)
    recovered = shell("recover", "--json", check=4)
    assert sorted((line["run_id"], line["status"]) for line in recovered.lines) == [
        ("R0", "completed"),
        ("R3", "completed"),
    ]
    errors = [json.loads(line)["error"] for line in recovered.err.splitlines()]
    assert {error["code"] for error in errors} == {"malformed_journal"}
    assert sorted(error["where"].split(",")[0].split(" (")[0] for error in errors) == ["run R1", "run R2"]
    again = shell("recover", check=4)
    assert "run R1" in again.err
    assert "run R2" in again.err
