"""The entries that kvpress's presses keep, read from what they return, by stand-ins for them."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers import kvpress_masks as peer
from benchmarks.peers.kvpress_masks import compression_ratio, kept, kept_tokens, unmasked

KEPT = torch.tensor([[0, 3, 5], [1, 2, 6]])


@given(st.integers(1, 20_000), st.floats(0.01, 1))
def test_a_ratio_keeps_exactly_the_tokens_of_a_share(tokens: int, share: float) -> None:
    wanted = kept_tokens(share, tokens)
    assert share * tokens - 1e-6 <= wanted <= tokens
    assert int(tokens * (1 - compression_ratio(wanted, tokens))) == wanted


def drops(module, hidden, keys, values):
    index = KEPT[None, :, :, None].expand(-1, -1, -1, keys.shape[-1])
    return keys.gather(2, index), values.gather(2, index)


def masks(module, hidden, keys, values):
    seen = torch.zeros(keys.shape[:3], dtype=torch.bool).scatter(2, KEPT[None], True)
    module.masked_key_indices = (~seen).nonzero(as_tuple=True)
    return keys, values


@pytest.mark.parametrize("compress", [drops, masks])
def test_a_mask_says_what_was_kept_whether_the_rest_was_dropped_or_masked(compress) -> None:
    module = SimpleNamespace()
    keys = torch.randn(1, 2, 8, 4, generator=torch.Generator().manual_seed(0))
    found = kept(SimpleNamespace(compress=compress), (module, None, keys, keys))
    assert [list(np.flatnonzero(row)) for row in found] == KEPT.tolist()
    assert module.masked_key_indices is None
    assert unmasked(module, (2, 8)).all()


def test_the_peer_imports_nothing_of_kvtier() -> None:
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
