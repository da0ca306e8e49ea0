"""The defaults of a server where its settings leave them open."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from kvtier.calibration.defaults import (
    DEFAULT_RETENTION,
    WORTH_FILE,
    calibration_folder,
    with_calibration,
)
from kvtier.config import load_settings
from kvtier.heads.model.config import model_shape, read_config, weights_revision
from kvtier.retention.rules import scorer_of
from kvtier.retention.token_worth import TokenWorth, feature_width

DEMO = Path(__file__).resolve().parents[2] / "models" / "kvtier-demo"
TIER = {"tier": "localhost:7311", "retention": 0.5}


@pytest.fixture
def model(tmp_path):
    """A model of its own, whose weights may change."""
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


@pytest.fixture
def worth_file(model):
    shape = model_shape(read_config(str(model)))
    width = feature_width(shape.num_kv_heads, shape.head_dim)
    weights = torch.zeros(shape.num_layers, shape.num_kv_heads, width)
    file = calibration_folder(load_settings(), str(model)) / WORTH_FILE
    file.parent.mkdir(parents=True)
    TokenWorth(weights, weights_revision(str(model))).save(file)
    return file


def test_a_model_that_is_not_calibrated_keeps_what_was_asked_for(model):
    settings = load_settings()
    assert with_calibration(settings, str(model)) == settings
    assert not settings.compacts


def test_heads_of_a_calibrated_model_compete_for_a_quarter(model, worth_file):
    found = with_calibration(load_settings(), str(model))
    assert found.competes
    assert found.retention == DEFAULT_RETENTION == 0.25
    assert found.scorer.file == worth_file
    assert scorer_of(found).name == "reconstruction"
    # A child that is told of it finds the same, and so does one that is told of nothing.
    with pytest.MonkeyPatch.context() as patch:
        for name, text in found.to_env().items():
            patch.setenv(name, text)
        assert with_calibration(load_settings(), str(model)) == found


@pytest.mark.parametrize("asked", [{"retention": 0.1}, {"quality": 0.9}, {"budget_tokens": 64}])
def test_how_much_is_kept_is_what_was_asked_for(asked, model, worth_file):
    found = with_calibration(load_settings(**asked), str(model))
    assert found.competes
    assert found == load_settings(
        **asked, head_budgets="adaptive", scorer="reconstruction", scorer_file=worth_file
    )


@pytest.mark.parametrize(
    "asked",
    [
        {"head_budgets": "equal"},
        {"head_profile": "profile.json"},
        {"scorer": "keydiff"},
        {**TIER, "refresh": "turn", "refresh_by": "near-data"},
    ],
)
def test_what_excludes_competing_heads_stays_as_it_was_asked_for(asked, model, worth_file):
    settings = load_settings(**asked)
    assert with_calibration(settings, str(model)) == settings


@pytest.mark.parametrize(
    "asked",
    [
        {"memory": "memories"},
        {"kernels": "flashinfer"},
        {**TIER, "refresh": "64"},
        {**TIER, "refresh": "turn", "merge": "keepkv"},
    ],
)
def test_heads_compete_beside_whatever_goes_with_it(asked, model, worth_file):
    found = with_calibration(load_settings(**asked), str(model))
    assert found == load_settings(
        **{"retention": DEFAULT_RETENTION} | asked,
        head_budgets="adaptive",
        scorer="reconstruction",
        scorer_file=worth_file,
    )


def test_another_file_may_be_named(model, worth_file, tmp_path):
    other = Path(shutil.copy(worth_file, tmp_path / "other.npz"))
    assert with_calibration(load_settings(scorer_file=other), str(model)).scorer.file == other


def test_more_ranks_than_heads_keep_everything(model, worth_file):
    settings = load_settings()
    heads = model_shape(read_config(str(model))).num_kv_heads
    assert with_calibration(settings, str(model), ranks=heads).competes
    assert with_calibration(settings, str(model), ranks=heads + 1) == settings


def test_weights_that_changed_are_another_model(model, worth_file):
    (weights,) = model.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert not with_calibration(load_settings(), str(model)).competes
