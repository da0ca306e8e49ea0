"""Memory arithmetic, in slots per class (bytes of a slot are summed over the layers):

    stock, full     budget // bytes per token                     one pool
    kvtier, window  kvtier.pool_sizing.plan_pools(budget)         CA slots + locality slots

Without a budget each policy gets what one session needs, so nothing is ever evicted.
"""

from __future__ import annotations

import math
from dataclasses import replace

from kvtier.bench import workload as work
from kvtier.bench.options import Budget, Options
from kvtier.bench.policies import Policy
from kvtier.bench.schema import PoolSizes, Replay
from kvtier.errors import BudgetError
from kvtier.pool_sizing import SessionShape, SlotBytes, locality_slots_for, plan_pools
from kvtier.retention.shares import expected_share

# The engine keeps a few tokens of its pool free for itself.
ADMISSION_TOKENS = 64
# Room beyond one session where no budget is set: nothing may be evicted while it is measured.
SLACK_TOKENS = 1024


def session_shape(options: Options, policy: Policy) -> SessionShape:
    """What one session of the workload asks of the pools under a policy."""
    settings, asked = options.settings, options.workload
    kept = settings.locality.kept_tokens
    if isinstance(asked, Replay):
        # What rests is of the mean length; what is computed at once may be as long as the longest.
        context, longest = math.ceil(asked.mean_input_tokens), asked.longest_tokens
        turns, prompt = math.ceil(asked.mean_output_tokens), 0
    else:
        context = longest = asked.context_tokens
        turns, prompt = work.turn_tokens(asked) + ADMISSION_TOKENS, asked.prompt_tokens
    if not policy.splits_heads:
        return SessionShape(context, turns, kept_tokens=context, prefill_tokens=0)
    held = longest if settings.prefill == "exact" else min(longest, options.chunk_tokens + kept)
    return SessionShape(
        context,
        turns,
        kept_tokens=kept + 1,
        prefill_tokens=held + prompt,
        retention=expected_share(settings) if policy.compacts else 1.0,
    )


def check_longest(options: Options, policy: Policy, pools: PoolSizes) -> None:
    """Raise BudgetError where a trace's longest request fits no pool."""
    asked = options.workload
    if not isinstance(asked, Replay) or options.budget is None:
        return
    needed, room = asked.longest_tokens + ADMISSION_TOKENS, pools.max_total_tokens
    if needed > room:
        expected = f"room for the longest request, {needed} tokens, under policy {policy.name}"
        raise BudgetError(options.budget.argument, expected, f"room for {room}")


def pool_sizes(
    budget: Budget | None,
    policy: Policy,
    slots: SlotBytes,
    session: SessionShape,
    token_bytes: int,
) -> PoolSizes:
    """Slots for a policy. token_bytes: of a full session's token, whatever the policy.

    Raises BudgetError naming the budget's flag when no session fits.
    """
    if budget is None:
        return _room_for_one(policy, slots, session)
    if budget.num_bytes is not None:
        num_bytes = budget.num_bytes
    else:
        assert budget.full_sessions is not None, "a budget is either bytes or sessions"
        num_bytes = int(budget.full_sessions * token_bytes * session.total_tokens)
    try:
        return _cut(num_bytes, policy, slots, session)
    except BudgetError as error:
        raise BudgetError(
            budget.argument, f"{error.expected} under policy {policy.name}", error.got
        ) from error


def _room_for_one(policy: Policy, slots: SlotBytes, session: SessionShape) -> PoolSizes:
    """What one session needs from its prefill to its last turn, and some slack."""
    roomy = replace(session, turn_tokens=session.turn_tokens + SLACK_TOKENS)
    tokens = roomy.total_tokens
    locality = locality_slots_for(tokens, roomy) if policy.splits_heads else None
    split_bytes = tokens * slots.ca + (locality or 0) * slots.locality
    return PoolSizes(
        budget_bytes=tokens * slots.full if locality is None else split_bytes,
        max_total_tokens=tokens,
        locality_slots=locality,
        sessions=1.0,
    )


def _cut(budget_bytes: int, policy: Policy, slots: SlotBytes, session: SessionShape) -> PoolSizes:
    if policy.splits_heads:
        pools = plan_pools(budget_bytes, slots, session)
        return PoolSizes(
            budget_bytes=budget_bytes,
            max_total_tokens=pools.ca_slots,
            locality_slots=pools.locality_slots,
            sessions=pools.sessions,
        )
    tokens = budget_bytes // slots.full
    if tokens < session.total_tokens:
        needed = session.total_tokens * slots.full
        raise BudgetError("KV budget", f"at least {needed} bytes for one session", budget_bytes)
    return PoolSizes(
        budget_bytes=budget_bytes,
        max_total_tokens=tokens,
        sessions=tokens / session.total_tokens,
    )
