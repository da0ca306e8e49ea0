"""The options of a request, which are in its `custom_params`.

    {"kvtier": {"exact": true}}

This request is answered as if nothing had ever been dropped, and so is one that wants
log-probabilities of its prompt, which are the model's. It matches exact KV only and computes the
rest of its prompt again. The KV that it computed again is taken out of the tree when it ends. So
the session's compressed KV stays what it was, and later requests read what they would have read
without it.

    {"kvtier": {"measure": true}}

This request asks for the log-probabilities that the server gives its prompt, over the KV that is
kept. The KV that it computed is taken out of the tree, too: a session can be measured and goes on
as it was.

    {"kvtier": {"forget": true}}

This request takes nothing of what stood behind an edit, and drops the contexts that have it: they
have seen what stood there before.

    {"kvtier": {"done": true}}

This request is the last of its session: the KV of the session is evicted before any other.

    {"kvtier": {"retention": 0.1}}

The turns of this session keep at most this share, and never more than the server's rule says. All
of its requests say so: they share KV with those alone that ask for the same share, so that nobody
else reads what they gave up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

from kvtier.errors import UsageError

# These are the names in a request's `custom_params`.
PARAMS, EXACT, MEASURE, FORGET, DONE = "kvtier", "exact", "measure", "forget", "done"
RETENTION = "retention"
_FLAGS = (EXACT, MEASURE, FORGET, DONE)
# The ids of the requests by which a server measures itself (shadow.py) begin so.
SHADOW_RID_PREFIX = "kvtier-shadow-"


def asked_of(custom_params: Any) -> Mapping[str, Any]:
    """Return the options in a request's `custom_params`, by name. Raises UsageError for anything
    that kvtier does not know, and for exact and measure together."""
    if custom_params and not isinstance(custom_params, Mapping):
        raise UsageError("custom_params", "an object", custom_params)
    asked = (custom_params or {}).get(PARAMS, {})
    known = isinstance(asked, dict) and asked.keys() <= {*_FLAGS, RETENTION}
    if not known or not all(isinstance(asked.get(name, True), bool) for name in _FLAGS):
        expected = " or ".join(f'{{"{name}": true}}' for name in _FLAGS)
        expected += f' or {{"{RETENTION}": a number in (0, 1]}}'
        raise UsageError(f"custom_params.{PARAMS}", expected, asked)
    share = asked.get(RETENTION, 1.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise UsageError(f"custom_params.{PARAMS}.{RETENTION}", "a number in (0, 1]", share)
    if asked.get(EXACT) and asked.get(MEASURE):
        expected = "exact or measure, of which one reads what was dropped and the other does not"
        raise UsageError(f"custom_params.{PARAMS}", expected, asked)
    found: Mapping[str, Any] = asked
    return found


def asks_exactly(req: Any) -> bool:
    """Return whether a request's `custom_params` ask for an exact answer."""
    return _asks(req, EXACT)


def asks_to_forget(req: Any) -> bool:
    """Return whether a request asks to drop the contexts that have what stands behind its edits."""
    return _asks(req, FORGET)


def is_done(req: Any) -> bool:
    """Return whether a request says that it is the last of its session."""
    return _asks(req, DONE)


def measures(req: Any) -> bool:
    """Return whether a request measures the KV that is kept. req: None for a match that is of no
    request."""
    return req is not None and _asks(req, MEASURE)


def is_of_a_client(req: Any) -> bool:
    """Return whether a request is traffic: not SGLang's health check, nor one that measures."""
    own = (HEALTH_CHECK_RID_PREFIX, SHADOW_RID_PREFIX)
    return not (req.rid.startswith(own) or measures(req))


def requested_share(req: Any) -> float | None:
    """Return the share that a request's session is to keep at most; None where it does not say."""
    share = asked_of(req.sampling_params.custom_params).get(RETENTION)
    return None if share is None else float(share)


def _asks(req: Any, name: str) -> bool:
    return bool(asked_of(req.sampling_params.custom_params).get(name, False))


def wants_exact(req: Any) -> bool:
    """Return whether a request must read exact KV only. req: None for a match that is of no
    request."""
    if req is None or measures(req):
        return False
    asks_prompt = req.return_logprob and 0 <= req.logprob_start_len < len(req.origin_input_ids)
    return bool(asks_prompt) or asks_exactly(req)


def note_recomputed(req: Any, tokens: int, begin: int) -> None:
    """Note that so many cached tokens from this position on are computed again. The request's KV
    stays where there were none, unless it is no client's. As with SGLang's count of cached tokens,
    a request that has begun to compute is not looked at again: it would find its own KV.

    kvtier_own_from: the position from which its KV leaves the tree when it ends; None: it stays.
    """
    if not (req.already_computed or req.retracted_stain):
        leaves = tokens or not is_of_a_client(req)
        req.kvtier_recomputed, req.kvtier_own_from = tokens, begin if leaves else None
