"""The verbs that only look: list, show, history, verify. They take no lease and write nothing."""

import re

from perdure.cli import failure, output, reports, tables
from perdure.errors import PerdureError, UsageError

OK, REFUSED = 0, 4
_HEAD = re.compile("[0-9a-fA-F]{64}")


async def list_runs(store: str, *, as_json: bool) -> int:
    """Prints every run of the store, and in the end what is wrong with those that are damaged."""
    from perdure.engine import Engine

    problems: dict[str, PerdureError] = {}
    async with Engine.open(store, create=False, read_only=True) as engine:
        records = await engine.runs(problems=problems)
    if as_json:
        for record in records:
            output.say_json(record)
    else:
        output.say(tables.runs(records))
    codes = [failure.report(error, as_json=as_json) for error in problems.values()]
    return max(codes, default=OK)


async def show_run(store: str, run_id: str, *, as_json: bool) -> int:
    """Prints how a run ended, or where it stands."""
    from perdure.engine import Engine

    async with Engine.open(store, create=False, read_only=True) as engine:
        record = await engine.show(run_id)
    if as_json:
        output.say_json(record)
    else:
        output.say(tables.run(record))
    return OK


async def replay_run(store: str, run_id: str, *, to_seq: int | None, as_json: bool) -> int:
    """Prints what a run looked like when an event was the last one, by folding what is recorded: nothing is called."""
    from perdure.engine import Engine
    from perdure.journal.fold import fold
    from perdure.journal.render import line, rfc3339, show_record

    async with Engine.open(store, create=False, read_only=True) as engine:
        envelopes = await engine.journal(run_id)
    last = len(envelopes) - 1 if to_seq is None else to_seq
    if not 0 <= last < len(envelopes):
        raise UsageError(
            f"the run has no event {last}", where=f"run {run_id}", next=f"give --to 0 to {len(envelopes) - 1}"
        )
    state, _ = fold(run_id, envelopes[: last + 1])
    at = envelopes[last]
    # Of a moment that others followed: it was driven then, unless it waited.
    driven = last < len(envelopes) - 1 and not state.waiting and state.exceeded is None
    record = show_record(state, held=driven, epoch=state.epoch)
    if as_json:
        output.say_json({"at": {"seq": at.seq, "kind": at.kind, "recorded_at": rfc3339(at.recorded_at)}, **record})
    else:
        whole = len(envelopes)
        place = f"the last of {whole}" if last == whole - 1 else f"of events 0 to {whole - 1}"
        output.say(f"as of event {last}, {place}:\n{output.escaped(line(at))}\n")
        output.say(tables.run(record))
    return OK


async def print_history(store: str, run_id: str, *, as_json: bool) -> int:
    """Prints a run's events, proven to be one unbroken chain."""
    from perdure.engine import Engine
    from perdure.journal.render import history_record, line

    async with Engine.open(store, create=False, read_only=True) as engine:
        envelopes = await engine.journal(run_id)
    for envelope in envelopes:
        if as_json:
            output.say_json(history_record(envelope))
        else:
            output.say(output.escaped(line(envelope)))
    return OK


async def verify_store(store: str, run_id: str | None, *, head: str | None, as_json: bool) -> int:
    """Proves the events of a store, or of one run, and what is derived from them."""
    import msgspec

    from perdure.runs import indexed
    from perdure.stores.url import parse_sqlite_url
    from perdure.stores.verify import verify

    if head is not None and not _HEAD.fullmatch(head):
        raise UsageError(f"{head!r:.80} is no head", where="--head", next="give the 64 hex digits that verify printed")
    path, _ = parse_sqlite_url(store)
    report = await verify(path, fold_problem=indexed, run_id=run_id, head=None if head is None else head.lower())
    if as_json:
        record = msgspec.to_builtins(report)
        del record["torn"]  # the record's fields are agreed upon; this is said on standard error
        output.say_json(record)
    reports.verification(report, as_json=as_json)
    return OK if report.ok else REFUSED
