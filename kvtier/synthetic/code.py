"""Functions that every Python has: those of its standard library's modules, as they stand there.

The source is that of the Python that runs, so texts are equal between runs of one version only.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np

from kvtier.synthetic.standard_library import Module, half_of, modules

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
    return half_of(rng, library_functions(), half)


@cache
def library_functions() -> tuple[Function, ...]:
    """Short functions of modules outside of packages, read without importing them; those whose name
    there is once."""
    found = [function for module in modules() for function in _functions_of(module)]
    named = Counter(function.name for function in found)
    return tuple(function for function in found if named[function.name] == 1)


def _functions_of(module: Module) -> Iterator[Function]:
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            source = ast.get_source_segment(module.source, node)
            if source is not None and source.count("\n") < MAX_LINES:
                yield Function(node.name, ast.unparse(node.args), source)


__all__ = ["Function", "functions"]
