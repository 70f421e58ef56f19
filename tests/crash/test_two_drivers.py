"""Two processes that want one run: released at one moment, stopped and woken, killed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.crash.drivers import PATIENCE_S, wait_for
from tests.crash.two_drivers import LONG_LEASE_S

ROOT = Path(__file__).resolve().parents[2]
TOGETHER_NS = 50_000_000
"""Two who enter within that are in it together."""
LEAST_TOGETHER = 0.75
BEFORE_THE_STOP = ["order 0", "paint 0"]
"""What has happened when a holder stops in its second turn, or behind the plain write of its first."""


def rounds_of(folder: Path, what: str, rounds: int) -> list[dict[str, Any]]:
    """Plays the rounds; a hang and a round that went astray fail with what was waited for."""
    argv = [sys.executable, "-m", "tests.crash.two_drivers", str(folder), what, str(rounds)]
    program = subprocess.Popen(argv, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    shown, said = outcome_of(program, f"{rounds} rounds of {what}", 120 + 30 * rounds)
    output = folder / "output"
    assert program.returncode == 0, said + (output.read_text("utf-8") if output.exists() else "")
    found = [json.loads(line) for line in shown.splitlines()]
    assert len(found) == rounds
    return found


def outcome_of(program: "subprocess.Popen[str]", what: str, patience_s: float = PATIENCE_S) -> tuple[str, str]:
    """What the program printed, once it has ended; a program that does not end is killed."""
    try:
        return program.communicate(timeout=patience_s)
    except subprocess.TimeoutExpired:
        program.kill()
        printed, said = program.communicate()
        pytest.fail(f"waited {patience_s:g} s in vain for {what} to end; so far: {printed[-500:]!r}, {said[-500:]!r}")


def check_races(rounds: list[dict[str, Any]]) -> int:
    """One drives and the other is refused having done nothing, in every round. Returns how many met in `acquire`."""
    together = 0
    for one in rounds:
        lost, won = sorted(one["told"], key=lambda told: not told["error"])
        assert (lost["error"], lost["status"], lost["acts"]) == ("LeaseHeldError", "", []), json.dumps(one)
        assert "another driver holds it" in lost["said"]
        assert (won["error"], won["status"]) == ("", "completed"), json.dumps(one)
        assert one["problems"] == [], json.dumps(one)
        entered = [told["entered_ns"] for told in one["told"]]
        together += abs(entered[0] - entered[1]) < TOGETHER_NS
    print(f"{together} of {len(rounds)} rounds with both in acquire within {TOGETHER_NS // 10**6} ms")
    return together


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "rounds"), [("resume", 8), ("recover", 4)])
def test_of_two_released_at_one_moment_one_drives_and_the_other_asks_nothing(
    tmp_path: Path, verb: str, rounds: int
) -> None:
    """H05, O17."""
    assert check_races(rounds_of(tmp_path, verb, rounds)) >= LEAST_TOGETHER * rounds


@pytest.mark.soak
@pytest.mark.parametrize(("verb", "rounds"), [("resume", 200), ("recover", 50)])
def test_of_two_released_at_one_moment_two_hundred_times_one_drives(tmp_path: Path, verb: str, rounds: int) -> None:
    """H05, O17: of 200 at least 150 with both in `acquire` within 50 ms."""
    assert check_races(rounds_of(tmp_path, verb, rounds)) >= LEAST_TOGETHER * rounds


def check_takings(rounds: list[dict[str, Any]]) -> None:
    """Each successor drove at its first try, long before the dead holder's lease would have run out."""
    for one in rounds:
        assert (one["told"]["error"], one["told"]["status"]) == ("", "completed"), json.dumps(one)
        assert 0 < one["taken_s"] < LONG_LEASE_S / 2, json.dumps(one)
        assert 0 < one["recorded_s"] < LONG_LEASE_S / 2, json.dumps(one)
        assert one["problems"] == [], json.dumps(one)
    slowest = max(one["recorded_s"] for one in rounds)
    print(f"{len(rounds)} killed holders, the slowest take-over recorded {slowest:.2f} s after the kill")


@pytest.mark.slow
def test_a_killed_holder_is_taken_over_at_once_however_long_its_lease_is(tmp_path: Path) -> None:
    """H05: by `resume` and by `recover`, killed while it lived."""
    check_takings(rounds_of(tmp_path, "killed", 2))


@pytest.mark.soak
def test_twenty_killed_holders_are_taken_over_at_once_however_long_their_lease_is(tmp_path: Path) -> None:
    """H05: by `resume` and by `recover`, killed while they lived and while they were stopped."""
    check_takings(rounds_of(tmp_path, "killed", 20))


DOUBT_OF_CARVE = ["needs_reconciliation", "carve", 1]
DOUBT_OF_PAINT = ["needs_reconciliation", "paint", 0]
NOTHING: list[Any] = []
PLACES = {
    # By place: for rounds of even and of odd numbers, what a woken holder does, and what its successor parked for.
    "before-intent": ((NOTHING, NOTHING), (NOTHING, NOTHING)),
    "before-effect": ((NOTHING, [DOUBT_OF_CARVE]), (NOTHING, NOTHING)),
    # A process stopped inside a call cannot be kept from ending it. A keyed one comes again under its own key, and
    # counts once; a plain one is nobody's to start again.
    "in-idempotent": ((["order 0"], NOTHING), (NOTHING, NOTHING)),
    "in-write": ((["paint 0"], [DOUBT_OF_PAINT]), (NOTHING, [DOUBT_OF_PAINT])),
}


def check_stops(place: str, rounds: list[dict[str, Any]]) -> None:
    """The woken holder records nothing, and does at most what it was in the midst of; the successor parked for a write
    in doubt, and for nothing else, and brought the run to its end. That its drive was on record while the holder still
    stood is what the rounds wait for before they wake it."""
    for number, one in enumerate(rounds):
        acts, parks = PLACES[place][number % 2]
        holder, successor = one["told"]
        assert (holder["error"], holder["status"]) == ("LeaseLostError", ""), json.dumps(one)
        assert (successor["error"], successor["status"]) == ("", "completed"), json.dumps(one)
        assert successor["parks"] == parks, json.dumps(one)
        assert one["woken_acts"] == acts, json.dumps(one)
        assert one["problems"] == [], json.dumps(one)
        assert one["kept"], json.dumps(one)
        assert len(one["drives"]) == 2, json.dumps(one)
        if place == "before-intent":
            check_handed(holder, one["drives"][1], with_reply=number % 2 == 0)


def check_handed(holder: dict[str, Any], taken_over_at: int, *, with_reply: bool) -> None:
    """The holder was stopped with an intent in its hand, and went on with exactly that append: at a place in the
    journal where, or behind which, its successor's beginning stood by then."""
    assert "tool_call_requested" in holder["handed"]
    assert ("model_call_completed" in holder["handed"]) == with_reply
    assert holder["handed_at"] >= taken_over_at
    assert holder["handed_to"] == "LeaseLostError"


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_holder_that_was_stopped_and_outlasted_starts_nothing_once_it_wakes(tmp_path: Path, place: str) -> None:
    """H05."""
    check_stops(place, rounds_of(tmp_path, place, 2))


@pytest.mark.soak
@pytest.mark.parametrize("place", PLACES)
def test_fifty_holders_that_were_stopped_and_outlasted_start_nothing_once_they_wake(tmp_path: Path, place: str) -> None:
    """H05."""
    check_stops(place, rounds_of(tmp_path, place, 50))


def check_parkings(rounds: list[dict[str, Any]]) -> None:
    """The woken holder recorded nothing, though what it had to record would have followed; its write was settled by a
    person, and by nobody before."""
    for one in rounds:
        holder, first, successor = one["told"]
        assert (holder["error"], holder["status"]) == ("LeaseLostError", ""), json.dumps(one)
        assert one["kept"], json.dumps(one)
        assert (first["error"], first["status"], first["parks"]) == ("", "parked", [DOUBT_OF_PAINT]), json.dumps(one)
        assert first["acts"] == [], json.dumps(one)
        assert (successor["error"], successor["status"]) == ("", "completed"), json.dumps(one)
        assert successor["parks"] == [DOUBT_OF_PAINT], json.dumps(one)
        assert one["problems"] == [], json.dumps(one)


@pytest.mark.slow
def test_a_stopped_holder_that_wakes_under_a_run_parked_for_its_write_records_nothing(tmp_path: Path) -> None:
    """H05."""
    check_parkings(rounds_of(tmp_path, "parked", 1))


@pytest.mark.soak
def test_twelve_stopped_holders_that_wake_under_runs_parked_for_their_writes_record_nothing(tmp_path: Path) -> None:
    """H05."""
    check_parkings(rounds_of(tmp_path, "parked", 12))


def check_sayings(what: str, rounds: list[dict[str, Any]]) -> None:
    """What is said to a run is refused while its holder may be alive; once the holder is outlasted it is recorded
    behind all that was there, it is all that is recorded, and it holds, whoever goes on and whoever wakes."""
    for number, one in enumerate(rounds):
        said, (holder, successor) = one["said"], one["told"]
        assert (said["error"], said["acts"]) == ("", []), json.dumps(one)
        assert len(said["refusals"]) == 1, json.dumps(one)
        assert said["refusals"][0].startswith("LeaseHeldError: "), json.dumps(one)
        assert "another driver holds it" in said["refusals"][0], json.dumps(one)
        assert one["kept"], json.dumps(one)
        assert (holder["error"], holder["status"], one["woken_acts"]) == ("LeaseLostError", "", []), json.dumps(one)
        assert successor["error"] == "", json.dumps(one)
        assert one["problems"] == [], json.dumps(one)
        CHECKS[what](number, one, successor)


def check_cancelled(number: int, one: dict[str, Any], successor: dict[str, Any]) -> None:
    """The run has ended, and names the plain write its holder stood in; nobody does or records anything more."""
    (asked, request), (ended, end) = one["settled"]
    assert (asked, request["reason"], request["by"]) == ("cancel_requested", "enough", "the tester"), json.dumps(one)
    assert ended == "run_cancelled", json.dumps(one)
    assert len(end.get("unresolved", [])) == (1 if number % 2 == 0 else 0), json.dumps(one)
    recovers = number // 2 % 2 == 1
    assert successor["status"] == ("nothing to recover" if recovers else "cancelled"), json.dumps(one)
    assert (successor["acts"], one["further"]) == ([], []), json.dumps(one)
    assert one["acts"] == BEFORE_THE_STOP, json.dumps(one)


def check_limited(number: int, one: dict[str, Any], successor: dict[str, Any]) -> None:
    """More turns: the run goes on to its end. Fewer than were used: it parks before it asks again."""
    [(kind, change)] = one["settled"]
    assert (kind, change["by"]) == ("budget_changed", "the tester"), json.dumps(one)
    assert change["limits"] == {"max_model_turns": 10_005 if number % 2 == 0 else 1}, json.dumps(one)
    if number % 2 == 0:
        assert successor["status"] == "completed", json.dumps(one)
    else:
        assert (successor["status"], successor["acts"]) == ("parked", []), json.dumps(one)
        assert one["further"] == ["drive_started", "budget_exceeded"], json.dumps(one)
        assert one["acts"] == BEFORE_THE_STOP, json.dumps(one)


def check_resolved(number: int, one: dict[str, Any], successor: dict[str, Any]) -> None:
    """The write counts as done with the result that was given, and is not done again."""
    [(kind, resolved)] = one["settled"]
    assert kind == "effect_resolved", json.dumps(one)
    assert (resolved["verdict"], resolved["result"]) == ("happened", "paint 0 done"), json.dumps(one)
    assert (successor["status"], successor["parks"]) == ("completed", []), json.dumps(one)
    assert "paint 0" not in successor["acts"], json.dumps(one)


CHECKS = {"cancel": check_cancelled, "limit": check_limited, "resolve": check_resolved}


@pytest.mark.slow
@pytest.mark.parametrize(("what", "rounds"), [("cancel", 2), ("limit", 2), ("resolve", 1)])
def test_what_is_said_to_the_run_of_a_stopped_holder_counts_once_the_holder_is_outlasted(
    tmp_path: Path, what: str, rounds: int
) -> None:
    """H05: and the woken holder starts nothing."""
    check_sayings(what, rounds_of(tmp_path, what, rounds))


@pytest.mark.soak
@pytest.mark.parametrize("what", CHECKS)
def test_what_is_said_to_the_runs_of_twelve_stopped_holders_counts_once_they_are_outlasted(
    tmp_path: Path, what: str
) -> None:
    """H05: with `resume` and `recover` as what goes on, before and after the holder wakes."""
    check_sayings(what, rounds_of(tmp_path, what, 12))


TOOLS = '''
import os
import sys
import time
from pathlib import Path

from perdure import tool
from perdure.testing import ScriptedModel, calls, text

HERE = Path(__file__).parent


def await_that(look, what, pause_s=0):
    until = time.monotonic() + 60
    while not look():
        if time.monotonic() > until:
            sys.exit(f"waited 60 s in vain for {what}")
        if pause_s:
            time.sleep(pause_s)


def barrier(name):
    """Waits, when the test wants it, until the other is here as well."""
    if os.environ.get("AT_BARRIER"):
        (HERE / f"ready-{os.getpid()}").touch()
        await_that(lambda: (HERE / name).exists(), f"the file {name}")


def noted(what):
    with (HERE / "acts").open("a") as acts:
        acts.write(f"{os.getpid()} {what}\\n")


def reply(request):
    noted(f"asked {request.transcript.turns}")
    await_that(lambda: not (HERE / "hold").exists(), "the file hold to go", 0.01)
    return [calls(("book", {})), text("booked")][request.transcript.turns]


@tool(effect="write")
def book() -> str:
    """Books."""
    noted("booked")
    await_that(lambda: not (HERE / "hold-booked").exists(), "the file hold-booked to go", 0.01)
    return "booked"


model = ScriptedModel(reply, delay_ms=200)
barrier("go")
'''


_started: list["subprocess.Popen[str]"] = []


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with an agent; the commands that a failed test leaves behind in it, stopped ones too, are ended."""
    (tmp_path / "desk.py").write_text(TOOLS, "utf-8")
    (tmp_path / "desk.toml").write_text('name = "desk"\nmodel = "desk:model"\ntools = ["desk:book"]\n', "utf-8")
    yield tmp_path
    while _started:
        with _started.pop() as left:
            if left.poll() is None:
                left.kill()


def perdure(folder: Path, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    argv = [sys.executable, "-m", "perdure.cli", *arguments]
    environment = os.environ | {"PERDURE_STORE": f"sqlite:{folder / 'runs.db'}"} | environment
    started = subprocess.Popen(
        argv, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    _started.append(started)
    return started


def acts(folder: Path) -> list[str]:
    return (folder / "acts").read_text("utf-8").splitlines() if (folder / "acts").exists() else []


def killed_while_asking(folder: Path, run_id: str) -> None:
    """A run whose driver was killed inside its first model call."""
    (folder / "hold").touch()
    victim = perdure(folder, "run", "desk.toml", "--input", "go", "--run-id", run_id)
    wait_for(f"run {run_id} to ask its model", lambda: acts(folder))
    victim.kill()
    outcome_of(victim, f"the killed driver of run {run_id}")
    (folder / "hold").unlink()
    (folder / "acts").unlink()


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["resume", "recover"])
def test_of_two_commands_at_once_the_loser_exits_4_and_asks_nothing(folder: Path, verb: str) -> None:
    """H05, O17: through the command line. `recover` finds the run in good hands, which is no failure."""
    killed_while_asking(folder, "r")
    arguments = ("resume", "r") if verb == "resume" else ("recover",)
    two = [perdure(folder, *arguments, AT_BARRIER="1") for _ in range(2)]
    wait_for("both commands to come to the barrier", lambda: len(list(folder.glob("ready-*"))) == 2)
    (folder / "go").touch()
    ended = [(outcome_of(one, f"one of two commands {verb}"), one.returncode, one.pid) for one in two]
    codes = sorted(code for _, code, _ in ended)
    assert codes == ([0, 4] if verb == "resume" else [0, 0]), ended
    pids = {line.split()[0] for line in acts(folder)}
    assert len(pids) == 1, acts(folder)
    loser = next(((out, err), pid) for (out, err), _, pid in ended if str(pid) not in pids)
    assert "another driver" in loser[0][1]
    assert [line.split(" ", 1)[1] for line in acts(folder)] == ["asked 0", "booked", "asked 1"]


@pytest.mark.slow
def test_what_settles_a_run_is_refused_with_4_while_another_process_drives_it(folder: Path) -> None:
    """H05: cancel, limit and abandon; the run goes on untouched."""
    (folder / "hold").touch()
    driver = perdure(folder, "run", "desk.toml", "--input", "go", "--run-id", "r")
    wait_for("run r to ask its model", lambda: acts(folder))
    for verb in (("cancel", "r"), ("limit", "r", "max_model_turns=3"), ("abandon", "r")):
        refused = perdure(folder, *verb)
        _, said = outcome_of(refused, f"the command {verb[0]}")
        assert refused.returncode == 4, said
        assert "another driver holds it" in said
    (folder / "hold").unlink()
    _, said = outcome_of(driver, "the driver of run r")
    assert driver.returncode == 0, said


SPOKEN = {
    # The file that holds the holder where it is stopped, the command, and what it records.
    "cancel": ("hold-booked", ("cancel", "r", "--reason", "enough"), ["cancel_requested", "run_cancelled"]),
    "limit": ("hold", ("limit", "r", "max_model_turns=+5"), ["budget_changed"]),
    "resolve": ("hold-booked", ("resolve", "r", "1.0", "--happened", '"booked"'), ["effect_resolved"]),
}


@pytest.mark.soak
@pytest.mark.parametrize("verb", SPOKEN)
def test_a_command_to_the_run_of_a_stopped_holder_exits_4_until_the_holder_is_outlasted(
    folder: Path, verb: str
) -> None:
    """H05: through the command line, with the lease time as it is; then `recover` goes on, and the holder wakes."""
    hold, command, recorded = SPOKEN[verb]
    (folder / hold).touch()
    holder = perdure(folder, "run", "desk.toml", "--input", "go", "--run-id", "r")
    reached = {"hold": "asked 0", "hold-booked": "booked"}[hold]
    wait_for(f"the holder to come to {reached}", lambda: any(line.endswith(reached) for line in acts(folder)))
    holder.send_signal(signal.SIGSTOP)
    before = kinds(folder)
    codes = [outcome_with_code(perdure(folder, *command), verb)]
    assert kinds(folder) == before
    assert codes == [4]

    def settled() -> bool:
        codes.append(outcome_with_code(perdure(folder, *command), verb))
        return codes[-1] != 4

    wait_for(f"the stopped holder to be outlasted by {verb}", settled)
    assert codes[-1] == 0, codes
    assert kinds(folder) == before + recorded
    (folder / hold).unlink()
    assert outcome_with_code(perdure(folder, "recover"), "recover") == 0
    after = kinds(folder)
    holder.send_signal(signal.SIGCONT)
    assert outcome_with_code(holder, "the woken holder") == 4
    assert kinds(folder) == after
    done = [line.split(" ", 1)[1] for line in acts(folder)]
    assert (
        done
        == {
            "cancel": ["asked 0", "booked"],
            "limit": ["asked 0", "asked 0", "booked", "asked 1"],
            "resolve": ["asked 0", "booked", "asked 1"],
        }[verb]
    )


def outcome_with_code(program: "subprocess.Popen[str]", what: str) -> int:
    outcome_of(program, what)
    return program.returncode


def kinds(folder: Path) -> list[str]:
    """The kinds of the run's events."""
    store = apsw.Connection(str(folder / "runs.db"), flags=apsw.SQLITE_OPEN_READONLY)
    found = [kind for (kind,) in store.execute("select kind from event where run_id = 'r' order by seq")]
    store.close()
    return found
