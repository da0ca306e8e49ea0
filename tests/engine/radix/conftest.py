from __future__ import annotations

import packed_checks
import pytest
import tree_harness

from kvtier_sglang.radix import edits, index, matching


@pytest.fixture
def small(monkeypatch):
    """Windows for contexts of some hundred tokens, and KV that is of a token whatever is before
    it."""
    for name, tokens in (("CUT_WINDOW", 4), ("WIDE_CUT_WINDOW", 8), ("LEAST_CUT", 6)):
        monkeypatch.setattr(matching, name, tokens)
    for name, tokens in (("WINDOW", 6), ("SAMPLED", 2)):
        monkeypatch.setattr(index, name, tokens)
    monkeypatch.setattr(edits, "LEAST_PART", 16)
    for module in (packed_checks, tree_harness):
        monkeypatch.setattr(module, "digest", lambda tokens: float(tokens[-1]))
