"""The digest of a retention policy, as far as it decides which tokens go: a curve holds for one."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from kvtier.heads.profile import HeadProfile
from kvtier.retention.locality import LocalityRule

if TYPE_CHECKING:
    from kvtier.retention.scorers.base import TokenScorer

DIGEST_CHARACTERS = 16
# The version of what scores and shares mean; it counts up whenever an old curve would be misread.
SEMANTICS = 2


def policy_digest(profile: HeadProfile, rule: LocalityRule, scorer: TokenScorer) -> str:
    """Equal for policies that keep the same entries of every context; 16 hexadecimal digits.

    The branching window is left out: it decides who may share a context, not what is kept.
    """
    policy = {
        "semantics": SEMANTICS,
        "ca_heads": profile.ca_heads,
        "sink_tokens": rule.sink_tokens,
        "recent_tokens": rule.recent_tokens,
        **({} if rule.recent_of == 1 else {"recent_of": rule.recent_of}),
        "compensation": rule.compensation,
        scorer.name: scorer.parameters(),
    }
    text = json.dumps(policy, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]
