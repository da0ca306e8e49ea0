"""How many slots of each class a server's byte budget buys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvtier.config import Settings
from kvtier.errors import StartupError
from kvtier.heads.profile import HeadProfile
from kvtier.pool_sizing import SessionShape, locality_slots_for, plan_ranks, slot_bytes, with_tables
from kvtier.retention.rules import state_width
from kvtier.retention.shares import expected_share


def size_pools(
    original: Callable[..., Any],
    configurator: Any,
    budget_bytes: int,
    settings: Settings,
    profiles: Sequence[HeadProfile],
    **kwargs: Any,
) -> tuple[Any, int]:
    """SGLang's answer to how many tokens fit, which are our CA slots, and our locality slots.

    profiles: what each tensor parallel rank holds of the model's; the budget is that of each.

    SGLang divides the budget by the bytes of a whole token's KV. Handing it the bytes that as many
    whole tokens as we have CA slots would cost makes it arrive at our number; a token cap of
    the user (--max-total-tokens) caps the CA slots as it always did.

    Raises StartupError where SGLang arrives at more than was planned.
    """
    itemsize = configurator.kv_cache_dtype.itemsize
    merges = settings.merge.is_on
    width, packs = state_width(settings), settings.packs
    slots = [
        slot_bytes(
            profile,
            itemsize,
            state_width=width,
            merges=merges,
            packs=packs,
            compensates=settings.compensates,
        )
        for profile in profiles
    ]
    ranks = [with_tables(one) for one in slots]
    longest = configurator.model_config.context_len
    plan = plan_ranks(budget_bytes, ranks, session_shape(settings, longest))
    # What is kept beside the KV is not in SGLang's bytes of a token.
    token_bytes = slot_bytes(profiles[0], itemsize).full
    config = original(configurator, plan.ca_slots * token_bytes, **kwargs)
    ca_slots = config.max_total_num_tokens
    if ca_slots > plan.ca_slots:
        raise StartupError(
            f"{plan.ca_slots} CA slots fit the memory, but SGLang made {ca_slots} of them: it does "
            f"not count {token_bytes} bytes for a token"
        )
    derived = plan.locality_slots
    if not any(rank.locality for rank in ranks):
        # Their slots cost nothing, and no prompt may be refused for want of them.
        derived = ca_slots
    elif ca_slots < plan.ca_slots:
        derived = locality_slots_for(ca_slots, session_shape(settings, min(longest, ca_slots)))
    return config, settings.locality.slots or derived


def session_shape(settings: Settings, longest: int) -> SessionShape:
    """What sessions are expected to look like; `longest` tokens is what model or pool allow."""
    from sglang.srt.runtime_context import get_schedule

    context = min(settings.session.tokens, longest)
    kept = settings.locality.kept_tokens + 1
    prefill = context
    chunk = get_schedule().chunked_prefill_size
    if settings.prefill == "streaming" and chunk and chunk > 0:
        prefill = min(prefill, chunk + settings.locality.kept_tokens)
    return SessionShape(
        context_tokens=context,
        turn_tokens=settings.session.turn_tokens,
        kept_tokens=kept,
        prefill_tokens=prefill,
        retention=expected_share(settings),
    )


__all__ = ["session_shape", "size_pools"]
