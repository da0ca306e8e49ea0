"""The settings that engines under test compress by: backends, a short locality rule, an uneven head
profile."""

from __future__ import annotations

from pathlib import Path

from engine_process import DEMO_MODEL

from kvtier.heads.model.config import model_shape, read_config
from kvtier.heads.profile import HeadProfile
from kvtier.retention.locality import LocalityRule
from kvtier.retention.token_worth import TokenWorth

POLICIES = {
    "stock": {"attention_backend": "torch_native"},
    "full": {"attention_backend": "kvtier"},
    "kvtier": {"attention_backend": "kvtier", "radix_cache_backend": "kvtier"},
}


RULE = LocalityRule(sink_tokens=16, recent_tokens=48, branch_recent_tokens=24)
RULE_ENV = {
    "KVTIER_LOCALITY_SINK_TOKENS": str(RULE.sink_tokens),
    "KVTIER_LOCALITY_RECENT_TOKENS": str(RULE.recent_tokens),
    "KVTIER_LOCALITY_BRANCH_RECENT_TOKENS": str(RULE.branch_recent_tokens),
}


def uneven_profile() -> HeadProfile:
    """A layer with all heads CA, one with a gap in its CA heads, and one with none."""
    shape = model_shape(read_config(str(DEMO_MODEL)))
    return HeadProfile(
        model="test", shape=shape, method="test", ca_heads=((), (0, 2), (0, 1, 2, 3))
    )


def competing(folder: Path, worth: TokenWorth) -> dict[str, str]:
    """The settings by which heads compete for what is kept, without a share. worth: is written to
    a file in the folder."""
    worth.save(folder / "worth.npz")
    return {
        "KVTIER_SCORER": "reconstruction",
        "KVTIER_SCORER_FILE": str(folder / "worth.npz"),
        "KVTIER_HEAD_BUDGETS": "adaptive",
    }
