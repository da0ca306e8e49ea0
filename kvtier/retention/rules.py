"""The retention rules that settings ask for, the same for serving and for calibrating."""

from __future__ import annotations

from kvtier.config import Settings
from kvtier.errors import UsageError
from kvtier.retention.keepkv import Form, KeepKV
from kvtier.retention.locality import LocalityRule
from kvtier.retention.refreshing import RefreshRule
from kvtier.retention.scorers import SCORERS, TokenScorer


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
    keepkv = KeepKV(form, floor=settings.merge_floor, window_queries=settings.refresh_queries)
    return RefreshRule(keepkv, merges=settings.merge != "off")


def scorer_of(settings: Settings) -> TokenScorer:
    """What says which tokens CA heads keep in a server with these settings. Raises UsageError for a
    scorer that there is none of."""
    scorer = SCORERS.get(settings.scorer)
    if scorer is None:
        raise UsageError("scorer", f"one of {', '.join(SCORERS)}", settings.scorer)
    return scorer.from_settings(settings)


def state_width(settings: Settings) -> int | None:
    """How many numbers a server keeps for a token and CA head beside its KV; None where CA heads
    keep everything."""
    return scorer_of(settings).state_width if settings.compacts else None
