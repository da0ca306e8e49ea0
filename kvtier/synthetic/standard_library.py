"""The standard library of the Python that runs, as text: prose and functions, in halves.

The prose is the language reference, then the docstrings of the library. Texts are equal between
runs of one version of Python only.
"""

from __future__ import annotations

import ast
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
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


# Headings are shorter, and tables and code listings in one paragraph are longer.
MIN_CHARS, MAX_CHARS = 80, 700
_NOT_PROSE = re.compile(r"::=|\*\*|>>>|[|{}<>=\\\[\]]")
_SENTENCE_END = re.compile(r"(?<=[.!?]) ")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def paragraphs(rng: np.random.Generator) -> Iterator[str]:
    """Paragraphs without end: each of the reference once, then each of the docstrings, and again,
    in an order that `rng` decides."""
    while True:
        for source in (reference_paragraphs, docstring_paragraphs):
            found = source()
            for index in rng.permutation(len(found)).tolist():
                yield found[index]


def document(rng: np.random.Generator, half: int) -> Iterator[str]:
    """Paragraphs in the order in which they were written, from a random place on, without end.

    half: 0 or 1, of all texts; the halves share no paragraph
    """
    return half_of(rng, (*reference_paragraphs(), *docstring_paragraphs()), half)


def sentences(found: Iterator[str]) -> Iterator[str]:
    """Their sentences, each with what stands in front of it: a space, or a paragraph's break."""
    for paragraph in found:
        for index, sentence in enumerate(sentences_of(paragraph)):
            yield f" {sentence}" if index else f"\n\n{sentence}"


def sentences_of(paragraph: str) -> list[str]:
    """Return the paragraph's sentences, without the spaces between them."""
    return _SENTENCE_END.split(paragraph)


@cache
def reference_paragraphs() -> tuple[str, ...]:
    """Return the paragraphs of `pydoc_data.topics`; none where a distribution left that module
    out."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return ()
    return _prose_of(topics[name] for name in sorted(topics))


@cache
def docstring_paragraphs() -> tuple[str, ...]:
    """Return the paragraphs of the docstrings of the standard library's modules outside of
    packages, read without importing them."""
    return _prose_of(text for module in modules() for text in _docstrings(module.tree))


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED):
            yield ast.get_docstring(node) or ""


def _prose_of(texts: Iterator[str]) -> tuple[str, ...]:
    """Different paragraphs that read as sentences, in one line each."""
    lines = (" ".join(part.split()) for text in texts for part in re.split(r"\n\s*\n", text))
    return tuple(dict.fromkeys(line for line in lines if _is_prose(line)))


def _is_prose(line: str) -> bool:
    return (
        MIN_CHARS <= len(line) <= MAX_CHARS
        and line[0].isupper()
        and line.endswith(".")
        and _NOT_PROSE.search(line) is None
    )


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
