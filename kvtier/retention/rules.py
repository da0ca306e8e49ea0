"""The retention rules that settings ask for, the same for serving and for calibrating."""

from __future__ import annotations

from kvtier.config import Settings
from kvtier.errors import UsageError
from kvtier.retention.keepkv import KeepKV
from kvtier.retention.locality import LocalityRule
from kvtier.retention.refreshing import RefreshRule
from kvtier.retention.scorers import SCORERS, TokenScorer
from kvtier.retention.scorers.reconstruction import Reconstruction
from kvtier.retention.scorers.simple import DistinctKeys


def locality_rule(settings: Settings) -> LocalityRule:
    """The rule that a server with these settings serves by."""
    locality = settings.locality
    windows = locality.windows(competes=settings.competes)
    return LocalityRule(**windows, compensation=locality.compensation)


def refresh_rule(settings: Settings) -> RefreshRule | None:
    """The rule by which a server with these settings refreshes, if it does."""
    if not settings.refresh.is_on:
        return None
    keepkv = KeepKV(floor=settings.merge.floor, window_queries=settings.refresh.queries)
    return RefreshRule(keepkv, merges=settings.merge.is_on)


def scorer_of(settings: Settings) -> TokenScorer:
    """Return the scorer of a server with these settings. Raises UsageError for a scorer that there
    is none of, or whose scores do not compare across heads that compete."""
    name = settings.scorer.name
    if name is None:
        name = Reconstruction.name if settings.competes else DistinctKeys.name
    scorer = SCORERS.get(name)
    if scorer is None:
        raise UsageError("scorer", f"one of {', '.join(SCORERS)}", name)
    if settings.competes and not scorer.comparable:
        names = [name for name, one in SCORERS.items() if one.comparable]
        expected = f"{' or '.join(names)} with head_budgets = adaptive, where heads compete"
        raise UsageError("scorer", expected, name)
    if scorer.comparable and settings.compacts and not settings.competes:
        expected = f"adaptive, with a share of the context, beside scorer = {scorer.name}"
        raise UsageError("head_budgets", expected, settings.head_budgets)
    return scorer.from_settings(settings)


def state_width(settings: Settings) -> int | None:
    """Return how many numbers a server keeps for a token and CA head beside its KV; None where CA
    heads keep everything."""
    return scorer_of(settings).state_width if settings.compacts else None
