"""Packed spans in a tree of tests: a scorer under which heads compete, and what spans must hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from tree_requests import digest

from kvtier.heads.profile import ModelShape
from kvtier.retention.scorers import Span, TokenScorer
from kvtier_sglang.pool.kv_pool import HeadPagedKVPool
from kvtier_sglang.radix.node import KvNode

SHAPE = ModelShape(num_layers=2, num_kv_heads=3, num_attention_heads=6, head_dim=2)


# A digest is multiplied by the unit where entries are coded, because scales are of 16 bits. A
# number which has been coded several times may then be off by so much.
CODED_UNIT, CODED_OFF = 0.01, 100.0


@dataclass(frozen=True)
class AnyOrder(TokenScorer):
    """Heads want different tokens, and different numbers of them."""

    name: ClassVar[str] = "any-order"
    comparable: ClassVar[bool] = True

    def score(self, span: Span) -> torch.Tensor:
        factors = torch.arange(2, 2 + span.keys.shape[0]) + 3 * span.layer
        return span.keys[..., 0] * factors[:, None] % 97 * factors[:, None]


def check_packed(
    pool: HeadPagedKVPool, row: torch.Tensor, tokens: list[int], node: KvNode, means: list[int]
) -> None:
    """Ordinary entries hold the digest of their own prefix, packed ones that of a token of their
    span, each once; columns of `means` hold one entry of it with the votes of all."""
    packed = pool.packed
    unit = 1.0 if packed is None or packed.coded is None else CODED_UNIT
    expected = unit * torch.tensor([digest(tokens[: p + 1]) for p in range(len(row))])
    in_row = () if packed is None else packed.in_row(row)
    spans = {int(span.slots[0]): span for span in in_row}
    moved = torch.zeros(len(row), dtype=torch.bool)
    for one in node.path():
        part = slice(one.start + one.dropped.begin, one.start + one.dropped.end)
        span = spans.pop(int(row[part][0]), None) if one.dropped.num_tokens else None
        # A memory stands for a node that holds nothing.
        moved[part] = span is not None or not one.num_slots
        if span is None:
            continue
        if span.coded is not None:
            keys, values = pool.packed.decoded(span)
            for found in (keys[:, 0], values[:, 0]):
                of_token = expected[part][span.tokens.long()]
                torch.testing.assert_close(found, of_token, atol=CODED_OFF, rtol=0)
            continue
        place, votes = span.cells, pool.packed.log_votes
        for column, (begin, count) in enumerate(zip(span.indptr, span.counts, strict=False)):
            cells = place[begin : begin + count]
            kept = pool.packed.cells.k[cells, 0]
            if column in means:
                assert count == 1, "a column of one mean"
                torch.testing.assert_close(kept, expected[part].mean()[None])
                torch.testing.assert_close(
                    votes[cells].exp().mean(), torch.tensor(1.0 * len(expected[part]))
                )
                continue
            held, there = ((kept[:, None] == some).sum(1) for some in (kept, expected[part]))
            assert bool((there > 0).all()), "an entry of another context"
            # Digests of two tokens may be equal.
            assert bool((held <= there).all()), "one token kept twice"
            assert votes is None or not votes[cells].any(), "a vote of a token"
    assert not spans, "a packed span that no node has"
    for layer in pool.kv:
        found = layer.k[row, :, 0]
        assert torch.equal(found[~moved], expected[~moved, None].expand(-1, found.shape[1]))
