"""Token counts as people write them: 4096, 4k, 128k, 1m (k = 1024, m = 1024 * 1024)."""

from __future__ import annotations

import re

from kvtier.errors import SizeError

_UNITS = {"": 1, "k": 1024, "m": 1024 * 1024, "g": 1024**3}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)", re.IGNORECASE)


def parse_size(text: str, argument: str = "size") -> int:
    """A positive whole number of tokens or bytes. Raises SizeError naming `argument`."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise SizeError(argument, "a size such as 4096, 32k or 1m", text)
    value = float(match[1]) * _UNITS[match[2].lower()]
    if value < 1 or value != int(value):
        raise SizeError(argument, "a whole number of at least 1", text)
    return int(value)


def format_size(value: int) -> str:
    """The shortest exact spelling of a size: 131072 -> '128k'."""
    for unit in ("g", "m", "k"):
        if value >= _UNITS[unit] and value % _UNITS[unit] == 0:
            return f"{value // _UNITS[unit]}{unit}"
    return str(value)


def format_bytes(value: float) -> str:
    """Bytes for people: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
