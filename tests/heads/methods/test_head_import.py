"""Importing DuoAttention patterns: their file format, their two rules, and typed refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import HeadProfileError, HeadProfileMismatchError, UsageError
from kvtier.heads.methods import Target
from kvtier.heads.methods.duoattention import ImportedPattern, read_pattern
from kvtier.heads.profile import ModelShape

SHAPE = ModelShape(num_layers=3, num_kv_heads=4, num_attention_heads=8, head_dim=32)
BATCHES: list[Any] = [SimpleNamespace(shape=SHAPE)]
GATES = (
    "9.960937500000000000e-01\t0.000000000000000000e+00\t5.000000000000000000e-01\t4.9e-01\n"
    "1.2\t0.1\t-0.3\t0.2\n"
    "0.3\t0.4\t0.45\t7.9e-02\n"
)


def write(folder: Path, text: str, name: str = "full_attention_heads.tsv") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def select(path: Path, target: Target) -> Any:
    method = ImportedPattern(path)
    method.check_target(target)
    method.check_shape(SHAPE)
    return method.select(method.score(BATCHES), BATCHES, target)


def test_gates_of_at_least_one_half_keep_the_context(tmp_path: Path) -> None:
    selection = select(write(tmp_path, GATES), Target())
    assert selection.ca_heads == ((0, 2), (0,), ())
    assert selection.scores[1] == (1.0, 0.1, 0.0, 0.2), "clipped to [0, 1]"
    assert selection.parameters["pattern_sink_tokens"] is None


def test_a_share_is_one_minus_their_sparsity(tmp_path: Path) -> None:
    file = write(tmp_path, GATES)
    assert select(file, Target(share=0.25)).ca_heads == ((0, 2), (0,), ())
    assert select(file, Target(share=0.5)).ca_heads == ((0, 2, 3), (0,), (1, 2))
    assert select(file, Target(share=1.0)).ca_heads == ((0, 1, 2, 3),) * 3


def test_the_published_directory_says_what_it_was_trained_with(tmp_path: Path) -> None:
    write(tmp_path, GATES)
    write(tmp_path, json.dumps({"sink_size": 64, "recent_size": 256, "lr": 0.02}), "config.json")
    parameters = select(tmp_path, Target()).parameters
    assert (parameters["pattern_sink_tokens"], parameters["pattern_recent_tokens"]) == (64, 256)
    write(tmp_path, '{"sink_size": 64}', "config.json")
    with pytest.raises(HeadProfileError, match=r"config\.json.*recent_size"):
        read_pattern(tmp_path)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("0.1\t0.2\n0.3\tx\n", "line 2, column 2: expected a finite number, got 'x'"),
        ("0.1\tnan\n", "line 1, column 2"),
        ("0.1\tinf\n", "line 1, column 2"),
        ("0.1 0.2\n", "line 1, column 1"),
        ("0.1\t\t0.2\n", "line 1, column 2: expected a finite number, got ''"),
        ("0.1\t0.2\n\n0.3\n", "line 3, column 2: expected 2 values"),
        ("0.1\t0.2\n0.3\t0.1\t0.2\n", "line 2, column 3: expected 2 values"),
        ("\n\n", "expected one line per layer"),
    ],
)
def test_a_malformed_file_is_named_with_line_and_column(
    text: str, where: str, tmp_path: Path
) -> None:
    file = write(tmp_path, text)
    with pytest.raises(HeadProfileError, match=re.escape(where)) as caught:
        ImportedPattern(file).check_target(Target())
    assert str(file) in str(caught.value)


@given(st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=5))
def test_what_is_written_is_read(rows: list[list[float]]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        text = "".join("\t".join(f"{gate:.18e}" for gate in row) + "\n" for row in rows)
        assert read_pattern(write(Path(folder), text)).gates == tuple(map(tuple, rows))


def test_other_shapes_and_missing_files_are_refused(tmp_path: Path) -> None:
    method = ImportedPattern(write(tmp_path, GATES))
    other = SHAPE.model_copy(update={"num_layers": 4})
    with pytest.raises(HeadProfileMismatchError, match=r"3 layers of 4 KV heads.* 4 of 4"):
        method.check_shape(other)
    with pytest.raises(HeadProfileError, match="--pattern: expected a readable file"):
        ImportedPattern(tmp_path / "no.tsv").check_target(Target())
    with pytest.raises(UsageError, match="--pattern"):
        ImportedPattern().check_target(Target())
    with pytest.raises(UsageError, match="threshold"):
        ImportedPattern(threshold=2)
