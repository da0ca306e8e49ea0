"""kvtier's side of the comparison of token scorers: the real engine, one process per setting.

heads "all":     every KV head is context-anchored, so retention is the share kept: like for like
                 with a press, which compresses every head and protects 8 + 4 tokens
heads "profile": the model's head profile and kvtier's own windows, retention chosen for the
                 same bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from benchmarks.accuracy.compactor_records import Record
from benchmarks.common.recall_arguments import DEMO_MODEL
from benchmarks.common.recall_contexts import RecallContext
from benchmarks.common.recall_engine import PROFILE_FILE, ask_engine
from kvtier.config import load_settings
from kvtier.heads.model.config import model_shape, read_config
from kvtier.heads.profile import HeadProfile, full_profile, load_profile
from kvtier.pool_sizing import slot_bytes
from kvtier.retention.scorers import SCORERS
from kvtier.retention.scorers.simple import DistinctKeys
from kvtier.retention.shares import PAGE

Heads = Literal["all", "profile"]
METHODS: dict[Heads, str] = {"all": "kvtier", "profile": "kvtier + head profile"}
DEFAULT_SCORER = DistinctKeys.name
# The first and last tokens kept unseen: those of kvpress's CompactorPress, where heads are alike.
# kvtier's own windows (128 + 256) would be most of what a tenth of 4k may keep.
WINDOWS: dict[Heads, dict[str, str]] = {
    "all": {"LOCALITY_SINK_TOKENS": "8", "LOCALITY_RECENT_TOKENS": "4"},
    "profile": {},
}
DTYPE_BYTES = 4  # float32, as in the peer


def run_engine(
    contexts: Sequence[RecallContext],
    kept_shares: Sequence[float],
    heads: Heads,
    model: Path = DEMO_MODEL,
    scorer: str = DEFAULT_SCORER,
) -> list[Record]:
    """Recall and measured bytes of every context at every share. Raises WorkerError."""
    profile = head_profile(model, heads)
    records = []
    for share in kept_shares:
        tokens = len(contexts[0].context_ids)
        retention = retention_for(share, profile, tokens, scorer=scorer)
        settings = {**WINDOWS[heads], "RETENTION": f"{retention:.9f}", "SCORER": scorer}
        records += [
            Record(
                method=method_name(heads, scorer),
                kind=asked.kind,
                context=asked.context,
                kept_share=share,
                recalls=asked.recalls,
                kv_bytes=asked.kv_bytes,
            )
            for asked in ask_engine(contexts, model, profile, settings)
        ]
    return records


def method_name(heads: Heads, scorer: str) -> str:
    """Return the method's name in a table: the default scorer is what users get, and has no name of
    its own."""
    return METHODS[heads] if scorer == DEFAULT_SCORER else f"{METHODS[heads]}, {scorer}"


def head_profile(model: Path, heads: Heads) -> HeadProfile:
    """Every head context-anchored, or the profile stored with the model."""
    if heads == "profile":
        return load_profile(model / PROFILE_FILE)
    return full_profile(model_shape(read_config(str(model))), model.name)


def retention_for(
    share: float,
    profile: HeadProfile,
    context_tokens: int,
    *,
    merges: bool = False,
    scorer: str = DEFAULT_SCORER,
) -> float:
    """Retention of the CA heads at which the cache takes `share` of the bytes of an exact one.

    What kvtier remembers beside keys and values (scores, votes) is paid from the same bytes. 1
    where the profile alone already keeps less; never below what one token is. Every head keeps sink
    and recent, a locality head a page for its one entry beside them.
    """
    if share == 1:
        return 1.0
    edges = min(load_settings().locality.kept_tokens(competes=False), context_tokens)
    heads = profile.shape.num_layers * profile.shape.num_kv_heads
    local = heads - profile.num_ca_heads
    votes = profile.shape.group_size if merges else int(local > 0)
    width = SCORERS[scorer].state_width
    ours = slot_bytes(profile.shape, DTYPE_BYTES, state_width=width, votes=votes)
    slots = share * context_tokens * slot_bytes(profile.shape, DTYPE_BYTES) / ours
    entries = (heads * (slots - edges) - local * PAGE) / profile.num_ca_heads
    return min(1.0, max(1.0, edges + entries) / context_tokens)
