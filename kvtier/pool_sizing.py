"""The arithmetic of the pool: what a slot costs, and what a session occupies.

Used by the engine to size its pool and by `kvtier.bench --dry-run` and `kvtier plan` to print the
plan, so that all say the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.errors import BudgetError
from kvtier.heads.profile import ModelShape
from kvtier.retention.shares.base import PAGE, profile_slots

if TYPE_CHECKING:
    from kvtier.config import Settings

# Share of the pool that requests in flight may hold while another runs, where turns are compressed
# when they end: a cache of full KV would hold no more than they do, and they push out what rests.
IN_FLIGHT_SHARE = 0.5
# The bytes beside a token's KV: what SGLang holds for each token of the longest pass there could be
# (48), and a place in its list of free slots.
TABLE_BYTES = 48 + 8


def slot_bytes(
    shape: ModelShape,
    dtype_bytes: int,
    *,
    state_width: int | None = None,
    votes: int | None = None,
) -> int:
    """Bytes of one token's slot over all layers (K and V), with what is kept beside its KV.

    shape:       of the heads that are here
    state_width: of the token scorer, where turns are compacted: so many floats per head, and one
    votes:       where turns are compressed: a number, and so many votes of each entry
    """
    heads = shape.num_layers * shape.num_kv_heads
    total = heads * 2 * shape.head_dim * dtype_bytes
    if state_width is not None:
        total += 4 * (heads * state_width + 1)
    if votes is not None:
        total += 8 + 4 * heads * votes
    return total


def entry_votes(settings: Settings, shape: ModelShape, ca_share: float) -> int:
    """Return the number of votes that an entry may have: one of each query head where entries are
    merged, one where heads of a profile keep an entry for all that they drop, or none.

    ca_share: of the profile, 1 where every head is context-anchored
    """
    if settings.merge.is_on:
        return shape.group_size
    return int(ca_share < 1 and settings.locality.compensation)


def kept_slots(
    context: int,
    edges: int,
    share: float,
    anchored: int,
    heads: int,
    page: int = PAGE,
    windowed: int = 0,
) -> int:
    """Return the number of slots that hold a context whose turn has ended.

    edges:    tokens of it that every head keeps, sink and recent
    share:    of the context that anchored heads keep, `anchored` of all `heads`; `windowed` are of
              layers with a window and keep nothing, the others one entry, of what is not in the
              edges
    page:     entries of a page
    """
    span = max(0, context - edges)
    entries = min(max(math.ceil(share * context) - edges, 1), span)
    slots = profile_slots(entries, anchored, heads, page, windowed)
    return min(context, edges) + min(slots, span)


@dataclass(frozen=True)
class SessionShape:
    """The length of sessions, and what is left of them.

    context_tokens: before the first answer. turn_tokens: what all turns add.
    kept_tokens:    of the context, what its heads keep on average once its turn has ended.
    """

    context_tokens: int
    turn_tokens: int
    kept_tokens: int

    @property
    def total_tokens(self) -> int:
        """The tokens of a session with everything kept, as while its context is prefilled."""
        return self.context_tokens + self.turn_tokens

    @property
    def resting_tokens(self) -> int:
        """Slots of a session whose context is compressed."""
        return min(self.kept_tokens, self.context_tokens) + self.turn_tokens


@dataclass(frozen=True)
class PoolPlan:
    """Slots, and how many sessions they hold beside one running prefill."""

    slots: int
    sessions: float


def plan_pool(budget_bytes: int, bytes_per_slot: int, session: SessionShape) -> PoolPlan:
    """Raises BudgetError when not even one session fits."""
    slots = budget_bytes // bytes_per_slot
    if slots < session.total_tokens:
        needed = session.total_tokens * bytes_per_slot
        raise BudgetError(
            "KV budget",
            f"at least {needed} bytes for one session of {session.total_tokens} tokens",
            budget_bytes,
        )
    reserve = session.total_tokens - session.resting_tokens
    return PoolPlan(slots, (slots - reserve) / session.resting_tokens)
