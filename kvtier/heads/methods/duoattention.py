"""Import published DuoAttention patterns: one trained gate value per layer and KV head.

    full_attention_heads.tsv     rows = layers, tab-separated columns = KV heads, 1 = full attention
    config.json                  beside it: sink_size, recent_size it was trained with

Nothing is learnt here, and the profile is measured like every other.  DuoAttention prunes a share
("sparsity") of the heads or thresholds their gates; `--share` is one minus that sparsity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.errors import HeadProfileError, HeadProfileMismatchError, UsageError
from kvtier.heads.methods.base import HeadMethod, HeadScores, MethodOption, Target
from kvtier.heads.profile import Head, Matrix, ModelShape
from kvtier.heads.progress import Progress, no_progress
from kvtier.reading import read_json, read_text

if TYPE_CHECKING:
    from kvtier.heads.probes.context import ProbeBatch

GATES_FILE, CONFIG_FILE = "full_attention_heads.tsv", "config.json"


@dataclass(frozen=True)
class Pattern:
    """A pattern file's gates `[layers][kv_heads]` in [0, 1] and what it was trained with.

    sink_tokens, recent_tokens:  None where no config.json says so
    """

    gates: Matrix
    sink_tokens: int | None = None
    recent_tokens: int | None = None


def read_pattern(path: Path) -> Pattern:
    """Read a TSV of gates, or the published directory of one.

    Raises HeadProfileError naming file, line and column of what is malformed.
    """
    file = path / GATES_FILE if path.is_dir() else path
    try:
        lines = read_text(file, "--pattern").splitlines()
    except UsageError as error:
        raise HeadProfileError(str(error)) from error
    rows = {n: _gates(file, n, line) for n, line in enumerate(lines, start=1) if line.strip()}
    if not rows:
        raise HeadProfileError(f"--pattern: {file}: expected one line per layer, got none")
    width = len(next(iter(rows.values())))
    for number, row in rows.items():
        if len(row) != width:
            raise HeadProfileError(
                f"--pattern: {file}: line {number}, column {min(len(row), width) + 1}: "
                f"expected {width} values as in the lines before, got {len(row)}"
            )
    return Pattern(tuple(rows.values()), *_trained_with(file.parent / CONFIG_FILE))


def _gates(file: Path, number: int, line: str) -> tuple[float, ...]:
    """One line's values, clipped to [0, 1] as DuoAttention does."""
    values = []
    for column, text in enumerate(line.rstrip("\r\n").split("\t"), start=1):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise HeadProfileError(
                f"--pattern: {file}: line {number}, column {column}: "
                f"expected a finite number, got {text!r}"
            )
        values.append(min(1.0, max(0.0, value)))
    return tuple(values)


def _trained_with(file: Path) -> tuple[int | None, int | None]:
    """sink_size and recent_size, or None each where there is no such file."""
    if not file.is_file():
        return None, None
    try:
        document = read_json(file, "--pattern")
    except UsageError as error:
        raise HeadProfileError(str(error)) from error
    try:
        return int(document["sink_size"]), int(document["recent_size"])
    except (ValueError, KeyError, TypeError) as error:
        raise HeadProfileError(
            f"--pattern: {file}: expected sink_size and recent_size, got {error!r}"
        ) from error


class ImportedPattern(HeadMethod):
    """The heads whose gates are open.

    pattern:    file or directory, see `read_pattern`
    threshold:  least gate of a head that keeps the context, when no share is asked for
    """

    name = "import"
    data_free = True
    has_own_rule = True
    options = (
        MethodOption(
            "pattern", Path, "FILE",
            "DuoAttention's gates, a TSV or the directory of one; by --share, or gates of at least "
            "0.5",
        ),
    )  # fmt: skip

    def __init__(self, pattern: Path | None = None, threshold: float = 0.5) -> None:
        if not 0 <= threshold <= 1:
            raise UsageError("threshold", "a number in [0, 1]", threshold)
        self.pattern = pattern
        self.threshold = threshold

    def check_target(self, target: Target) -> None:
        """There has to be a well-formed file."""
        self._read()

    def check_shape(self, shape: ModelShape) -> None:
        """Raise HeadProfileMismatchError unless the file has a gate for every KV head."""
        gates = self._read().gates
        if (len(gates), len(gates[0])) != (shape.num_layers, shape.num_kv_heads):
            raise HeadProfileMismatchError(
                f"--pattern: {self.pattern} has {len(gates)} layers of {len(gates[0])} KV heads, "
                f"the model has {shape.num_layers} of {shape.num_kv_heads}"
            )

    def score(self, batches: Sequence[ProbeBatch], progress: Progress = no_progress) -> HeadScores:
        """The gates themselves."""
        self.check_shape(batches[0].shape)
        return HeadScores(self._read().gates)

    def own_choice(self, scores: HeadScores, shape: ModelShape) -> list[Head]:
        """The heads whose gates are open at least as wide as the threshold."""
        order, gates = self.ranking(scores, shape), scores.mean
        return [(layer, head) for layer, head in order if gates[layer][head] >= self.threshold]

    def found_by(self, scores: HeadScores, shape: ModelShape) -> dict[str, Any]:
        pattern = self._read()
        return {
            "threshold": self.threshold,
            "pattern_sink_tokens": pattern.sink_tokens,
            "pattern_recent_tokens": pattern.recent_tokens,
        }

    def _read(self) -> Pattern:
        if self.pattern is None:
            raise UsageError("--pattern", "a file of DuoAttention gates for --method import", None)
        return read_pattern(self.pattern)
