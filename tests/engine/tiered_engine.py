"""Engines over a tier: what the tests of turns that come back and of changed weights start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine_process import DEMO_MODEL, run_engine

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
# The same where heads compete.
COMPETING_RULE = {name: value for name, value in RULE.items() if name != "KVTIER_HEAD_PROFILE"}


def as_flags(settings: Mapping[str, str]) -> list[str]:
    """Return the flags of a server that stand for settings of its environment."""
    names = (name.removeprefix("KVTIER_").lower().replace("_", "-") for name in settings)
    pairs = zip(names, settings.values(), strict=True)
    return [text for name, value in pairs for text in (f"--{name}", value)]


def continued(
    rounds: list[list[dict[str, Any]]], answers: list[list[dict[str, Any]]], sessions: int
) -> list[list[dict[str, Any]]]:
    """The last turns as a server sees them that knows nothing of those before. Rounds have one
    request each, a turn of every session after the other."""
    return [
        [
            {
                **{name: value for name, value in request.items() if name != "continues"},
                "input_ids": [*before["prompt"], *before["output_ids"], *request["input_ids"]],
            }
        ]
        for (before,), (request,) in zip(answers[-sessions:], rounds[-sessions:], strict=True)
    ]


def run_never_missing(
    folder: Path,
    rounds: list[list[dict[str, Any]]],
    env: dict[str, str],
    engine: dict[str, Any] = ENGINE,
) -> dict[str, Any]:
    """Return what an engine answers that had every turn refreshed that could be."""
    out = run_engine(folder, engine, rounds, env)
    assert not out["state"]["tier"].get("refresh_missed")
    return out
