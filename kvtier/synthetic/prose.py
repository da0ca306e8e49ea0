"""English prose that every Python has: its language reference, then its library's docstrings.

The text is that of the Python that runs, so sessions are equal between runs of one version only.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import numpy as np

from kvtier.synthetic.standard_library import half_of, modules

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


__all__ = ["document", "paragraphs", "sentences", "sentences_of"]
