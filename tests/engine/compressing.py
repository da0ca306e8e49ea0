"""The settings that engines under test compress by: backends, a short locality rule, an uneven head
profile; and the reference of an engine whose heads compete."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, TypeVar

import torch
from engine_process import DEMO_MODEL

from kvtier.heads.model.config import model_shape, read_config
from kvtier.heads.profile import HeadProfile
from kvtier.heads.reference.compaction import AdaptiveSession, CompactingSession
from kvtier.heads.tokens import fit_tokens
from kvtier.retention.locality import LocalityRule
from kvtier.retention.scorers.reconstruction import Reconstruction
from kvtier.retention.shares import FixedShare, Turn
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


@functools.cache
def demo_model() -> Any:
    """The demo model in transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)


@functools.cache
def demo_worth() -> TokenWorth:
    """A map of what the demo model's tokens are worth."""
    return fit_tokens(str(DEMO_MODEL), contexts=3, lengths=[512]).worth


def competing(folder: Path, worth: TokenWorth | None = None) -> dict[str, str]:
    """The settings by which heads compete for what is kept, without a share. worth: is written to
    a file in the folder; None: the demo model's."""
    (demo_worth() if worth is None else worth).save(folder / "worth.npz")
    return {
        "KVTIER_SCORER": "reconstruction",
        "KVTIER_SCORER_FILE": str(folder / "worth.npz"),
        "KVTIER_HEAD_BUDGETS": "adaptive",
    }


Session = TypeVar("Session", AdaptiveSession, CompactingSession)


def keeping(session: Session, share: float) -> Session:
    """The session, which keeps this share of each context."""
    rule = FixedShare(share)
    session.keep_count = lambda prompt, span: rule.choose(Turn(prompt, span)).kept_tokens
    return session


def competing_session(
    share: float, rule: LocalityRule = RULE, chunk_tokens: int = 512, **options: Any
) -> AdaptiveSession:
    """The reference of the demo model's sessions where heads compete."""
    scorer = Reconstruction.of(demo_worth())
    return keeping(AdaptiveSession(demo_model(), rule, chunk_tokens, scorer, **options), share)
