"""The verbs that settle what a run waits for: answer, resolve, limit, cancel, abandon.

They record and return; only with `--resume` do they drive on.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from perdure.cli import driving, output, reports
from perdure.cli.arguments import json_value, pairs
from perdure.contracts.contract import JsonValue
from perdure.errors import ConfigurationError, UsageError

if TYPE_CHECKING:
    from perdure.engine import Engine

Verdict = Literal["happened", "did_not_happen", "failed"]


@dataclass(frozen=True)
class Settling:
    """What every settling verb is told."""

    store: str
    run_id: str
    by: str | None
    resume: bool
    as_json: bool
    verbose: bool

    async def record(self, settle: "Callable[[Engine], Awaitable[None]]", said: str) -> int:
        """Records, then says so or drives on. Returns the exit code."""
        from perdure.engine import Engine

        async with Engine.open(self.store, create=False) as engine:
            if self.resume:
                # What is recorded cannot be taken back, so a resume that would be refused is found first.
                await self._must_be_resumable(engine)
            await settle(engine)
            shown = None if self.resume else await engine.show(self.run_id)
        if shown is None:
            return await driving.resume_run(
                self.store, self.run_id, ref=None, model=None, as_json=self.as_json, verbose=self.verbose
            )
        if self.as_json:
            output.say_json(shown)
        else:
            reports.settled(shown, said)
        return 0

    async def _must_be_resumable(self, engine: "Engine") -> None:
        try:
            await engine.must_be_resumable(self.run_id)
        except ConfigurationError as error:  # this verb takes neither an agent nor a model
            raise type(error)(error.found, where=error.where, next=f"leave out --resume; then {error.next}") from error


async def answer(what: Settling, id: str, text: str, key: str | None) -> int:
    """Records the answer a run waits for."""
    value = json_value(text, "the answer")
    return await what.record(
        lambda engine: engine.answer(what.run_id, id, value, by=what.by, key=key), f"the answer at {id} is recorded"
    )


async def resolve(what: Settling, call: str, happened: str | None, did_not_happen: bool, failed: str | None) -> int:
    """Records what became of a write in doubt."""
    verdict, result = _verdict(happened, did_not_happen, failed)
    return await what.record(
        lambda engine: engine.resolve(what.run_id, call, verdict, result=result, text=failed, by=what.by),
        f"what became of {call} is recorded",
    )


def _verdict(happened: str | None, did_not_happen: bool, failed: str | None) -> tuple[Verdict, JsonValue]:
    if sum((happened is not None, did_not_happen, failed is not None)) != 1:
        raise UsageError(
            "exactly one verdict is needed",
            where="perdure resolve",
            next="give one of --happened JSON, --did-not-happen, --failed TEXT",
        )
    if happened is not None:
        return "happened", json_value(happened, "--happened")
    return ("did_not_happen" if did_not_happen else "failed"), None


async def limit(what: Settling, changes: list[str]) -> int:
    """Records new totals for limits."""
    totals = pairs(changes, "NAME=TOTAL")
    _must_be_limits(totals)
    return await what.record(
        lambda engine: engine.limit(what.run_id, by=what.by, **totals), f"recorded: {', '.join(changes)}"
    )


def _must_be_limits(totals: dict[str, str]) -> None:
    """Names that are no limits never reach the engine, which takes them as keywords."""
    from perdure.contracts.limits import LIMIT_NAMES
    from perdure.named import nearest

    known = (*LIMIT_NAMES, "deadline_seconds")
    for name in totals:
        if name not in known:
            next_step = f"{nearest(name, known)} One of: {', '.join(known)}".strip()
            raise UsageError(f"unknown limit {name!r:.80}", where="perdure limit", next=next_step)


async def cancel(what: Settling, reason: str | None) -> int:
    """Ends a run as cancelled."""
    return await what.record(lambda engine: engine.cancel(what.run_id, reason, by=what.by), "cancelled")


async def abandon(what: Settling) -> int:
    """Gives a run up."""
    return await what.record(lambda engine: engine.abandon(what.run_id, by=what.by), "abandoned")
