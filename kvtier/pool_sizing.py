"""The arithmetic of the two pools: how a KV budget is cut, and what a session occupies.

Used by the engine to size its pools and by `kvtier.bench --dry-run` to print the plan, so
that both say the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.errors import BudgetError
from kvtier.heads.profile import HeadProfile

# Tokens of other requests' decode steps that may be in flight beside a prefill.
SLACK_SLOTS = 64
# Share of one pool that requests in flight may hold while another runs, where turns are compressed
# when they end: a cache of full KV would hold no more than they do, and they push out what rests.
IN_FLIGHT_SHARE = 0.5
# Beside its KV: what SGLang holds for each token of the longest pass there could be (48), a place
# in its list of free slots, where the token's locality slot is, and a mark.
CA_TABLE_BYTES = 48 + 8 + 8 + 1
# A vote, and a place among the free.
LOCALITY_TABLE_BYTES = 4 + 8


@dataclass(frozen=True)
class SlotBytes:
    """Bytes of one slot of each class, summed over all layers (K and V)."""

    ca: int
    locality: int

    @property
    def full(self) -> int:
        """Bytes one token costs when nothing is dropped."""
        return self.ca + self.locality


@dataclass(frozen=True)
class SessionShape:
    """How long sessions are and what their locality heads keep.

    context_tokens: tokens before the first answer. turn_tokens: what all turns add.
    kept_tokens:    sink + recent + one compensation entry.
    prefill_tokens: locality slots one running prefill needs at most.
    retention:      share of the context that CA heads keep once its turn has ended.
    """

    context_tokens: int
    turn_tokens: int
    kept_tokens: int
    prefill_tokens: int
    retention: float = 1.0

    @property
    def total_tokens(self) -> int:
        return self.context_tokens + self.turn_tokens

    @property
    def ca_slots(self) -> int:
        """CA slots of one resting session; the tokens locality heads keep are always among them."""
        kept = max(math.ceil(self.retention * self.context_tokens), self.kept_tokens)
        return min(kept, self.context_tokens) + self.turn_tokens

    @property
    def locality_slots(self) -> int:
        """Locality slots of one resting session."""
        return min(self.kept_tokens, self.context_tokens) + self.turn_tokens


@dataclass(frozen=True)
class PoolPlan:
    """Slots of each class and how many sessions they hold."""

    ca_slots: int
    locality_slots: int
    sessions: float


def score_bytes(profile: HeadProfile, state_width: int) -> int:
    """Bytes per CA slot of what selection remembers of a token: `state_width` floats per CA head,
    and one."""
    return 4 * (profile.num_ca_heads * state_width + 1)


def vote_bytes(profile: HeadProfile) -> int:
    """Bytes per CA slot of what merging remembers of it: a float per query head, and a mark."""
    group = profile.shape.num_attention_heads // profile.shape.num_kv_heads
    return 4 * (profile.num_ca_heads * group + 1)


def packed_bytes(profile: HeadProfile, votes: int) -> int:
    """Bytes per CA slot of what packing remembers of it: a number, and so many votes of each entry
    that may stand for several tokens."""
    return 8 + 4 * votes * profile.num_ca_heads


def slot_bytes(
    profile: HeadProfile,
    dtype_bytes: int,
    *,
    state_width: int | None = None,
    merges: bool = False,
    packs: bool = False,
    compensates: bool = False,
) -> SlotBytes:
    """Bytes per slot of each class for a profile's model shape. state_width: of the token scorer,
    where CA heads keep a part; `merges` where they merge; `packs` where each keeps as many entries
    as it needs; `compensates` where some of those stand for several tokens."""
    head_bytes = 2 * profile.shape.head_dim * dtype_bytes
    total = profile.shape.num_layers * profile.shape.num_kv_heads
    ca = profile.num_ca_heads * head_bytes
    beside = 0 if state_width is None else score_bytes(profile, state_width)
    if packs:
        beside += packed_bytes(profile, profile.shape.group_size if merges else int(compensates))
    elif merges:
        beside += vote_bytes(profile)
    return SlotBytes(ca=ca + beside, locality=total * head_bytes - ca)


def with_tables(bytes_per_slot: SlotBytes) -> SlotBytes:
    """What slots cost the device with all that is kept for each of them: little beside the KV of a
    large model, gigabytes where a small one fills a large machine."""
    if bytes_per_slot.locality == 0:
        both = CA_TABLE_BYTES + LOCALITY_TABLE_BYTES
        return SlotBytes(bytes_per_slot.ca + both, 0)
    return SlotBytes(
        bytes_per_slot.ca + CA_TABLE_BYTES, bytes_per_slot.locality + LOCALITY_TABLE_BYTES
    )


def session_bytes(bytes_per_slot: SlotBytes, shape: SessionShape) -> int:
    """Device bytes of one resting session."""
    return bytes_per_slot.ca * shape.ca_slots + bytes_per_slot.locality * shape.locality_slots


def locality_slots_for(ca_slots: int, shape: SessionShape) -> int:
    """Locality slots that go with `ca_slots`: the resting sessions they hold (at least one),
    and room for one running prefill with its answer."""
    sessions = (ca_slots - _ca_reserve(shape)) / shape.ca_slots
    resting = math.ceil(max(1.0, sessions) * shape.locality_slots)
    return min(resting + _prefill_reserve(shape), max(ca_slots, shape.prefill_tokens))


def _prefill_reserve(shape: SessionShape) -> int:
    """Slots a running prefill and its answer need beyond those of a resting session."""
    return max(0, shape.prefill_tokens + shape.turn_tokens - shape.locality_slots) + SLACK_SLOTS


def _ca_reserve(shape: SessionShape) -> int:
    """CA slots a running prefill needs beyond those of a resting session."""
    return shape.total_tokens - shape.ca_slots


def plan_pools(budget_bytes: int, bytes_per_slot: SlotBytes, shape: SessionShape) -> PoolPlan:
    """Cut a KV budget so that as many sessions as possible rest beside one running prefill.

    Raises BudgetError when not even one session fits.
    """
    return plan_ranks(budget_bytes, [bytes_per_slot], shape)


def plan_ranks(budget_bytes: int, ranks: Sequence[SlotBytes], shape: SessionShape) -> PoolPlan:
    """The same for tensor parallel ranks, each with such a budget and such bytes per slot. A slot
    is the same token on all of them, so all have as many: those that the poorest can pay for.

    Raises BudgetError when not even one session fits every rank.
    """
    sessions = min(_sessions(budget_bytes, per_slot, shape) for per_slot in ranks)
    ca_slots = int(sessions * shape.ca_slots) + _ca_reserve(shape)
    return PoolPlan(
        ca_slots=ca_slots,
        # Without locality heads the class costs nothing and must never be the bottleneck.
        locality_slots=int(sessions * shape.locality_slots) + _prefill_reserve(shape)
        if any(per_slot.locality for per_slot in ranks)
        else ca_slots,
        sessions=sessions,
    )


def _sessions(budget_bytes: int, per_slot: SlotBytes, shape: SessionShape) -> float:
    """How many sessions rest in a budget beside one running prefill; at least one."""
    reserve = _prefill_reserve(shape) * per_slot.locality + _ca_reserve(shape) * per_slot.ca
    one = session_bytes(per_slot, shape)
    if budget_bytes < reserve + one:
        raise BudgetError(
            "KV budget",
            f"at least {reserve + one} bytes for one session of {shape.total_tokens} tokens",
            budget_bytes,
        )
    return (budget_bytes - reserve) / one
