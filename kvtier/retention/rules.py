"""The retention rules that settings ask for, the same for whoever serves and whoever calibrates."""

from __future__ import annotations

from kvtier.config import Settings
from kvtier.retention.compactor import Compactor
from kvtier.retention.keepkv import Form, KeepKV
from kvtier.retention.locality import LocalityRule
from kvtier.retention.refreshing import RefreshRule


def locality_rule(settings: Settings) -> LocalityRule:
    """The rule that a server with these settings serves by."""
    return LocalityRule(
        sink_tokens=settings.sink_tokens,
        recent_tokens=settings.recent_tokens,
        branch_recent_tokens=settings.branch_recent_tokens,
        compensation=settings.compensation,
    )


def refresh_rule(settings: Settings) -> RefreshRule | None:
    """The rule by which a server with these settings refreshes, if it does."""
    if settings.refresh == "off":
        return None
    form: Form = "paper" if settings.merge == "paper" else "beta"
    policy = KeepKV(form, floor=settings.merge_floor, window_queries=settings.refresh_queries)
    return RefreshRule(policy, merges=settings.merge != "off")


def compactor_of(settings: Settings) -> Compactor:
    """The scoring rule that a server with these settings serves by."""
    return Compactor(
        leverage_weight=settings.leverage_weight,
        window_tokens=settings.score_window_tokens,
        pool_width=settings.score_pool_width,
    )
