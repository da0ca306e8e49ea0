"""The number of slots that a server's byte budget buys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtier.errors import StartupError
from kvtier.heads.profile import ModelShape
from kvtier.pool_sizing import TABLE_BYTES, slot_bytes


def size_pool(
    original: Callable[..., Any],
    configurator: Any,
    budget_bytes: int,
    shape: ModelShape,
    *,
    state_width: int | None,
    votes: int | None,
    **kwargs: Any,
) -> Any:
    """SGLang's answer to how many tokens fit, which are our slots.

    shape: of this rank's part of the model; state_width, votes: see `slot_bytes`.

    SGLang divides the budget by the bytes of a token's KV alone. Handing it the bytes that the KV
    of as many tokens as we have slots would cost makes it arrive at our number; a token cap of the
    user (--max-total-tokens) caps the slots as it always did.

    Raises StartupError where SGLang arrives at more than was planned.
    """
    itemsize = configurator.kv_cache_dtype.itemsize
    per_slot = slot_bytes(shape, itemsize, state_width=state_width, votes=votes)
    slots = budget_bytes // (per_slot + TABLE_BYTES)
    token_bytes = slot_bytes(shape, itemsize)
    config = original(configurator, slots * token_bytes, **kwargs)
    if config.max_total_num_tokens > slots:
        raise StartupError(
            f"{slots} slots fit the memory, but SGLang made {config.max_total_num_tokens} of them: "
            f"it does not count {token_bytes} bytes for a token"
        )
    return config


__all__ = ["size_pool"]
