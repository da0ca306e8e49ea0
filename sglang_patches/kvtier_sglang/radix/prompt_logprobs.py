"""Requests that want log-probabilities of their prompt.

They are a measurement of the model: what they are computed behind must be as if nothing had ever
been dropped. So such a request matches exact KV only and computes the rest of its prompt again.
"""

from __future__ import annotations

from typing import Any


def wants_prompt_logprobs(req: Any) -> bool:
    """Whether a request asks for log-probabilities of its prompt. req: None for a match that is of
    no request."""
    if req is None or not req.return_logprob:
        return False
    return 0 <= req.logprob_start_len < len(req.origin_input_ids)


def recomputed_tokens(req: Any) -> int:
    """Tokens of a request's prompt that are cached and computed again all the same: the cached ones
    were compressed, or computed behind such."""
    return getattr(req, "kvtier_recomputed_tokens", 0)


def note_recomputed(req: Any, tokens: int) -> None:
    """Remember what `recomputed_tokens` is to say. As with SGLang's count of cached tokens, a
    request that has begun to compute is not looked at again: it would find its own KV."""
    if not (req.already_computed or req.retracted_stain):
        req.kvtier_recomputed_tokens = tokens


__all__ = ["note_recomputed", "recomputed_tokens", "wants_prompt_logprobs"]
