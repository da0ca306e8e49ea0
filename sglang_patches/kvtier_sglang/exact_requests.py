"""Requests that are answered as if nothing had ever been dropped, and what else they may ask for.

They want log-probabilities of their prompt, which measure the model, or say so in `custom_params`:

    {"kvtier": {"exact": true}}

Such a request matches exact KV only and computes the rest of its prompt again. What it computed
again is taken out of the tree when it ends: the session's compressed KV stays what it was, and what
later requests read is what they would have read without it.

    {"kvtier": {"forget": true}}

takes nothing of what stood behind an edit, and drops the contexts that have it: they have seen what
stood there before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtier.errors import UsageError

# In a request's `custom_params`.
PARAMS, EXACT, FORGET = "kvtier", "exact", "forget"


def asks_exactly(custom_params: Any) -> bool:
    """Whether a request's `custom_params` ask for an exact answer. Raises UsageError for a value
    that kvtier does not know."""
    return _asked(custom_params).get(EXACT, False)


def asks_to_forget(req: Any) -> bool:
    """Whether contexts are dropped that have what stands behind a request's edits. Raises
    UsageError, as `asks_exactly`."""
    return _asked(req.sampling_params.custom_params).get(FORGET, False)


def _asked(custom_params: Any) -> Mapping[str, bool]:
    asked = (custom_params or {}).get(PARAMS, {})
    known = isinstance(asked, dict) and set(asked) <= {EXACT, FORGET}
    if not known or not all(isinstance(value, bool) for value in asked.values()):
        expected = '{"exact": true} or {"forget": true}'
        raise UsageError(f"custom_params.{PARAMS}", expected, asked)
    found: Mapping[str, bool] = asked
    return found


def wants_exact(req: Any) -> bool:
    """Whether a request must read exact KV only. req: None for a match that is of no request."""
    if req is None:
        return False
    asks_prompt = req.return_logprob and 0 <= req.logprob_start_len < len(req.origin_input_ids)
    return bool(asks_prompt) or asks_exactly(req.sampling_params.custom_params)


def recomputed_tokens(req: Any) -> int:
    """Tokens of a request's prompt that are cached and computed again all the same: the cached ones
    were compressed, or computed behind such."""
    return getattr(req, "kvtier_recomputed", (0, 0))[0]


def own_from(req: Any) -> int | None:
    """The position from which a request computed again what is cached; None where it did not."""
    tokens, begin = getattr(req, "kvtier_recomputed", (0, 0))
    return begin if tokens else None


def note_recomputed(req: Any, tokens: int, begin: int) -> None:
    """Remember that so many cached tokens from this position on are computed again. As with
    SGLang's count of cached tokens, a request that has begun to compute is not looked at again: it
    would find its own KV."""
    if not (req.already_computed or req.retracted_stain):
        req.kvtier_recomputed = tokens, begin


__all__ = [
    "asks_exactly",
    "asks_to_forget",
    "note_recomputed",
    "own_from",
    "recomputed_tokens",
    "wants_exact",
]
