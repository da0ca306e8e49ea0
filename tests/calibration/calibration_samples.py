"""Documents and measurements that the calibration tests share."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.calibration.curves import Curve, Measurement
from kvtier.calibration.documents import CurveDocument, MemoryDocument, ProfileDocument
from kvtier.calibration.evidence import Evidence
from kvtier.heads.profile import ModelShape, window_profile

MODEL, REVISION, POLICY, DTYPE = "org/model:7b", "0123456789abcdef", "compactor-32", "float32"
SHAPE = ModelShape(num_layers=2, num_kv_heads=3, num_attention_heads=6, head_dim=8)


def curve_document(**changes: Any) -> CurveDocument:
    """A curve, and points on it that it fits without an error."""
    fields: dict[str, Any] = {
        "model": MODEL,
        "revision": REVISION,
        "policy": POLICY,
        "dtype": DTYPE,
        "alpha": 0.2,
        "beta": -0.1,
        "power": 1.5,
        "nll_min": 1.0,
        "nll_max": 4.0,
        "rmse": 0.0,
        "r2": 0.97,
        "held_out_rmse": 0.03,
        "contexts": 40,
        "retentions": (0.1, 0.5, 0.9),
        "answer_floor_nats": 0.1,
    } | changes
    ends = fields["nll_min"], fields["nll_max"]
    curve = Curve(fields["alpha"], fields["beta"], fields["power"], *ends)
    points = [(n, share, curve.quality(share, n)) for n in ends for share in fields["retentions"]]
    exact = Evidence(underestimate_weight=1, weighted_rmse=0, points=points)
    return CurveDocument(**fields, measurements=len(points), evidence=exact)


def profile_document(**changes: Any) -> ProfileDocument:
    fields = {"model": MODEL, "revision": REVISION, **changes}
    profile = window_profile(SHAPE).model_copy(update=fields)
    return ProfileDocument.of(profile)


def memory_document(**changes: Any) -> MemoryDocument:
    fields: dict[str, Any] = {
        "model": MODEL,
        "revision": REVISION,
        "name": "tools",
        "location": "/srv/memories/tools",
        "digest": "ab" * 32,
        "prefix_digest": "0123456789abcdef",
        "prefix_tokens": 1400,
        "dtype": DTYPE,
        "requeue_above": 0.4,
        "nll_gap": 0.0061,
        "held_share": 0.218,
    }
    return MemoryDocument(**(fields | changes))


def synthetic(
    alpha: float,
    beta: float,
    noise: float,
    *,
    power: float = 1.0,
    contexts: int = 40,
    retentions: tuple[float, ...] = (0.1, 0.25, 0.5, 0.75, 0.9),
    seed: int = 0,
) -> list[Measurement]:
    """Return what a model whose true curve is (alpha, beta, power) would measure, with Gaussian
    noise."""
    rng = np.random.default_rng(seed)
    found = []
    for context in range(contexts):
        nll = float(rng.uniform(1.0, 4.0))
        true = Curve(alpha, beta, power, nll, nll)
        for retention in retentions:
            ratio = true.quality(retention, nll) + noise * rng.standard_normal()
            found.append(Measurement(nll, retention, max(float(ratio), 0.0), context))
    return found
