"""The report: the sections of the workloads, then one table of all targets with their verdicts."""

from collections.abc import Sequence
from typing import Any

from bench import startup, w1, w2, w3
from bench.peers import contest
from bench.targets import Target

SECTIONS = {"w1": w1, "w2": w2, "w3": w3, "startup": startup, "peers": contest}
"""Each judges and shows what it measured."""


def targets(report: dict[str, Any]) -> list[Target]:
    """Those of every workload that was measured."""
    return [target for name, section in SECTIONS.items() if name in report for target in section.targets(report[name])]


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    before, after = report["load_average"]
    where = f"Python {report['python']}, {report['cpus']} CPUs, {report['file_system']}, median of {report['rounds']}"
    lines = [f"{where}; load average {before:.2f} before, {after:.2f} after"]
    for name, section in SECTIONS.items():
        if name in report:
            lines += ["", *section.table(report[name])]
    return "\n".join([*lines, "", *_judged(report["targets"])])


def _judged(targets: Sequence[dict[str, Any]]) -> list[str]:
    lines = [f"{'target':<22} {'measured':>17} {'wanted':>15}"]
    for target in targets:
        measured = "-" if target["value"] is None else f"{target['value']:.2f} {target['unit']}".strip()
        wanted = f"{target['side']} {target['bound']:.4g}"
        line = f"{target['name']:<22} {measured:>17} {wanted:>15}  {target['verdict']:<12} {target['note']}"
        lines.append(line.rstrip())
    return lines
