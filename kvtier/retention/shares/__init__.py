"""Share rules: how much of a context CA heads keep. Their interface (base.py), those that kvtier
brings (rules.py), and the registry.

`kvtier serve --quality`, `--retention`, `--budget-tokens` and `--budget-bytes` are the settings of
four of them; `--share-rule NAME=NUMBER` chooses any. A server has one rule; without one, CA heads
keep everything.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from kvtier.errors import UsageError
from kvtier.retention.shares.base import (
    PAGE,
    Choice,
    CurveSource,
    Number,
    Serving,
    ShareRule,
    Turn,
    profile_slots,
    whole_pages,
)
from kvtier.retention.shares.rules import (
    AtMost,
    ByteBudget,
    Everything,
    FixedShare,
    QualityTarget,
    TokenBudget,
)

if TYPE_CHECKING:
    from kvtier.config import Settings

SHARE_RULES: dict[str, type[ShareRule]] = {
    rule.name: rule
    for rule in (
        QualityTarget,
        FixedShare,
        TokenBudget,
        ByteBudget,
    )
}


class ConfiguredShare(NamedTuple):
    """A share rule that settings ask for, and the number that it is made from."""

    rule: type[ShareRule]
    number: float


def configured_share(settings: Settings) -> ConfiguredShare | None:
    """Return the share of a context that CA heads keep in a server with these settings; None:
    everything.

    Raises UsageError for a rule that there is none of, or for a number that it does not take.
    """
    if settings.share_rule is not None:
        return _named_share(settings.share_rule)
    for rule in SHARE_RULES.values():
        number = None if rule.setting is None else attrgetter(rule.setting)(settings)
        if number is not None:
            return ConfiguredShare(rule, number)
    return None


def expected_share(settings: Settings) -> float:
    """The share of a context that plans count with. Raises UsageError like `configured_share`."""
    asked = configured_share(settings)
    return 1.0 if asked is None else asked.rule.expected_share(asked.number)


def reads_nll(settings: Settings) -> bool:
    """Return whether a turn's NLL decides what is kept of it. Raises UsageError like
    `configured_share`."""
    asked = configured_share(settings)
    return asked is not None and asked.rule.needs_nll


def _named_share(text: str) -> ConfiguredShare:
    name, _, written = text.partition("=")
    rule = SHARE_RULES.get(name.strip())
    if rule is None:
        raise UsageError("share_rule", f"NAME=NUMBER with one of {', '.join(SHARE_RULES)}", text)
    try:
        number = float(written)
    except ValueError:
        number = float("nan")
    if not rule.takes.allows(number):
        raise UsageError("share_rule", f"{rule.name}={rule.takes.value}", text)
    return ConfiguredShare(rule, number)


__all__ = [
    "PAGE",
    "SHARE_RULES",
    "AtMost",
    "ByteBudget",
    "Choice",
    "ConfiguredShare",
    "CurveSource",
    "Everything",
    "FixedShare",
    "Number",
    "QualityTarget",
    "Serving",
    "ShareRule",
    "TokenBudget",
    "Turn",
    "configured_share",
    "expected_share",
    "profile_slots",
    "reads_nll",
    "whole_pages",
]
