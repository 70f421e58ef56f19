"""The crash test: a user's run, its model turns fixed, killed at every boundary in real processes and resumed, against
the user's own tools. What the tools did to their world is compared with what they did undisturbed.

Owns the order of things and the verdicts. Drives nothing itself: every drive, and every look at the world, is a process
of its own.
"""

import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec

from perdure.contracts.contract import JsonValue, canonical
from perdure.contracts.limits import LIMIT_NAMES, Limits
from perdure.contracts.messages import AssistantTurn, Effect
from perdure.errors import ConfigurationError, PerdureError
from perdure.testing.killing.cut_drive import CutDrive, Drove, Notes, Ran, Subject
from perdure.testing.killing.cuts import Cut, cuts_of
from perdure.testing.killing.folders import is_full, write_whole
from perdure.testing.killing.processes import Ended, adopt_orphans, end_children, fork
from perdure.testing.killing.worlds import CrashWorld, Said, ask

MOST_DRIVES = 40
"""Of one cut: a run that still waits after so many is given up."""
_AHEAD_NS = 1_000_000_000
_WORST = ("doubled", "lost", "blocked", "unclear")
"""What a finding about a tool can be, the worst first."""
_UNTESTABLE = {
    "forked": (
        "forks, and the copy returns as the tool does",
        "start a program of its own, or end the copy with os._exit",
    ),
    "moved": (
        "ran, and the process no longer stands in its working directory; a resumed one starts in its own again",
        "use whole paths, give programs their cwd=, and leave the working directory where it is",
    ),
}
"""By the moment in the notes: what a tool does that makes verdicts worth nothing, and what to do."""

Progress = Callable[[int, int, float], None]
"""Told how many cuts are done, of how many, and how many seconds the undisturbed run took. First before any is done."""


class CrashTestError(PerdureError):
    """The test could not be carried out."""

    code = "crash_test"


def full_disk(folder: Path) -> CrashTestError:
    """The error of a test that finds no room."""
    return CrashTestError(
        "the disk is full", where=str(folder), next="make room there, or set TMPDIR, or --keep, to a larger one"
    )


class Finding(msgspec.Struct, frozen=True):
    """One thing that went wrong, or that needs a person, at one cut."""

    what: str
    """`doubled`, `lost`, `blocked`, `unclear`, `ended_otherwise`."""
    tool: str | None
    """None: it belongs to no tool."""
    cut: Cut
    detail: str


class ToolVerdict(msgspec.Struct, frozen=True):
    """What the test says of one tool: at how many cuts."""

    tool: str
    effect: str
    cuts: int
    """How many cuts fell into a call of it."""
    doubled: int = 0
    """Some effect happened more often than undisturbed."""
    lost: int = 0
    """Some effect was missing at the end."""
    blocked: int = 0
    """The run waited for a person to say what became of a call."""
    unclear: int = 0
    """So it did, and the person would have to find out: the function was under way."""
    smallest: str | None = None
    """The earliest cut that shows the worst of these."""
    detail: str | None = None
    next: str | None = None
    """What to do about it."""


class CrashReport(msgspec.Struct, frozen=True):
    """What a crash test found."""

    ok: bool
    """Nothing doubled, nothing lost, and every cut ended as the undisturbed run, or was given up as unclear."""
    cuts: int
    events: int
    """Of the undisturbed run."""
    turns: int
    effects: int
    """What the world counted undisturbed."""
    seen: bool
    """Whether `ok` rests on what the tools did: where none of the effects of tools that act was seen, or a tool did not
    succeed undisturbed, a repeat of theirs would not be seen either."""
    failed: dict[str, str]
    """The tools of which no call succeeded undisturbed, and why the first of these did not."""
    tools: tuple[ToolVerdict, ...]
    ended_otherwise: int
    """Times that the run did not come to the same end, or that its effects differed while no tool was being called."""
    otherwise: str | None
    """The first of these, and why."""
    left_behind: int
    """Processes that outlived a drive; they were ended."""
    left_by: tuple[str, ...]
    """The tools that ran in each of those drives; where no tool ran in all of them, those that ran in any."""
    past_limits: dict[str, int]
    """Cuts at which the run used more than a limit of the agent allows, since a repeat counts, by the limit's name.
    There it would have waited or ended: killed runs have no limit here, so that the rest of them is tested."""
    unmet: int
    """Cuts that never came: the run went another way, or a function was quicker than undisturbed."""
    seconds: float


@dataclass(frozen=True)
class _Control:
    """The run that was not killed."""

    drove: Drove
    effects: Counter[bytes]
    ran: Sequence[Ran]


@dataclass
class CrashTest:
    """One test, in an empty folder of its own: what a cut that shows something leaves there is kept."""

    subject: Subject
    world: CrashWorld
    folder: Path
    working: Path | None = None
    """The tools' working directory; None: as it is."""
    turns: tuple[AssistantTurn, ...] | None = None
    """The recorded turns; None: the undisturbed run asks the agent's model, and its turns are the ones."""
    timeout_s: float = 60.0
    """Longest time for one drive, in seconds."""
    findings: list[Finding] = field(default_factory=list)
    left_behind: list[tuple[int, frozenset[str]]] = field(default_factory=list)
    """Of each drive that was outlived: by how many processes, and which tools had run in it."""
    unmet: int = 0
    past_limits: Counter[str] = field(default_factory=Counter)

    def run(self, progress: Progress | None = None) -> CrashReport:
        """Carries it out.

        Raises:
            CrashTestError: the undisturbed run does not come to an end, or the disk is full.
            ConfigurationError: the world fails.
            UsageError: this process has threads, so it cannot be forked.
        """
        adopt_orphans()
        try:
            return self._run(progress)
        finally:
            end_children()

    def _run(self, progress: Progress | None) -> CrashReport:
        began = time.monotonic()
        control = self._undisturbed()
        took = time.monotonic() - began
        self.turns = control.drove.turns
        limits = self.subject.agent.limits
        self.subject = replace(self.subject, agent=replace(self.subject.agent, limits=_lifted(limits)))
        cuts = cuts_of(control.drove.events, _took_ms(control.ran))
        if progress is not None:
            progress(0, len(cuts), took)
        for done, cut in enumerate(cuts, 1):
            self._kill(control, cut, limits)
            if progress is not None:
                progress(done, len(cuts), took)
        return self._report(control, cuts, time.monotonic() - began)

    def _undisturbed(self) -> _Control:
        course = _Course(self, self.folder / "undisturbed", None)
        before = self._fresh_world()
        drove = course.to_the_end()
        if drove is None or drove.status in ("parked", "idle", "refused"):
            why = course.stopped or (drove and drove.reason) or "it stopped before its end"
            raise CrashTestError(
                f"the run does not come to its end undisturbed: {why}",
                where=f"agent {self.subject.agent.name}",
                next="test a run that ends by itself; answers of a recorded run are given again",
            )
        if drove.outcome == "exhausted":
            raise CrashTestError(
                f"it ends at a limit ({drove.reason}) undisturbed; a repeat counts, so a killed run would do less",
                where=f"agent {self.subject.agent.name}",
                next="raise that limit for the test",
            )
        return _Control(drove, _changes(before, self._effects()), course.ran())

    def _kill(self, control: _Control, cut: Cut, limits: Limits) -> None:
        course = _Course(self, self.folder / f"{cut.events:04}-{cut.moment}", cut)
        before, found = self._fresh_world(), len(self.findings)
        drove = course.to_the_end()
        effects = _changes(before, self._effects())
        more, less = _changes(control.effects, effects), _changes(effects, control.effects)
        if course.unclear:  # what the undisturbed run has not at all is a function's half-done work, and no repeat
            more = Counter({effect: count for effect, count in more.items() if effect in control.effects})
        if +more:
            self.find("doubled", course.repeated(), cut, f"beyond what is done undisturbed: {_shown(+more)}")
        if drove is not None:
            self.past_limits.update(name for name, used in drove.used.items() if used > (getattr(limits, name) or used))
            if +less:
                self.find("lost", course.forgotten(), cut, f"done undisturbed, and missing: {_shown(+less)}")
            if _end(drove) != _end(control.drove):
                self.find("ended_otherwise", None, cut, f"it ended {drove.status} ({drove.reason})")
        if len(self.findings) == found:
            shutil.rmtree(course.folder)

    def find(self, what: str, tool: str | None, cut: Cut, detail: str) -> None:
        """Notes a finding."""
        self.findings.append(Finding(what, tool, cut, detail))

    # The world: always touched in another process, so that this one stays fit to be forked

    def _fresh_world(self) -> Counter[bytes]:
        """Resets it; returns what is in it all the same, which then counts for nothing."""
        self._in_world("reset")
        return self._effects()

    def _effects(self) -> Counter[bytes]:
        return Counter(canonical(effect) for effect in self._in_world("effects"))

    def _in_world(self, method: Literal["reset", "effects"]) -> JsonValue:
        result = self.folder / "world.json"
        result.unlink(missing_ok=True)

        def work() -> int:
            write_whole(result, msgspec.json.encode(ask(self.world, method)))
            return 0

        process = fork(work, self.folder / "world.out")
        ended = process.wait(self.timeout_s)
        if ended is None:
            process.kill()
            process.wait()
        self.must_have_room()
        if ended is None:
            problem = f"did not return within {self.timeout_s:g} s"
        elif not result.exists():
            problem = f"ended its process (exit code {ended.code})"
        else:
            said = msgspec.json.decode(result.read_bytes(), type=Said)
            if said.problem is None:
                return said.value
            problem = said.problem
        place = f"world {type(self.world).__name__}"
        raise ConfigurationError(f"{method}() {problem}", where=place, next="correct it: a crash test rests on it")

    def must_have_room(self) -> None:
        """Tells a full disk, where all else that goes wrong comes from that.

        Raises:
            CrashTestError: the disk is full.
        """
        if is_full(self.folder):
            raise full_disk(self.folder)

    def _report(self, control: _Control, cuts: Sequence[Cut], seconds: float) -> CrashReport:
        otherwise = [one for one in self.findings if one.what == "ended_otherwise"]
        tools = tuple(
            self._verdict(tool.descriptor.name, tool.descriptor.effect, cuts) for tool in self.subject.agent.tools
        )
        unowned = [one for one in self.findings if one.tool is None and one.what in ("doubled", "lost")]
        return CrashReport(
            ok=not (otherwise or unowned or any(tool.doubled or tool.lost for tool in tools)),
            cuts=len(cuts),
            events=len(control.drove.events),
            turns=len(control.drove.turns),
            effects=sum(map(abs, control.effects.values())),
            seen=self._seen(control),
            failed=control.drove.failed,
            tools=tools,
            ended_otherwise=len(otherwise) + len(unowned),
            otherwise=next((f"{one.cut}: {one.detail}" for one in otherwise + unowned), None),
            left_behind=sum(count for count, _ in self.left_behind),
            left_by=tuple(sorted(_suspects([tools for _, tools in self.left_behind]))),
            past_limits=dict(self.past_limits),
            unmet=self.unmet,
            seconds=seconds,
        )

    def _seen(self, control: _Control) -> bool:
        acting = {tool.descriptor.name for tool in self.subject.agent.tools if tool.descriptor.effect != Effect.READ}
        reading = {tool.descriptor.name for tool in self.subject.agent.tools} - acting
        acted = any(one.tool in acting for one in control.ran)
        return bool(control.effects or not acted) and control.drove.failed.keys() <= reading

    def _verdict(self, name: str, effect: Effect, cuts: Sequence[Cut]) -> ToolVerdict:
        mine = [one for one in self.findings if one.tool == name]
        counts = {what: len({str(one.cut) for one in mine if one.what == what}) for what in _WORST}
        worst = next((what for what in _WORST if counts[what]), None)
        first = next((one for one in mine if one.what == worst), None)
        return ToolVerdict(
            tool=name,
            effect=effect.value,
            cuts=sum(cut.tool == name for cut in cuts),
            smallest=None if first is None else str(first.cut),
            detail=None if first is None else first.detail,
            next=None if worst is None else _advice(worst, effect),
            **counts,
        )


class _Course:
    """The drives of one run: the first one killed at the cut, the others until it has ended."""

    def __init__(self, test: CrashTest, folder: Path, cut: Cut | None) -> None:
        self._test, self.folder, self._cut = test, folder, cut
        self.drives = 0
        self.stopped: str | None = None
        """Why it was given up before its end; None while it was not."""
        self.unclear = False
        """Whether it was given up because a write was under way when it was killed."""
        folder.mkdir(parents=True)

    def to_the_end(self) -> Drove | None:
        """How it ended; None when it was given up."""
        drive = CutDrive(self._test.subject, self.folder, 0, self._test.turns, self._cut, working=self._test.working)
        while self.drives < MOST_DRIVES:
            drove, ended = self._drive(drive)
            if drove is None and (self.stopped or drive.cut is None or not ended.killed):
                self._give_up(self.stopped or f"a drive died by itself (exit code {ended.code})")
                return None
            if drove is not None and drove.status != "parked" and drive.cut is not None:
                self._test.unmet += 1
            if drove is None:
                drive = replace(drive, cut=None, verdict=None, answer=None)
            elif drove.status != "parked":
                return drove
            else:
                settled = self._settled(drive, drove)
                if settled is None:
                    return None
                drive = settled
            drive = replace(drive, number=self.drives)
        self._give_up(f"it has not ended after {self.drives} drives")
        return None

    def _drive(self, drive: CutDrive) -> tuple[Drove | None, Ended]:
        """One process. None when it left no result: it was killed, or died."""
        self.drives += 1
        process = fork(drive.work, drive.output)
        in_time = process.wait(self._test.timeout_s)
        if in_time is None:
            process.kill()
        ended = process.ended()
        self._test.must_have_room()
        if in_time is None:
            self.stopped = f"{self._under_way()} within {self._test.timeout_s:g} s"
        if ended.left_behind:
            tools = frozenset(one.tool for one in self.ran() if one.drive == drive.number)
            self._test.left_behind.append((ended.left_behind, tools))
        untestable = next((one for one in self.ran() if one.moment in _UNTESTABLE), None)
        if untestable is not None:
            found, advice = _UNTESTABLE[untestable.moment]
            raise CrashTestError(
                f"{untestable.tool} (call {untestable.call}) {found}",
                where=f"agent {self._test.subject.agent.name}",
                next=advice,
            )
        drove = msgspec.json.decode(drive.result.read_bytes(), type=Drove) if drive.result.exists() else None
        return drove, ended

    def _settled(self, drive: CutDrive, drove: Drove) -> CutDrive | None:
        """The next drive, told what the run waits for; None when that cannot be known here."""
        drive = replace(drive, verdict=None, answer=None)
        call = str(drove.call)
        match drove.park:
            case "needs_reconciliation":
                return self._resolved(drive, call, str(drove.detail["tool"]))
            case "suspended" if call in self._test.subject.answers:
                return replace(drive, answer=(call, self._test.subject.answers[call]))
            case "sleeping":
                return replace(drive, skip_ns=drove.detail["wake_at"] - time.time_ns() + _AHEAD_NS)
            case "crash_loop":
                return drive
            case _:
                self._give_up(f"it waits: {drove.park} at call {call}, {drove.detail}")
                return None

    def _resolved(self, drive: CutDrive, call: str, tool: str) -> CutDrive | None:
        """Says of a write in doubt what the notes say: a person would have to look."""
        mine = [one for one in self.ran() if one.call == call]
        what = "the run waits for a person to say what became of it"
        self._find("blocked", tool, what)
        if not mine:
            return replace(drive, verdict=(call, "did_not_happen", None))
        if mine[-1].moment == "returned":
            return replace(drive, verdict=(call, "happened", mine[-1].result))
        if mine[-1].moment == "raised":
            return replace(drive, verdict=(call, "failed", mine[-1].result))
        self._find("unclear", tool, "the function was under way: only a look at what it changes can tell")
        self.unclear = True
        self.stopped = what
        return None

    def _give_up(self, why: str) -> None:
        self.stopped = why
        self._find("ended_otherwise", None, why)

    def _find(self, what: str, tool: str | None, detail: str) -> None:
        if self._cut is not None:
            self._test.find(what, tool, self._cut, detail)

    def _under_way(self) -> str:
        ended = {(one.drive, one.call) for one in self.ran() if one.moment != "began"}
        open_calls = [one for one in self.ran() if (one.drive, one.call) not in ended and one.drive == self.drives - 1]
        named = ", ".join(f"{one.tool} (call {one.call})" for one in open_calls)
        return f"{named} did not return" if named else "it did not end"

    def ran(self) -> list[Ran]:
        """What the notes say."""
        return Notes.read(self.folder)

    def _drives_by_call(self) -> dict[tuple[str, str], set[int]]:
        """In which drives the function of each call began, by tool and call."""
        drives: dict[tuple[str, str], set[int]] = {}
        for one in self.ran():
            if one.moment == "began":
                drives.setdefault((one.tool, one.call), set()).add(one.drive)
        return drives

    def repeated(self) -> str | None:
        """The tool whose function ran again; None where that is not the cut's own and not the only one."""
        again = {tool for (tool, _), drives in self._drives_by_call().items() if len(drives) > 1}
        mine = None if self._cut is None else self._cut.tool
        return mine if mine in again else _only(again)

    def forgotten(self) -> str | None:
        """The tool that had done something before the kill and did not do it again; None where more than one had."""
        effects = {tool.descriptor.name: tool.descriptor.effect for tool in self._test.subject.agent.tools}
        kept = {
            tool
            for (tool, _), drives in self._drives_by_call().items()
            if drives == {0} and effects.get(tool) is not Effect.READ
        }
        return _only(kept)


def _advice(what: str, effect: Effect) -> str:
    if what == "doubled" and effect is Effect.READ:
        return 'it changes something, so it is no read: declare effect="idempotent" or effect="write"'
    if what == "doubled":
        return 'the key is not honoured: hand call.idempotency_key to what it calls, or declare effect="write"'
    if what == "lost":
        return "what it changes must outlive its process before it returns"
    return 'if what it calls can honour a key, declare effect="idempotent" and hand call.idempotency_key on'


def _end(drove: Drove) -> tuple[object, ...]:
    return drove.status, drove.reason, drove.answer, drove.output


def _lifted(limits: Limits) -> Limits:
    """Without what a repeat counts against: what is used is judged afterwards, and the turns are fixed."""
    return msgspec.structs.replace(limits, **dict.fromkeys((*LIMIT_NAMES, "deadline_seconds")))


def _suspects(sets: Sequence[frozenset[str]]) -> frozenset[str]:
    return (frozenset.intersection(*sets) or frozenset.union(*sets)) if sets else frozenset()


def _only(names: set[str]) -> str | None:
    return next(iter(names)) if len(names) == 1 else None


def _changes(before: Counter[bytes], after: Counter[bytes]) -> Counter[bytes]:
    """What came, counted up, and what went, counted down."""
    changes = Counter(after)
    changes.subtract(before)
    return Counter({effect: count for effect, count in changes.items() if count})


def _took_ms(ran: Sequence[Ran]) -> dict[str, float]:
    """How long each function took, by call."""
    began = {one.call: one.at_ns for one in ran if one.moment == "began"}
    return {one.call: (one.at_ns - began[one.call]) / 1e6 for one in ran if one.moment != "began"}


def _shown(effects: Counter[bytes]) -> str:
    first, times = next(iter(sorted(effects.items())))
    text = first.decode("utf-8", "replace")
    return f"{text[:200]}{f' ({times} times)' * (times > 1)}{f' and {len(effects) - 1} more' * (len(effects) > 1)}"
