"""All questions of a sample side by side in one row, so that they share the context's keys.

    | question answer | question answer | …      a token sees the context and its own question

Each question stands at the positions right behind the context, as if it had been asked alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvtier.heads.samples.questions import Question


class Row(NamedTuple):
    """A sample's questions side by side.

    ids, positions:  int64 `[tokens]`
    asked:           int64 `[scored]`, tokens whose successor is a scored token of an answer
    targets:         int64 `[scored]`, those successors
    sees:            float `[tokens, tokens]`, 0 where a token sees another, else -inf
    spans:           of each question and its answer in the row
    prompts:         tokens of each span that are the question
    """

    ids: Tensor
    positions: Tensor
    asked: Tensor
    targets: Tensor
    sees: Tensor
    spans: tuple[slice, ...]
    prompts: tuple[int, ...]

    def logits(self, model: Any) -> Tensor:
        """Float32 `[scored, vocab]` of the answers' tokens, those before them given; for a model
        whose attention sees the context, see `kvtier.heads.reference.attention.attending`."""
        output = model(
            self.ids[None],
            position_ids=self.positions[None],
            use_cache=False,
            logits_to_keep=self.asked,
        )
        logits: Tensor = output.logits[0].float()
        return logits


def attend_beside(
    q: Tensor, k: Tensor, v: Tensor, held: tuple[Tensor, Tensor, Tensor], sees: Tensor, scale: float
) -> Tensor:
    """q `[1, heads, tokens, dim]` over what is held of the context and the tokens' own keys.

    k, v: `[1, kv_heads, tokens, dim]` of the tokens themselves; sees: added to their logits
    held: keys and values `[kv_heads, n, dim]`, and votes `[heads, n]`, added to the logits
    """
    heads, tokens, group = q.shape[1], q.shape[2], q.shape[1] // k.shape[1]
    # One key head per query head: not every kernel takes grouped ones with a mask.
    keys, values = (
        torch.cat([x[None], own], dim=2).repeat_interleave(group, dim=1)
        for x, own in zip(held[:2], (k, v), strict=True)
    )
    votes = held[2][:, None].expand(-1, tokens, -1)
    mask = torch.cat([votes, sees.expand(heads, -1, -1)], dim=2)[None].to(q.dtype)
    return scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)


def row_of(questions: Sequence[Question], context_tokens: int, device: torch.device) -> Row:
    """The questions about a context of so many tokens."""
    ids, positions, owner = list[int](), list[int](), list[int]()
    asked, targets = list[int](), list[int]()
    spans = list[slice]()
    for index, question in enumerate(questions):
        # The last token of an answer is asked for, and asks for nothing.
        tokens = [*question.prompt_ids, *question.answer_ids]
        scored = len(question.prompt_ids) + question.unscored
        first = len(ids)
        asked += range(first + scored - 1, first + len(tokens) - 1)
        targets += tokens[scored:]
        ids += tokens[:-1]
        positions += range(context_tokens, context_tokens + len(tokens) - 1)
        owner += [index] * (len(tokens) - 1)
        spans.append(slice(first, len(ids)))
    whose = torch.tensor(owner, device=device)
    order = torch.arange(len(ids), device=device)
    seen = (whose[:, None] == whose) & (order <= order[:, None])
    return Row(
        ids=torch.tensor(ids, device=device),
        positions=torch.tensor(positions, device=device),
        asked=torch.tensor(asked, device=device),
        targets=torch.tensor(targets, device=device),
        sees=torch.zeros(seen.shape, device=device).masked_fill(~seen, -torch.inf),
        spans=tuple(spans),
        prompts=tuple(len(question.prompt_ids) for question in questions),
    )
