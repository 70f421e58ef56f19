"""One promise, what was measured, and whether it was kept."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Target:
    """A bound on one figure."""

    name: str
    value: float | None
    """None: not measured here."""
    bound: float
    unit: str = ""
    note: str = ""
    side: Literal["at most", "at least"] = "at most"

    @property
    def verdict(self) -> str:
        """`ok`, `miss` or `not measured`."""
        if self.value is None:
            return "not measured"
        kept = self.value <= self.bound if self.side == "at most" else self.value >= self.bound
        return "ok" if kept else "miss"

    def shown(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "name": self.name,
            "value": self.value,
            "side": self.side,
            "bound": self.bound,
            "unit": self.unit,
            "verdict": self.verdict,
            "note": self.note,
        }
