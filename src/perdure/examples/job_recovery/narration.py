"""The demo's story for a person, as it happens. Plain when piped, silent beside `--json`."""

import json

from perdure.examples.job_recovery.findings import Findings, Journal, JsonLine
from perdure.examples.job_recovery.stage import Stage


class Narrator:
    """Prints the story. `quiet` prints nothing but warnings, and those to standard error."""

    def __init__(self, *, quiet: bool) -> None:
        from rich.console import Console

        self._console = Console(quiet=quiet, highlight=False, soft_wrap=True)
        self._errors = Console(stderr=True, highlight=False, soft_wrap=True)

    def opening(self, stage: Stage, run_id: str) -> None:
        """What is going to happen."""
        world = stage.world
        self._title(f"Scenario {stage.scenario}, seed {stage.seed}: {stage.plot.story}")
        self._say(f"Job {world.job_id} ({world.title}) is {world.state}. An agent is to recover it, as run {run_id}.")
        self._say("Service and model run in processes of their own, on this machine's loopback.")

    def killed(self, stage: Stage, before: Journal, exit_signal: int | None) -> None:
        """The moment of the kill."""
        effect = "after the service committed the retry, before its answer arrived"
        moment = effect if stage.plot.hold == "after_commit" else "in the middle of an open read"
        self._title(f"Killed by signal {exit_signal}, {moment}")
        self._say(f"The journal holds {len(before.events)} events. Open: {_listed(before, before.dangling())}.")
        counts = stage.jobs.counts()
        self._say(f"The service has counted {counts.posts} request(s) to retry and {counts.effects} effect(s) so far.")

    def resumed(self, before: Journal, after: Journal) -> None:
        """What the second process did."""
        self._title("Resumed in a new process")
        counted = ", ".join(f"{tool} {times}x" for tool, times in before.replayed().items())
        self._say(f"Replayed from the journal, nothing of it run again: {counted or 'nothing'}.")
        again = after.since(len(before.events)).calls("attempt_started")
        self._say(f"Tried again: {_listed(after, again)}.")
        fresh = [
            after.tool_of(event["payload"]["call"])
            for event in after.events[len(before.events) :]
            if event["kind"] in ("model_call_requested", "tool_call_requested")
        ]
        self._say(f"Ran for the first time: {', '.join(fresh) or 'nothing'}.")

    def counted(self, stage: Stage) -> None:
        """What the service's own database says."""
        counts = stage.jobs.counts()
        self._title("Counted in the service's own database")
        self._say(f"{counts.posts} request(s) to retry, {counts.distinct_keys} key(s), {counts.effects} effect(s).")
        self._say(f"Jobs touched: {', '.join(counts.jobs_touched) or 'none'}.")

    def answered(self, shown: JsonLine) -> None:
        """How the run ended."""
        self._title(f"Answer ({shown['status']}, {shown['terminal_reason']})")
        self._say(json.dumps(shown["output"], indent=2, ensure_ascii=False))

    def history(self) -> None:
        """Heads the history, which the command line prints itself."""
        self._title("History")

    def verdict(self, findings: Findings, reasons: list[str], *, no_key: bool) -> None:
        """The end."""
        if no_key:
            self._title("The control: the retry carried no idempotency key, so the service could not know it again")
        right = (
            f"Right: {findings.effects} effect(s), report {findings.report_status}, no completed model call repeated."
        )
        wrong = "The agent cannot know of the second effect" if no_key else "See what is said below"
        self._title(right if not reasons else f"{findings.effects} effect(s), and not the right end. {wrong}.")

    def warn(self, text: str) -> None:
        """Something a person should see, beside the story."""
        self._errors.print(text, markup=False)

    def _title(self, text: str) -> None:
        self._console.print()
        self._console.print(text, style="bold", markup=False)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False)


def _listed(journal: Journal, calls: list[str]) -> str:
    return ", ".join(f"{journal.tool_of(call)} (call {call})" for call in calls) or "nothing"
