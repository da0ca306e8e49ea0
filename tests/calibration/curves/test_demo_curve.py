"""The stored calibration of the demo model belongs to its weights, its head profile and the
default settings, and says what the model card says.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from thorough import THOROUGH

from kvtier.calibration.curves import goodness
from kvtier.calibration.documents import load_curve
from kvtier.calibration.kept_shares import Budgets, measure_curve
from kvtier.calibration.keys import policy_digest
from kvtier.calibration.measuring import curve_samples
from kvtier.config import Settings
from kvtier.heads.model.config import model_name, weights_revision
from kvtier.heads.model.loading import load_model
from kvtier.heads.profile import load_profile
from kvtier.retention.rules import locality_rule, scorer_of

MODEL = Path(__file__).resolve().parents[3] / "models" / "kvtier-demo"


def test_a_server_with_default_settings_asks_for_the_stored_curve_by_which_dense_text_keeps_more(
    monkeypatch,
):
    monkeypatch.chdir(MODEL)  # no kvtier.toml is there
    settings, profile = Settings(), load_profile(MODEL / "head_profile.json")
    policy = policy_digest(profile, locality_rule(settings), scorer_of(settings))
    revision = weights_revision(str(MODEL))
    curve = load_curve(MODEL / "curve.json")
    curve.check_fits(model_name(str(MODEL)), revision, policy, "float32")
    filler, dense = (curve.retention(0.95, nll) for nll in (1.73, 3.82))
    assert filler < 0.2
    assert dense > 0.5
    assert curve.held_out_rmse <= 0.06


@pytest.mark.slow
@pytest.mark.parametrize(("length", "contexts"), [(4096, 8 if THOROUGH else 4), (8192, 4)])
def test_the_curve_predicts_contexts_of_another_seed_and_another_length(length, contexts):
    settings, profile = Settings(), load_profile(MODEL / "head_profile.json")
    model, scorer = load_model(str(MODEL)), scorer_of(settings)
    measured = measure_curve(
        Budgets(model, locality_rule(settings), scorer, profile),
        curve_samples(str(MODEL), [length], contexts, seed=1),
    )
    # Few contexts: what 24 and 10 of them give is in the model card, at most 0.078.
    assert goodness(load_curve(MODEL / "curve.json").curve, measured).rmse < 0.1
