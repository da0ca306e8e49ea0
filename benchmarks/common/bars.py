"""Bars: what has to hold of what was measured, judged and printed alike by every benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bar:
    """One threshold. value: what was measured, a number or a text; wanted: the threshold, empty
    where the name says it."""

    name: str
    value: Any
    met: bool
    wanted: str = ""

    def document(self) -> dict[str, Any]:
        """Return the bar as it stands in the JSON."""
        found = {"bar": self.name, "value": self.value, "met": self.met}
        return found | ({"wanted": self.wanted} if self.wanted else {})

    def __str__(self) -> str:
        verdict = "met" if self.met else "NOT met"
        limit = f" (wanted: {self.wanted})" if self.wanted else ""
        return f"{verdict:7}  {self.name}: {_in_one_line(self.value)}{limit}"


def at_most(name: str, value: float, limit: float) -> Bar:
    """A number that must not be above its limit."""
    return Bar(name, _rounded(value), value <= limit, f"at most {limit:g}")


def at_least(name: str, value: float, limit: float) -> Bar:
    """A number that must not be below its limit."""
    return Bar(name, _rounded(value), value >= limit, f"at least {limit:g}")


def _rounded(value: float) -> float:
    """Round to four significant digits: more are noise, and fewer would hide what is small."""
    return float(f"{value:.4g}")


def _in_one_line(value: Any) -> str:
    """A number, a text, a list or a mapping, as a line of text."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {one}" for name, one in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
