"""answer, resolve, limit, cancel and abandon, as processes: what they record, and when they are refused."""

import json

import pytest
from tests.cli.shell import Shell

pytestmark = pytest.mark.slow

YES = '{"yes": true}'


def suspended(shell: Shell) -> str:
    """A run that waits for an answer; its journal."""
    shell("run", "asking.toml", "--input", "go", "--run-id", "R", check=3)
    return shell.history("R")


def test_a_run_that_waits_says_for_what_and_which_command_settles_it(shell: Shell) -> None:
    """S-012, O15."""
    result = shell("run", "asking.toml", "--input", "go", "--run-id", "R", check=3)
    assert "run R parked: suspended" in result.out
    assert "waits for: an answer at 1.0 (question): Publish?" in result.out
    assert "next: perdure answer R 1.0 JSON --resume" in result.out
    park = shell("show", "R", "--json", check=0).record["park"]
    assert (park["kind"], park["call"], park["detail"]["kind"]) == ("suspended", "1.0", "question")


def test_an_answer_is_recorded_with_who_gave_it_and_drives_nothing(shell: Shell) -> None:
    """O15."""
    suspended(shell)
    shell("answer", "R", "1.0", YES, "--by", "Ada", "--key", "k1", check=0)
    last = json.loads(shell.history("R").splitlines()[-1])
    assert last["kind"] == "resumed"
    assert last["payload"] == {"call": "1.0", "value": {"yes": True}, "by": "Ada", "key": "k1"}
    assert shell.read("asked") == ["0"]
    assert shell("resume", "R", check=0).out == "published\n"
    assert shell.read("asked") == ["0", "1"]


def test_with_resume_a_settling_verb_drives_on_and_exits_by_the_outcome(shell: Shell) -> None:
    """O15."""
    suspended(shell)
    result = shell("answer", "R", "1.0", YES, "--resume", "--json", check=0)
    assert [line["status"] for line in result.lines] == ["completed"]


def test_a_file_that_spells_a_default_out_is_the_definition_it_was(shell: Shell) -> None:
    """R-031."""
    agent = (shell.folder / "asking.toml").read_text("utf-8")
    defaults = 'on_exhausted = "park"\nbatch = "lenient"\nresume_mode = "continue"\non_reject = "continue"\n'
    shell.write("asking.toml", f"{defaults}{agent}\n[settings]\nmax_output_tokens = 4096\ntimeout_s = 120.0\n")
    suspended(shell)
    assert shell("answer", "R", "1.0", YES, "--resume", check=0).out == "published\n"
    shell("run", "asking.toml", "--input", "go", "--run-id", "S", check=3)
    shell.write("asking.toml", agent)
    assert shell("answer", "S", "1.0", YES, "--resume", check=0).out.endswith("published\n")


BAD_ANSWERS = {
    '{"yes": tru}': ("usage", "line 1, column 9"),
    '{"yes": NaN}': ("usage", "NaN"),
    '{"yes": true, "yes": false}': ("usage", "twice"),
    '{"yes": 99999999999999999999}': ("usage", "$.yes"),
    "[" * 5000: ("usage", "nested"),
    '"\\ud800"': ("usage", "surrogate"),
    '{"yes": 1}': ("invalid_answer", "boolean"),
    "-5": ("invalid_answer", "object"),
}


def test_an_answer_that_cannot_be_taken_exits_2_with_the_journal_as_it_was(shell: Shell) -> None:
    """O8."""
    before = suspended(shell)
    for text, (code, says) in BAD_ANSWERS.items():
        refused = shell("answer", "R", "1.0", text, "--json", check=2)
        assert refused.error["code"] == code
        assert says in refused.error["message"]
    assert shell.history("R") == before


def test_an_answer_nobody_waits_for_exits_2_naming_what_waits(shell: Shell) -> None:
    before = suspended(shell)
    refused = shell("answer", "R", "7.0", YES, "--json", check=2)
    assert refused.error["code"] == "invalid_answer"
    assert "1.0" in refused.error["next"]
    assert shell.history("R") == before
    shell("answer", "R", "1.0", YES, check=0)
    assert shell("answer", "R", "1.0", YES, "--json", check=2).error["code"] == "invalid_answer"


@pytest.mark.parametrize(
    ("verdict", "effects", "observed"),
    [
        (("--happened", '"as a person saw it"'), ["one", "two"], "as a person saw it"),
        (("--did-not-happen",), ["one", "one", "two"], "booked one"),
        (("--failed", "the desk was closed"), ["one", "two"], "the desk was closed"),
    ],
)
def test_a_person_settles_a_write_in_doubt(
    shell: Shell, verdict: tuple[str, ...], effects: list[str], observed: str
) -> None:
    """S-064, S-065, H02, D-020."""
    shell.killed_in_a_booking("R")
    asked = shell.read("asked")
    shell("resolve", "R", "1.0", *verdict, "--by", "Ada", check=0)
    assert (shell.read("asked"), shell.read("effects")) == (asked, ["one"])
    assert shell("resume", "R", check=0).out == "booked\n"
    assert shell.read("effects") == effects
    assert observed in shell.history("R")


@pytest.mark.parametrize("value", ['{"booked": [1, null]}', "null", "7", '"booked"'])
def test_what_happened_is_recorded_as_it_is_given_whatever_the_tool_returns(value: str, shell: Shell) -> None:
    """S-064. As docs/how-to/settle-a-doubt.md says; the tool returns text."""
    shell.killed_in_a_booking("R")
    shell("resolve", "R", "1.0", "--happened", value, check=0)
    last = json.loads(shell.history("R").splitlines()[-1])
    assert (last["kind"], last["payload"].get("result")) == ("effect_resolved", json.loads(value))
    assert shell("resume", "R", check=0).out == "booked\n"


def test_a_verdict_that_is_none_exits_2_with_the_journal_as_it_was(shell: Shell) -> None:
    """S-065."""
    shell.killed_in_a_booking("R")
    before = shell.history("R")
    for argv in ((), ("--did-not-happen", "--failed", "x"), ("--happened", "{no json")):
        assert shell("resolve", "R", "1.0", *argv, "--json", check=2).error["code"] == "usage"
    assert shell.history("R") == before


def test_where_nothing_is_in_doubt_resolve_is_refused(shell: Shell) -> None:
    """S-065."""
    before = suspended(shell)
    assert shell("resolve", "R", "1.0", "--did-not-happen", "--json", check=2).error["code"] == "invalid_answer"
    assert shell.history("R") == before


def test_a_settling_verb_that_drives_nothing_says_which_command_goes_on(shell: Shell) -> None:
    suspended(shell)
    # A new limit is no answer: the run still waits for that.
    waits = "run R: recorded: max_model_turns=+5\n  next: perdure answer R 1.0 JSON --resume\n"
    assert shell("limit", "R", "max_model_turns=+5", check=0).out == waits
    said = "run R: the answer at 1.0 is recorded\n  next: perdure resume R\n"
    assert shell("answer", "R", "1.0", YES, check=0).out == said
    assert shell("cancel", "R", check=0).out == "run R: cancelled\n"
    shell.killed_in_a_booking("B")
    said = "run B: what became of 1.0 is recorded\n  next: perdure resume B\n"
    assert shell("resolve", "B", "1.0", "--happened", '"booked one"', check=0).out == said


def test_a_spent_limit_parks_until_it_is_raised(shell: Shell) -> None:
    """S-031, S-032, S-033, C3."""
    shell.write("booking.toml", (shell.folder / "booking.toml").read_text().replace("= 120", "= 1"))
    parked = shell("run", "booking.toml", "--input", "go", "--run-id", "R", check=3)
    assert "a higher max_model_turns: 1 allowed, 1 used, 1 more needed" in parked.out
    assert "next: perdure limit R max_model_turns=2 --resume" in parked.out
    park = shell("show", "R", "--json", check=0).record["park"]
    assert park["detail"] == {"limit": "max_model_turns", "max": 1, "used": 1, "need": 1}
    assert shell("resume", "R", check=3).out == parked.out
    shell("limit", "R", "max_model_turns=2", "--resume", check=3)
    assert shell("limit", "R", "max_model_turns=+1", "--by", "Ada", "--resume", check=0).out == "booked\n"
    assert shell.read("effects") == ["one", "two"]


BAD_LIMITS = (
    ("max_turns=5",),
    ("max_model_turns=0",),
    ("max_model_turns=many",),
    ("max_model_turns",),
    ("max_model_turns=5", "max_model_turns=6"),
    ("by=5",),
    ("run_id=5",),
    (),
)


def test_a_limit_that_is_none_exits_2_with_the_journal_as_it_was(shell: Shell) -> None:
    """S-036."""
    before = suspended(shell)
    for argv in BAD_LIMITS:
        assert shell("limit", "R", *argv, "--json", check=2).error["code"] == "usage"
    assert shell.history("R") == before


def test_cancel_ends_a_run_with_its_reason_and_a_write_in_doubt_named(shell: Shell) -> None:
    """O13."""
    shell.killed_in_a_booking("R")
    shell("cancel", "R", "--reason", "no longer wanted", "--by", "Ada", check=0)
    shown = shell("show", "R", "--json", check=0).record
    assert (shown["status"], shown["outcome"]) == ("cancelled", "cancelled")
    assert "no longer wanted" in shown["answer"]
    assert "1.0" in shown["answer"]
    assert "cancelled" in shell("resume", "R", check=1).out


def test_abandon_ends_a_run_that_waits_and_claims_no_answer(shell: Shell) -> None:
    """S-066."""
    shell.killed_in_a_booking("R")
    record = shell("abandon", "R", "--by", "Ada", "--json", check=0).record
    assert (record["status"], record["terminal_reason"], record["output"]) == ("abandoned", "abandoned", None)
    assert "1.0" in record["answer"]


SETTLING = (
    ("cancel",),
    ("abandon",),
    ("answer", "1.0", YES),
    ("limit", "max_model_turns=9"),
    ("resolve", "1.0", "--did-not-happen"),
)


def test_nothing_is_recorded_after_the_end(shell: Shell) -> None:
    """S-070."""
    shell("run", "adding.toml", "--input", "x", "--run-id", "R", check=0)
    before = shell.history("R")
    for verb, *rest in SETTLING:
        assert "ended already" in shell(verb, "R", *rest, "--json", check=2).error["found"]
    assert shell.history("R") == before
