"""Growth curves: how a turn's time, its bytes and the process's memory go with the length of a run.

Two forms of the same figures: text, with bars whose length is the logarithm; and a PNG, when its library can be had.
"""

import json
import subprocess
from collections.abc import Sequence
from math import log10
from pathlib import Path
from typing import Any

from bench.environments import NotInstalledError, environment

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "requirements-curves.txt"
FIGURES = {"ms_per_turn": "ms a turn", "store_bytes_per_turn": "stored bytes a turn", "peak_mb": "peak memory, MB"}
BAR_OF_A_DECADE = 10
"""Characters."""

Series = dict[str, list[dict[str, float]]]
"""By name, the points by ascending length."""


def series_of(report: dict[str, Any]) -> Series:
    """The points of whatever was measured: ours from W1 where that was, else from beside the peers."""
    found: Series = {}
    for one in report.get("peers", {}).get("contestants", []):
        points = [length for length in one.get("lengths", []) if length["not_measured"] is None]
        if points:
            found[one["name"]] = [_point(length) for length in points]
    if "w1" in report:
        found = {"perdure": [_point(row) for row in report["w1"]["sizes"]]} | {
            name: points for name, points in found.items() if name != "perdure"
        }
    return found


def _point(row: dict[str, Any]) -> dict[str, float]:
    return {name: row[name] for name in ("turns", *FIGURES)}


def as_text(series: Series) -> str:
    """A block a figure; equal factors are equal lengths."""
    return "\n\n".join(_block(series, name, title) for name, title in FIGURES.items()) + "\n"


def _block(series: Series, name: str, title: str) -> str:
    least = min(point[name] for points in series.values() for point in points)
    lines = [f"{title} (each {BAR_OF_A_DECADE} characters: ten times)"]
    for one, points in series.items():
        for point in points:
            bar = "#" * (1 + round(BAR_OF_A_DECADE * log10(point[name] / least)))
            lines.append(f"{one:<34} {point['turns']:>7,} {point[name]:>14,.3f} {bar}")
    return "\n".join(lines)


def written(series: Series, out: Path, environments: Path) -> tuple[list[Path], str | None]:
    """The files written, and why there is no PNG among them."""
    text = out / "curves.txt"
    text.write_text(as_text(series), encoding="utf-8")
    picture = out / "curves.png"
    picture.unlink(missing_ok=True)  # one from an earlier run would show other figures than the text beside it
    try:
        _draw(series, picture, environments)
    except NotInstalledError as error:
        return [text], str(error)
    return [text, picture], None


def _draw(series: Series, picture: Path, environments: Path) -> None:
    python = environment(environments / "curves", REQUIREMENTS)
    command: Sequence[str] = [str(python), "-I", str(HERE / "curves_png.py"), str(picture)]
    given = json.dumps({"figures": FIGURES, "series": series})
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotInstalledError(f"could not draw: {done.stderr.strip().splitlines()[-1:]}")
