"""Engines over a tier: what the tests of turns that come back and of changed weights start."""

from __future__ import annotations

from engine_process import DEMO_MODEL

ENGINE = {
    "model_path": str(DEMO_MODEL),
    "max_total_tokens": 40_000,
    "chunked_prefill_size": 512,
    "attention_backend": "kvtier",
    "radix_cache_backend": "kvtier",
}
RULE = {
    "KVTIER_LOCALITY_SINK_TOKENS": "32",
    "KVTIER_LOCALITY_RECENT_TOKENS": "64",
    "KVTIER_LOCALITY_BRANCH_RECENT_TOKENS": "24",
    "KVTIER_TIER_SPAN_TOKENS": "64",
    "KVTIER_HEAD_PROFILE": str(DEMO_MODEL / "head_profile.json"),
}
