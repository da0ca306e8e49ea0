"""Numbers as people write them on a command line; token counts as 4096, 4k, 128k, 1m (k = 1024,
m = 1024 * 1024)."""

from __future__ import annotations

import math
import re

from kvtier.errors import SizeError, UsageError

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


def parse_count(text: str, argument: str, least: int = 1) -> int:
    """A whole number from `least` on. Raises UsageError naming `argument`."""
    expected = f"a whole number of at least {least}"
    try:
        value = int(text)
    except ValueError as error:
        raise UsageError(argument, expected, text) from error
    if value < least:
        raise UsageError(argument, expected, text)
    return value


def parse_number(text: str, argument: str, *, zero: bool = False, most: float = math.inf) -> float:
    """A finite number above 0, or from 0 on, up to `most`. Raises UsageError naming `argument`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf or (zero and value == 0)) or value > most:
        above = "of at least 0" if zero else "above 0"
        limit = "" if most == math.inf else f", up to {most:g}"
        raise UsageError(argument, f"a number {above}{limit}", text)
    return value


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
