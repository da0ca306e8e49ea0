"""JSON that users write or bring, read in one way: every command says the same of the same fault.

    {"timestamp": 5, "input_length": 6e999, …
                     └ trace.jsonl, line 1: expected a number that a float holds, got '6e999'

What is refused, by file and line: bytes that are not UTF-8, a text that is cut off or otherwise no
JSON object, nesting that a parser cannot follow, numbers that overflow, and NaN and infinities,
which JSON does not have. A byte-order mark, which some editors write, is none of the text. A file
whose name ends with .gz is decompressed.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvtier.errors import KvtierError, UsageError

# Real files are five levels deep. Parsers end with an error that is not their own at a thousand.
MAX_NESTING = 32
# A whole number of no more fits a float, too; Python itself reads thousands of digits.
MAX_DIGITS = 300
_SHOWN_CHARACTERS = 60

# Makes an error of an argument, what was expected and what came: a UsageError, most of the time.
Refusal = Callable[[str, str, object], KvtierError]

# A string is one token, so that brackets inside of it do not count. One that never ends matches as
# far as it goes: what follows it is no structure.
_STRING = r'"(?:[^"\\]|\\.)*+(?:"|$)'
_TOKENS = re.compile(_STRING.encode() + rb"|[\[\]{}]", re.DOTALL)


class _BadNumberError(ValueError):
    """expected: instead of the number that is written as `text`."""

    def __init__(self, expected: str, text: str) -> None:
        self.expected = expected
        self.text = text
        super().__init__(expected, text)


def first_problem(error: ValidationError, whole: str) -> str:
    """Say what is wrong first, by the field at fault; whole: names what has the fields."""
    first = error.errors(include_input=False, include_url=False)[0]
    where = ".".join(map(str, first["loc"])) or whole
    return f"{where}: {first['msg']}"


def read_json(
    file: Path, argument: str, refuse: Refusal = UsageError, *, finite: bool = True
) -> dict[str, Any]:
    """A file that is one JSON object.

    argument: what named the file, blamed where it cannot be read at all
    refuse:   makes the error for that, and for everything that is wrong with its text
    finite:   whether NaN and Infinity are refused, which some models' files have
    """
    return parse_json(_bytes(file, argument, refuse), str(file), refuse, finite=finite)


def read_json_lines(
    file: Path, argument: str, refuse: Refusal = UsageError
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file that has one a line, each with where it stands: file and line. Empty
    lines are none. Arguments as those of `read_json`."""
    # This does not use splitlines(): texts in JSON may hold other ends of lines than \n.
    for number, line in enumerate(read_text(file, argument, refuse).split("\n"), start=1):
        if line.strip():
            yield f"{file}, line {number}", _object(line, str(file), number, refuse, True)


def read_text(file: Path, argument: str, refuse: Refusal = UsageError) -> str:
    """A file's text, without its byte-order mark. Arguments as those of `read_json`."""
    return _decoded(_bytes(file, argument, refuse), str(file), refuse)


def parse_json(
    raw: bytes, where: str, refuse: Refusal = UsageError, *, finite: bool = True
) -> dict[str, Any]:
    """The JSON object that bytes hold. where: what they are; otherwise as `read_json`."""
    return _object(_decoded(raw, where, refuse), where, 1, refuse, finite)


def is_too_deep(text: bytes) -> bool:
    """Return whether JSON is nested deeper than MAX_NESTING, told without parsing it."""
    depth = 0
    for token in _TOKENS.finditer(text):
        mark = text[token.start()]
        if mark in b"[{":
            depth += 1
        elif mark in b"]}":
            depth -= 1
        if depth > MAX_NESTING:
            return True
    return False


def _bytes(file: Path, argument: str, refuse: Refusal) -> bytes:
    try:
        raw = file.read_bytes()
        return gzip.decompress(raw) if file.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        fault = getattr(error, "strerror", None) or error
        raise refuse(argument, "a readable file", f"{file}: {fault}") from error


def _decoded(raw: bytes, where: str, refuse: Refusal) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + error.object.count(b"\n", 0, error.start)
        wrong = error.object[error.start : error.end]
        raise refuse(f"{where}, line {line}", "UTF-8 text", wrong) from error


def _object(
    text: str, where: str, first_line: int, refuse: Refusal, finite: bool
) -> dict[str, Any]:
    """The object that a text holds, which begins on a line of something."""

    def wrong(at: int, expected: str, got: str) -> KvtierError:
        line = first_line + text.count("\n", 0, at)
        return refuse(f"{where}, line {line}", expected, _short(got))

    if is_too_deep(text.encode()):
        raise wrong(0, f"JSON that is nested no deeper than {MAX_NESTING} levels", text.strip())
    try:
        found = json.loads(
            text,
            parse_int=_whole,
            parse_float=_float,
            parse_constant=_no_constant if finite else None,
        )
    except json.JSONDecodeError as error:
        ends = error.msg.startswith("Unterminated") or not text[error.pos :].strip()
        fault = "is cut off" if ends and text.strip() else f"{error.msg}: column {error.colno}"
        begin = text.rfind("\n", 0, error.pos) + 1
        line = text[begin:].partition("\n")[0]
        raise wrong(error.pos, f"a JSON object ({fault})", line) from error
    except _BadNumberError as error:
        raise wrong(_find(text, error.text), error.expected, error.text) from error
    if not isinstance(found, dict):
        raise wrong(0, "a JSON object", text.strip())
    return found


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise _BadNumberError(f"a number of at most {MAX_DIGITS} digits", text)
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _BadNumberError("a number that a float holds", text)
    return value


def _no_constant(text: str) -> float:
    raise _BadNumberError("a finite number", text)


def _find(text: str, literal: str) -> int:
    """Return the position where a literal stands for the first time outside of all strings."""
    tokens = re.finditer(f"{_STRING}|{re.escape(literal)}", text, re.DOTALL)
    return next(token.start() for token in tokens if not token[0].startswith('"'))


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
