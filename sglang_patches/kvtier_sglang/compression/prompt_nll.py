"""A prompt's NLL under the model, where a share rule reads it, from the prefill that is done.

SGLang computes logits for the last token of a prefill only. Here every `stride`-th token of it is
asked as well, from hidden states that are at hand: 1 / stride of the output layer's work. The
NLL is kept per slot, like the window mass, and averaged over a node when its turn ends.

A token at position p is asked for the one at p + 1, so the last token of a chunk is not asked.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvtier_sglang.compression.selection import PrefillRows


def sampled_rows(rows: PrefillRows, stride: int) -> torch.Tensor:
    """Row indices to ask: positions that are multiples of `stride`, not a request's last row."""
    picked = [
        torch.arange(begin + -start % stride, end - 1, stride)
        for begin, end, start in zip(rows.indptr, rows.indptr[1:], rows.start, strict=False)
        if begin + -start % stride < end - 1
    ]
    return torch.cat(picked) if picked else torch.empty(0, dtype=torch.int64)


def measure_nll(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    input_ids: torch.Tensor,
    asked: torch.Tensor,
) -> torch.Tensor:
    """Float32 `[asked]`: -ln p(the token that follows), nats.

    hidden: [tokens, hidden size]; asked: row indices, none of them the last.
    """
    logits = logits_of(hidden[asked]).float()
    wanted = input_ids[asked + 1].to(torch.int64)
    return torch.nn.functional.cross_entropy(logits, wanted, reduction="none")


def observe_nll(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    input_ids: torch.Tensor,
    rows: PrefillRows,
    stride: int,
    nll: torch.Tensor,
) -> None:
    """Write the NLL of every `stride`-th token of a prefill into `nll`, by slot. hidden: of all
    tokens of the prefill; of fewer (SGLang keeps the last ones only) nothing is measured."""
    if hidden.shape[0] != rows.indptr[-1]:
        return
    asked = sampled_rows(rows, stride).to(hidden.device)
    if asked.numel():
        nll[rows.slots[asked]] = measure_nll(logits_of, hidden, input_ids, asked)


__all__ = ["measure_nll", "observe_nll", "sampled_rows"]
