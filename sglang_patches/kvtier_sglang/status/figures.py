"""The figures of one scheduler, read from where they are counted.

Metrics and the status page both come from FIGURES, so that they say the same. All are of the first
tensor parallel rank of a replica; bytes are those of that rank's KV heads. Reading changes nothing
and waits for nothing; it may happen in any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from kvtier_sglang.radix.cache import KvtierRadixCache
from kvtier_sglang.refresh.turn_refresh import TurnRefresh
from kvtier_sglang.tier.connector import TierConnector

# These are amounts, counted beside events; everything else in those counters is an event.
_AMOUNTS = {"put_bytes", "spill_bytes", "restored_tokens", "refresh_moved_bytes"}
# These events are told from the start, as a counter that begins at 1 has not grown for Prometheus.
_TIER_EVENTS = (
    *("asked", "restored_requests", "gave_up_waiting", "restore_failed", "no_room"),
    *("puts_shed", "spans_shed", "puts_given_up", "spans_not_exact", "records_refused"),
    "puts_incomplete",
    *("get_bugs", "put_bugs", "gets_refused", "refused_while_open"),
)
_REFRESH_EVENTS = ("refreshed_turns", "refresh_missed", "refresh_outdated", "refresh_no_room")

Read = Callable[[KvtierRadixCache], Mapping[str, float]]


class Kind(Enum):
    """The kind of a metric. A COUNTER only grows while the server runs. SUM and LEAST are gauges:
    a server's replicas together are the sum, or the least, of theirs."""

    COUNTER = "counter"
    SUM = "livesum"
    LEAST = "livemin"


@dataclass(frozen=True)
class Figure:
    """One metric.

    name:  its name, without Prometheus's suffix `_total`
    label: the name of the label that tells its values apart; "" for a single value
    read:  reads its values by label; none where the server has no such thing
    """

    name: str
    kind: Kind
    help: str
    read: Read
    label: str = ""


def read_all(cache: KvtierRadixCache) -> dict[str, dict[str, float]]:
    """Return every figure's values, by its name."""
    return {figure.name: dict(figure.read(cache)) for figure in FIGURES}


def _one(read: Callable[[KvtierRadixCache], float]) -> Read:
    return lambda cache: {"": read(cache)}


def _of_tier(read: Callable[[TierConnector], Mapping[str, float]]) -> Read:
    """Return the reader of something of the tier; of nothing where there is none."""
    return lambda cache: {} if cache.tier is None else read(cache.tier)


def _tier_events(cache: KvtierRadixCache) -> dict[str, float]:
    if cache.tier is None or cache.restorer is None:
        return {}
    tier = cache.tier
    counted: dict[str, float] = dict.fromkeys(_TIER_EVENTS, 0)
    counted["breaker_opened"] = tier.link.breaker.opened
    for part in (tier.link, tier.spiller, tier, cache.restorer):
        counted |= part.counters
    return {name: value for name, value in counted.items() if name not in _AMOUNTS}


def _tier_bytes(tier: TierConnector) -> dict[str, float]:
    return {
        "spilled": tier.spiller.counters["spill_bytes"],
        "stored": tier.link.counters["put_bytes"],
        "restored": tier.counters["restored_tokens"] * tier.token_bytes,
    }


def _of_refresh(read: Callable[[TurnRefresh], Mapping[str, float]]) -> Read:
    """Return the reader of something of refreshes; of nothing where there are none."""
    return lambda cache: {} if cache.refresh is None else read(cache.refresh)


def _refreshes(refresh: TurnRefresh) -> dict[str, float]:
    counters = dict.fromkeys(_REFRESH_EVENTS, 0) | refresh.refresher.counters
    return {name: value for name, value in counters.items() if name not in _AMOUNTS}


def _refresh_s(refresh: TurnRefresh) -> dict[str, float]:
    return {"choosing": refresh.refresher.refresh_s, "waiting": refresh.wait_s}


FIGURES = (
    Figure(
        "kvtier_pool_slots",
        Kind.SUM,
        "Slots of the KV pool.",
        _one(lambda cache: cache.allocator.size),
    ),
    Figure(
        "kvtier_pool_slots_used",
        Kind.SUM,
        "Slots in use.",
        _one(lambda cache: cache.allocator.size - cache.allocator.available_size()),
    ),
    Figure(
        "kvtier_pool_capacity_bytes",
        Kind.SUM,
        "Bytes of all slots.",
        _one(lambda cache: cache.allocator.size * cache.allocator.pool.slot_bytes),
    ),
    Figure(
        "kvtier_pool_used_bytes",
        Kind.SUM,
        "Bytes of the slots in use, cached contexts included.",
        _one(lambda cache: cache.allocator.used_bytes()),
    ),
    Figure(
        "kvtier_idle_branches",
        Kind.SUM,
        "Cached contexts that no request uses.",
        _one(lambda cache: len(cache.evictable_leaves)),
    ),
    Figure(
        "kvtier_compressed_nodes",
        Kind.COUNTER,
        "Turns, or parts of them, that were compressed.",
        _one(lambda cache: cache.compressor.counters["compressed_nodes"]),
    ),
    Figure(
        "kvtier_compacted_tokens",
        Kind.COUNTER,
        "Slots that compressed turns gave back.",
        _one(lambda cache: cache.compressor.counters["compacted_tokens"]),
    ),
    Figure(
        "kvtier_variants",
        Kind.COUNTER,
        "Requests that left a compressed turn in its middle.",
        _one(lambda cache: cache.counters["variants"]),
    ),
    Figure(
        "kvtier_moved_tokens",
        Kind.COUNTER,
        "Tokens behind an edit whose KV was copied from where they stood before.",
        _one(lambda cache: cache.counters["moved_tokens"]),
    ),
    Figure(
        "kvtier_hit_tokens",
        Kind.COUNTER,
        "Prompt tokens whose KV was there.",
        _one(lambda cache: cache.misses.counters["hit"]),
    ),
    Figure(
        "kvtier_new_tokens",
        Kind.COUNTER,
        "Prompt tokens that were computed for the first time.",
        _one(lambda cache: cache.misses.counters["new"]),
    ),
    Figure(
        "kvtier_recomputed_tokens",
        Kind.COUNTER,
        "Prompt tokens that were computed again, by why they had to be.",
        lambda cache: dict(cache.misses.reasons),
        "reason",
    ),
    Figure(
        "kvtier_engine_tier_healthy",
        Kind.LEAST,
        "1 while the tier is asked, 0 while it is given up on.",
        _of_tier(lambda tier: {"": float(tier.link.healthy)}),
    ),
    Figure(
        "kvtier_engine_tier_pending",
        Kind.SUM,
        "Calls on their way to the tier.",
        _of_tier(lambda tier: {"": tier.link.pending}),
    ),
    Figure(
        "kvtier_engine_tier_events",
        Kind.COUNTER,
        "What happened between the engine and its tier.",
        _tier_events,
        "event",
    ),
    Figure(
        "kvtier_engine_tier_bytes",
        Kind.COUNTER,
        "Exact KV that was spilled to, stored in and restored from the tier.",
        _of_tier(_tier_bytes),
        "direction",
    ),
    Figure(
        "kvtier_restored_tokens",
        Kind.COUNTER,
        "Tokens that were restored from the tier instead of computed.",
        _of_tier(lambda tier: {"": tier.counters["restored_tokens"]}),
    ),
    Figure(
        "kvtier_refreshes",
        Kind.COUNTER,
        "Contexts whose entries were chosen again, and what kept others from it.",
        _of_refresh(_refreshes),
        "event",
    ),
    Figure(
        "kvtier_refresh_moved_bytes",
        Kind.COUNTER,
        "Moved from the tier for refreshes.",
        _of_refresh(lambda one: {"": one.refresher.counters["refresh_moved_bytes"]}),
    ),
    Figure(
        "kvtier_refresh_seconds",
        Kind.COUNTER,
        "Seconds of refreshing: requests that waited, and entries being chosen.",
        _of_refresh(_refresh_s),
        "part",
    ),
)
