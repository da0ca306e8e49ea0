"""Functions that every Python has: those of its standard library's modules, as they stand there.

The source is that of the Python that runs, so texts are equal between runs of one version only.
"""

from __future__ import annotations

import ast
import os
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np

# Longer ones would fill a context alone.
MAX_LINES = 25


class Function(NamedTuple):
    """A function: its name, the text between its parentheses, and its whole source."""

    name: str
    parameters: str
    source: str


def functions(rng: np.random.Generator, half: int) -> Iterator[Function]:
    """Functions in the order of the files, from a random place on, without end.

    half: 0 or 1, of all functions; the halves share none
    """
    found = library_functions()
    middle = len(found) // 2
    part = found[half * middle : (half + 1) * middle]
    start = int(rng.integers(len(part)))
    return cycle((*part[start:], *part[:start]))


@cache
def library_functions() -> tuple[Function, ...]:
    """Short functions of modules outside of packages, read without importing them; those whose name
    there is once."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    found = [function for file in files for function in _functions_of(file)]
    named = Counter(function.name for function in found)
    return tuple(function for function in found if named[function.name] == 1)


def _functions_of(file: Path) -> Iterator[Function]:
    try:
        text = file.read_bytes().decode()
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError):
        return
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            source = ast.get_source_segment(text, node)
            if source is not None and source.count("\n") < MAX_LINES:
                yield Function(node.name, ast.unparse(node.args), source)


__all__ = ["Function", "functions"]
