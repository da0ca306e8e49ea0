"""The standard library of the Python that runs, as text: its modules, and halves of it."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

Part = TypeVar("Part")


class Module(NamedTuple):
    """A module outside of packages: its source, parsed and as it stands there."""

    tree: ast.Module
    source: str


def modules() -> Iterator[Module]:
    """Yield the modules by name, read without importing them; one that cannot be read or parsed is
    left out."""
    for file in sorted(Path(os.__file__).parent.glob("*.py")):
        try:
            source = file.read_bytes().decode()
            yield Module(ast.parse(source), source)
        except (OSError, SyntaxError, ValueError):
            continue


def half_of(rng: np.random.Generator, found: Sequence[Part], half: int) -> Iterator[Part]:
    """Half 0 or 1 of `found` in its order, from a random place on, again and again. The halves
    share nothing."""
    middle = len(found) // 2
    part = found[half * middle : (half + 1) * middle]
    start = int(rng.integers(len(part)))
    return cycle((*part[start:], *part[:start]))


__all__ = ["Module", "half_of", "modules"]
