"""A server's tier from its settings: the connection, and the names of its KV there."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from typing import Any

from kvtier.config import Settings
from kvtier.config.sections import TierSettings
from kvtier.heads.model.config import model_name
from kvtier.heads.profile import HeadProfile
from kvtier.retention.locality import LocalityRule
from kvtier.retention.rules import scorer_of
from kvtier.retention.shares import configured_share, reads_nll
from kvtier.tier.blobs.keys import KvIdentity
from kvtier.tier.blobs.names import ContextNames
from kvtier.tier.client import TierClient, TlsPaths
from kvtier.tier.link.link import TierLink
from kvtier_sglang.pool.kv_pool import HeadPagedKVPool
from kvtier_sglang.ranks import Ranks
from kvtier_sglang.tier.identity import ModelIdentity
from kvtier_sglang.tracing.tracer import interceptors

# The version of what the stored bytes and records mean. It counts up whenever old ones would be
# misread.
SEMANTICS = 1


def tier_link(tier: TierSettings) -> TierLink:
    """Return the connection to the tier's address. The tier need not be there, now or ever."""
    assert tier.address is not None, "no tier in the settings"
    tls: TlsPaths | None = None
    if tier.ca is not None:
        assert tier.certificate is not None
        assert tier.key is not None
        tls = TlsPaths(tier.ca, tier.certificate, tier.key)
    client = TierClient(
        tier.address,
        tier.namespace,
        timeout_s=tier.timeout_s,
        tls=tls,
        shared=tier.shared_memory,
        interceptors=interceptors(),
    )
    return TierLink(client, buffer_bytes=tier.buffer_bytes, settle_s=tier.patience_s)


class NamedModel(ModelIdentity):
    """A model runner's model as the connector asks about it: its identity, and what decides what is
    kept of its KV, and with what. profile: of the whole model; the pool has this rank's part."""

    def __init__(
        self,
        model_runner: Any,
        settings: Settings,
        rule: LocalityRule,
        profile: HeadProfile,
        ranks: Ranks,
    ) -> None:
        super().__init__(model_runner, model_runner.server_args)
        self._span_tokens = settings.tier.span_tokens
        pool: HeadPagedKVPool = model_runner.token_to_kv_pool
        shape, model_path = pool.shape, model_runner.server_args.model_path
        self._known = KvIdentity(
            model=model_name(model_path),
            revision="",
            dtype=str(pool.dtype).removeprefix("torch."),
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            tp_rank=ranks.rank,
            tp_size=ranks.size,
            policy=_policy(settings, profile, rule),
            scores=_scores(settings) if pool.state is not None else "",
        )

    def names(self) -> ContextNames:
        """Return the names of its KV in the tier, as the model is loaded now."""
        identity = replace(self._known, revision=self.digest())
        return ContextNames(identity, self._span_tokens)


def _policy(settings: Settings, profile: HeadProfile, rule: LocalityRule) -> str:
    """Return a digest of everything that decides what a later turn sees of an earlier one."""
    scorer, share = scorer_of(settings), configured_share(settings)
    # Where nothing is coded the digest is what it was before there were codes.
    coded = {} if settings.kept_dtype is None else {"kept_dtype": settings.kept_dtype}
    return _digest(
        {
            **coded,
            "ca_heads": profile.ca_heads,
            "rule": asdict(rule),
            "competes": settings.competes,
            "share": None if share is None else [share.rule.name, share.number],
            scorer.name: scorer.parameters(),
        }
    )


def _scores(settings: Settings) -> str:
    """Return a digest of what is stored beside the KV."""
    scorer = scorer_of(settings)
    state = [scorer.name, scorer.state_parameters()] if scorer.state_width else None
    stride = settings.nll_stride if reads_nll(settings) else None
    return _digest({"state": state, "nll_stride": stride})


def _digest(value: object) -> str:
    text = json.dumps([SEMANTICS, value], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
