"""Leverage of the demo model's own keys, before rotation, against an SVD in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_scores import exact_leverage, rank_correlation

pytest.importorskip("transformers")
pytest.importorskip("pydantic")

from kvtier.calibration.measuring import curve_samples
from kvtier.heads.model.config import model_shape, read_config
from kvtier.heads.model.loading import load_model
from kvtier.heads.profile import full_profile
from kvtier.heads.reference.compaction import ScoredSession
from kvtier.heads.reference.rotation import rotation_of
from kvtier_kernels.scores import leverage_scores, unrotate

MODEL = str(Path(__file__).resolve().parents[2] / "models" / "kvtier-demo")


def test_leverage_ranks_the_demo_models_tokens_as_the_svd_does() -> None:
    (sample,) = curve_samples(MODEL, [4096], count=1, seed=5)
    model = load_model(MODEL)
    shape = model_shape(read_config(MODEL))
    session = ScoredSession(model, full_profile(shape))
    session.turn(sample.context_ids, 0)
    for layer in range(shape.num_layers):
        rotated = session.exact_kv(layer)[0]
        positions = torch.arange(rotated.shape[1], device=rotated.device)
        rotation = rotation_of(model, layer, positions)
        assert rotation is not None
        true = exact_leverage(unrotate(rotated, rotation.cos, rotation.sin))
        for dtype in (torch.float32, torch.bfloat16):
            for got, wanted in zip(leverage_scores(rotated.to(dtype), rotation), true, strict=True):
                assert rank_correlation(got, wanted) > 0.99
