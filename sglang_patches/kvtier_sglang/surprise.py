"""How surprising a prompt was to the model: its NLL, from the prefill that is done anyway.

SGLang computes logits for the last token of a prefill only. Here every `stride`-th token of it is
asked as well, from hidden states that are at hand: 1 / stride of the output layer's work. The
answer is kept per CA slot, like the window mass, and averaged over a node when its turn ends.

A token at position p is asked for the one at p + 1, so the last token of a chunk is not asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvtier_sglang.compaction import PrefillRows


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


def observe_surprise(
    original: Callable[..., Any],
    processor: Any,
    input_ids: torch.Tensor,
    hidden_states: torch.Tensor,
    lm_head: Any,
    logits_metadata: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """AROUND LogitsProcessor.forward: measure the NLL of a prefill where a backend wants it."""
    from kvtier_sglang.attention import active_backend

    backend = active_backend()
    rows = None if backend is None else backend.prefill_rows()
    if backend is not None and rows is not None and hidden_states.shape[0] == rows.indptr[-1]:
        asked = sampled_rows(rows, backend.settings.nll_stride).to(hidden_states.device)
        if asked.numel():

            def logits_of(states: torch.Tensor) -> torch.Tensor:
                found: torch.Tensor = processor._get_logits(
                    states, lm_head, logits_metadata, use_logits_buffer=False
                )
                return found

            nll = measure_nll(logits_of, hidden_states, input_ids, asked)
            backend.pool.nll[rows.slots[asked]] = nll
    return original(processor, input_ids, hidden_states, lm_head, logits_metadata, *args, **kwargs)
