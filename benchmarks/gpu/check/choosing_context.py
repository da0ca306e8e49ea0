"""One layer of a long context of Llama-3.1-8B's shape, and what choosing does with it.

select      Compactor: window mass, leverage of rotated keys, the best quarter of each head
merge       KeepKV: prediction from 32 queries, the best quarter, the rest merged into it
attend      attention by torch, which all of that is compared with
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.llama import DIM, GROUP, KV_HEADS, SCALE
from kvtier.retention import scorers
from kvtier.retention.keepkv import KeepKV, QueryWindow
from kvtier.retention.scorers import Chunk, Span, TokenScorer
from kvtier.retention.scorers.compactor import Compactor
from kvtier_kernels.merging import assign, exact_entries, merge_bins
from kvtier_kernels.scores import Rotation, leverage_scores, window_mass

KEPT = 0.25
# Keys that are alike: what merging is about. Their cosine is 0.92, above the floor of 0.9.
ALIKE, NOISE = 8, 0.3
# The claim: selection and merging take at most this share of the prefill attention's time.
MOST_CHOOSING = 0.10


@dataclass(frozen=True)
class Context:
    """One layer. q `[tokens, heads, group, dim]`; k, v `[tokens, heads, dim]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rotation: Rotation

    @property
    def tokens(self) -> int:
        return self.k.shape[0]

    @property
    def count(self) -> int:
        """Entries that a head keeps."""
        return int(KEPT * self.tokens)


def make_context(
    seed: int, tokens: int, dtype: torch.dtype, device: str, heads: int = KV_HEADS
) -> Context:
    """heads: KV heads, each with its group of query heads; they are all alike."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    centres = normal(max(1, tokens // ALIKE), heads, DIM)
    which = torch.randint(len(centres), (tokens,), generator=generator, device=device)
    angles = torch.arange(tokens, device=device)[:, None] * torch.logspace(
        0, -4, DIM // 2, device=device
    )
    return Context(
        normal(tokens, heads, GROUP, DIM),
        centres[which] + NOISE * normal(tokens, heads, DIM),
        normal(tokens, heads, DIM),
        Rotation(angles.cos(), angles.sin()),
    )


def select(context: Context, scorer: TokenScorer) -> torch.Tensor:
    """Select as a server does: observe while prefilling, and choose when the turn ends."""
    chunk = Chunk(context.q, context.k, context.v, [0, context.tokens], [0], SCALE)
    span = Span(context.k.transpose(0, 1), scorer.observe(chunk), 0, context.rotation)
    return scorers.select(scorer.score(span), context.count)


def merge(context: Context, rule: KeepKV) -> torch.Tensor:
    """Merge as a refresh does."""
    keys, values = context.k.transpose(0, 1), context.v.transpose(0, 1)
    window = QueryWindow(context.q[-rule.window_queries :], SCALE)
    return rule.retain(keys, values, context.count, window=window).entries.k


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """Attention by torch: q `[tokens, heads, group, dim]` -> `[1, heads * group, tokens, dim]`."""
    queries = q.flatten(1, 2).transpose(0, 1).unsqueeze(0)
    keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=causal, enable_gqa=True
    )


def make_parts(context: Context) -> dict[str, Callable[[], Any]]:
    """Return the parts of selection and merging, by name: where to look when a bar is missed."""
    keys, values = context.k.transpose(0, 1), context.v.transpose(0, 1)
    entries, policy = exact_entries(keys, values), KeepKV()
    bounds, width = [0, context.tokens], Compactor().window_tokens
    window = QueryWindow(context.q[-policy.window_queries :], SCALE)
    logits_of = policy.prediction(entries, window)
    logits = logits_of(keys)
    worth = policy.worth(entries, logits)
    kept = worth.topk(context.count, dim=-1).indices.sort(dim=-1).values
    assignment = assign(keys, kept, floor=policy.floor)
    return {
        "window mass": lambda: window_mass(context.q, context.k, bounds, [0], SCALE, width),
        "leverage": lambda: leverage_scores(keys, context.rotation),
        "top-k": lambda: worth.topk(context.count, dim=-1, sorted=False),
        "prediction": lambda: policy.prediction(entries, window)(keys),
        "assign": lambda: assign(keys, kept, floor=policy.floor),
        "merge": lambda: merge_bins(entries, logits, assignment, logits_of),
    }
