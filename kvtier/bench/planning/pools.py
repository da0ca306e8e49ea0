"""Memory arithmetic, in slots (bytes of a slot are summed over the layers).

Without a budget each policy gets what one session needs, so nothing is ever evicted.
"""

from __future__ import annotations

import math

from kvtier.bench import workload as work
from kvtier.bench.options import Budget, Options
from kvtier.bench.planning.model import Model
from kvtier.bench.policies import Policy
from kvtier.bench.schema import PoolSizes, Replay
from kvtier.config import Settings
from kvtier.errors import BudgetError
from kvtier.heads.profile import HeadProfile, ModelShape
from kvtier.pool_sizing import SessionShape, kept_slots, plan_pool
from kvtier.retention.shares import PAGE, expected_share

# The engine keeps a few tokens of its pool free for itself.
ADMISSION_TOKENS = 64
# Room beyond one session where no budget is set: nothing may be evicted while it is measured.
SLACK_TOKENS = 1024


def session_shape(
    options: Options, policy: Policy, profile: HeadProfile, model: Model
) -> SessionShape:
    """Return the needs of one session of the workload from the pool, under a policy with that
    profile."""
    settings, asked = options.settings, options.workload
    if isinstance(asked, Replay):
        # The resting contexts are of the mean length.
        context = math.ceil(asked.mean_input_tokens)
        turns = math.ceil(asked.mean_output_tokens)
    else:
        context = asked.context_tokens
        turns = work.turn_tokens(asked) + ADMISSION_TOKENS
    kept = context
    if policy.splits_heads:
        share = expected_share(settings) if policy.compacts else 1.0
        heads = profile.shape.num_layers * profile.shape.num_kv_heads
        edges = settings.locality.kept_tokens(competes=settings.competes)
        page = kept_page(settings, profile.shape) if policy.compacts else PAGE
        windowed = model.windowed_heads
        anchored = profile.num_ca_heads - windowed
        # The newest window stays as it is.
        before = max(0, context - model.window)
        kept = kept_slots(before, edges, share, anchored, heads, page, windowed)
        kept += context - before
    return SessionShape(context, turns, kept)


def kept_page(settings: Settings, shape: ModelShape) -> int:
    """Entries of a page of what heads keep."""
    if settings.kept_bits is None or not settings.competes:
        return PAGE
    # Only now, as it imports torch.
    from kvtier_kernels.codes import coded_shape

    return coded_shape(settings.kept_bits, shape.head_dim).entries


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
    budget: Budget | None, policy: Policy, slot: int, session: SessionShape, token_bytes: int
) -> PoolSizes:
    """Slots for a policy. slot: bytes of one; token_bytes: of a full session's token, whatever the
    policy.

    Raises BudgetError naming the budget's flag when no session fits.
    """
    if budget is None:
        # The slots hold a session from its prefill to its last turn, and some slack.
        slots = session.total_tokens + SLACK_TOKENS
        return PoolSizes(budget_bytes=slots * slot, max_total_tokens=slots, sessions=1.0)
    if budget.num_bytes is not None:
        num_bytes = budget.num_bytes
    else:
        assert budget.full_sessions is not None, "a budget is either bytes or sessions"
        num_bytes = int(budget.full_sessions * token_bytes * session.total_tokens)
    try:
        plan = plan_pool(num_bytes, slot, session)
    except BudgetError as error:
        raise BudgetError(
            budget.argument, f"{error.expected} under policy {policy.name}", error.got
        ) from error
    return PoolSizes(budget_bytes=num_bytes, max_total_tokens=plan.slots, sessions=plan.sessions)
