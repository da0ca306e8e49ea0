"""A curve for a server whose KV cache has another dtype than the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvtier.calibration.kept_shares import EqualBudgets
from kvtier.calibration.measuring import calibrate_curve, curve_samples
from kvtier.config import Settings
from kvtier.errors import UsageError
from kvtier.heads.model.loading import load_model
from kvtier.heads.probes.context import HeadProbe
from kvtier.heads.profile import load_profile
from kvtier.retention.locality import LocalityRule
from kvtier.retention.scorers.simple import DistinctKeys

MODEL = Path(__file__).resolve().parents[3] / "models" / "kvtier-demo"
PROFILE = load_profile(MODEL / "head_profile.json")


def test_the_curve_of_an_fp8_cache_is_measured_with_kv_rounded_to_it():
    probe = HeadProbe(load_model(str(MODEL)), LocalityRule(4, 16, 8))
    (sample,) = curve_samples(str(MODEL), [512], 1, seed=1)
    exact, rounded = (
        EqualBudgets(probe, PROFILE, DistinctKeys(), kv_dtype=dtype)(sample)
        for dtype in (None, torch.float8_e4m3fn)
    )
    for plain, stored in zip(exact.batch.layers, rounded.batch.layers, strict=True):
        assert plain.middle is not None
        assert stored.middle is not None
        for a, b in zip(plain.middle[:2], stored.middle[:2], strict=True):
            assert torch.equal(b, b.to(torch.float8_e4m3fn).float())
            assert not torch.equal(a, b)
    every = exact.middle_tokens
    assert rounded.loss(every) == pytest.approx(exact.loss(every), rel=0.2)


def test_it_is_the_one_that_an_fp8_server_asks_for():
    found = calibrate_curve(
        str(MODEL), PROFILE, Settings(), lengths=[768], contexts=4, dtype="fp8_e4m3"
    )
    assert found.document.dtype == "float8_e4m3fn"


def test_a_dtype_that_no_cache_has_is_refused():
    with pytest.raises(UsageError, match=r"^--dtype: expected one of float32"):
        calibrate_curve(str(MODEL), PROFILE, Settings(), lengths=[768], dtype="int8")
