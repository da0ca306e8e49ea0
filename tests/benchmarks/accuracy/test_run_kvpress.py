"""The parts of the kvpress runner that need no kvpress: it must score and count exactly as kvtier
does."""

from __future__ import annotations

import ast
import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers import run_kvpress as peer
from kvtier.synthetic.recall import DEFAULT_LANGUAGE, NUM_CODES, score_answer

EOT = DEFAULT_LANGUAGE.eot
words = st.integers(0, 11)


@given(st.lists(words.filter(lambda w: w != EOT), min_size=2 + NUM_CODES, max_size=2 + NUM_CODES),
       st.lists(words, max_size=2 + NUM_CODES + 1))  # fmt: skip
def test_the_peer_scores_answers_as_the_bench_does(expected: list[int], got: list[int]) -> None:
    assert peer.score_answer(expected, got, EOT) == score_answer(expected, got).codes


@given(st.lists(words.filter(lambda w: w != EOT), min_size=2 + NUM_CODES, max_size=2 + NUM_CODES))
def test_a_right_answer_scores_one(expected: list[int]) -> None:
    assert peer.score_answer(expected, [*expected, EOT], EOT) == 1.0


@given(st.integers(64, 1 << 17), st.floats(0.01, 1.0))
def test_kvpress_is_given_the_ratio_at_which_it_keeps_the_share(tokens: int, share: float) -> None:
    kept = peer.kept_tokens(share, tokens)
    assert kept == math.ceil(share * tokens - 1e-9)
    # kvpress: n_kept = int(k_len * (1 - compression_ratio))
    assert int(tokens * (1 - peer.compression_ratio(kept, tokens))) == kept


def test_the_runner_imports_nothing_of_kvtier() -> None:
    nodes = list(ast.walk(ast.parse(Path(peer.__file__).read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert "kvpress" in names
    assert not {name.split(".")[0] for name in names} & {"kvtier", "benchmarks"}


def test_requirements_pin_every_package_exactly() -> None:
    lines = Path(peer.__file__).with_name("requirements.txt").read_text().splitlines()
    pins = [line for line in lines if line.strip() and not line.startswith(("#", "-"))]
    assert pins
    assert all("==" in pin for pin in pins)
