"""Records as tables and sections for a person."""

import io
import shutil
import sys
from collections.abc import Iterable, Sequence

from perdure.cli.output import counted, escaped, escaped_lines, json_text
from perdure.cli.reports import waits_for
from perdure.contracts.contract import JsonObject

_STYLES = {"completed": "green", "failed": "red", "parked": "yellow", "running": "cyan"}


def runs(records: Iterable[JsonObject]) -> str:
    """The records of `list`, a line a run."""
    rows = [
        (
            one["run_id"],
            one["agent"],
            one["status"],
            one["terminal_reason"] or one["park"] or "",
            str(one["events"]),
            _second(one["started_at"]),
            _second(one["updated_at"]),
        )
        for one in records
    ]
    return _table(("RUN", "AGENT", "STATUS", "REASON", "EVENTS", "STARTED", "UPDATED"), rows) if rows else "no runs"


def run(record: JsonObject) -> str:
    """The record of `show` in sections; those that hold nothing are left out."""
    sections = [_head(record), _park(record), _calls(record), _answer(record), _degradations(record), _limits(record)]
    return "\n\n".join(section for section in sections if section)


def crash_test(report: JsonObject) -> str:
    """A crash test's report: a line a tool, then what each line rests on, then the verdict."""
    counts = ("cuts", "doubled", "lost", "blocked", "unclear")
    rows = [(tool["tool"], tool["effect"], *(str(tool[name]) for name in counts)) for tool in report["tools"]]
    lines = [_table(("TOOL", "EFFECT", *(name.upper() for name in counts)), rows)] if rows else []
    for tool in report["tools"]:
        if tool["smallest"]:
            lines.append(escaped(f"{tool['tool']}: {tool['smallest']}"))
            lines += [escaped(f"  {tool['detail']}"), escaped(f"  next: {tool['next']}")]
    if report["otherwise"]:
        cuts = counted(report["ended_otherwise"], "cut")
        lines.append(escaped(f"{cuts} ended otherwise; first: {report['otherwise']}"))
    for limit, cuts in report["past_limits"].items():
        at = f"at {counted(cuts, 'cut')} the run used more than {limit} allows"
        lines.append(f"{at}: a repeat counts, and without more room it would have stopped there")
    if report["left_behind"]:
        by = f" by {', '.join(report['left_by'])}" if report["left_by"] else ""
        lines.append(escaped(f"processes left behind{by}, and ended: {report['left_behind']}"))
    lines += [escaped(f"{tool}: no call of it succeeded undisturbed: {why}") for tool, why in report["failed"].items()]
    run = ", ".join(counted(report[f"{thing}s"], thing) for thing in ("event", "turn", "effect"))
    verdict = "NOT SAFE" if not report["ok"] else "clean" if report["seen"] else "clean as far as could be seen"
    lines.append(f"{counted(report['cuts'], 'cut')} of a run of {run}, in {report['seconds']:.0f} s: {verdict}")
    if not report["effects"]:
        lines.append(
            "no effect was seen: if the tools change something, say what with --world; "
            "if they need files to work on, give them with --files"
        )
    return "\n".join(lines)


def _head(record: JsonObject) -> str:
    from perdure.journal.render import resume_command

    agent, lease = record["agent"], record["lease"]
    ended = f" ({record['outcome']}, {record['terminal_reason']}, {record['assurance']})" if record["outcome"] else ""
    rows = [
        ("run", record["run_id"]),
        ("status", record["status"] + ended),
        ("agent", f"{agent['name']}  {agent['ref'] or 'no reference recorded'}"),
        ("model", record["model"]),
        ("labels", ", ".join(f"{key}={value}" for key, value in record["labels"].items())),
        ("started", _second(record["started_at"])),
        ("updated", _second(record["updated_at"])),
        ("events", f"{record['events']} in {counted(record['drives'], 'drive')}"),
        ("lease", f"epoch {lease['epoch']}, {'held' if lease['held'] else 'free'}"),
        ("used", _usage(record["usage"])),
        ("next", resume_command(record["run_id"], agent["ref"]) if record["status"] == "idle" else ""),
    ]
    return _pairs([(name, value) for name, value in rows if value])


def _usage(usage: JsonObject) -> str:
    def known(value: int | None) -> str:
        return "unknown" if value is None else str(value)

    cost = usage["cost_microunits"]
    money = "cost unknown" if cost is None else f"cost {cost / 1_000_000:.6f} {usage['currency'] or ''}".rstrip()
    tokens = f"{known(usage['input_tokens'])} + {known(usage['output_tokens'])} tokens (in + out)"
    turns = f"{counted(usage['model_turns'], 'model turn')}, {counted(usage['tool_calls'], 'tool call')}"
    return f"{turns}, {tokens}{' (estimated)' if usage['estimated'] else ''}, {money}, {usage['active_ms']} ms active"


def _park(record: JsonObject) -> str:
    park = record["park"]
    if park is None:
        return ""
    rows = [
        ("parked", f"{park['kind']} since {_second(park['since'])}"),
        ("waits for", waits_for(park["kind"], park["call"], park["detail"])),
        ("next", park["next"]),
    ]
    return _pairs(rows)


def _calls(record: JsonObject) -> str:
    # Of a run that has ended nothing is open any more; its answer names what may have happened.
    if record["terminal_reason"] is not None:
        return ""
    doubts = [f"  {one['call']} {one['tool']} {json_text(one['arguments'])}" for one in record["doubts"]]
    calls = [
        f"  {one['call']} {one['tool'] or 'model'}, attempt {one['attempt']}, since {_second(one['since'])}"
        for one in record["open_calls"]
    ]
    lines = (["in doubt:", *doubts] if doubts else []) + (["open calls:", *calls] if calls else [])
    return "\n".join(map(escaped, lines))


def _answer(record: JsonObject) -> str:
    return "" if record["answer"] is None else f"answer:\n{escaped_lines(record['answer'])}"


def _degradations(record: JsonObject) -> str:
    lines = [escaped(f"  {one['code']}: {one['summary']}") for one in record["degradations"]]
    return "\n".join(["degraded:", *lines]) if lines else ""


def _limits(record: JsonObject) -> str:
    rows = [
        (name, "unknown" if one["used"] is None else str(one["used"]), str(one["limit"]))
        for name, one in record["limits"].items()
    ]
    return _table(("LIMIT", "USED", "OF"), rows) if rows else ""


def _second(instant: str) -> str:
    """An instant of RFC 3339, to the second."""
    return f"{instant[:10]} {instant[11:19]}Z"


def _pairs(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {escaped(value)}" for name, value in rows)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    safe = [[escaped(cell) for cell in row] for row in rows]
    window = sys.stdout is not None and sys.stdout.isatty()  # None: closed before we began
    return _for_a_window(titles, safe) if window else _for_a_pipe([titles, *safe])


def _for_a_pipe(rows: Sequence[Sequence[str]]) -> str:
    """A line a row, however wide: nothing is folded and nothing is coloured."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _for_a_window(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Folded to the window's width, with colours where the terminal has them."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    text = io.StringIO()
    Console(file=text, force_terminal=True, width=shutil.get_terminal_size().columns, highlight=False).print(table)
    return text.getvalue().rstrip("\n")
