"""Defaults of a server whose settings leave them open: from files, or from the Redis of the
settings and what was there the last time."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from calibration_samples import SHAPE, profile_document
from redis_server import redis_server

from kvtier.calibration.defaults import (
    DEFAULT_RETENTION,
    WORTH_FILE,
    calibration_folder,
    with_calibration,
)
from kvtier.calibration.documents import MAX_WORTH_BYTES, WorthDocument
from kvtier.calibration.store.directory import open_store
from kvtier.config import load_settings
from kvtier.errors import CalibrationDocumentError
from kvtier.heads.model.config import model_name, model_shape, read_config, weights_revision
from kvtier.retention.rules import scorer_of
from kvtier.retention.token_worth import TokenWorth, feature_width
from kvtier_sglang.compression.calibration import stored_profile

DEMO = Path(__file__).resolve().parents[2] / "models" / "kvtier-demo"
TIER = {"tier": "localhost:7311"}


@pytest.fixture
def model(tmp_path) -> str:
    """A model of its own, whose weights may change."""
    return str(shutil.copytree(DEMO, tmp_path / "model"))


def saved(model: str, file: Path, value: float = 0.0) -> Path:
    """Write weights that are all the same."""
    shape = model_shape(read_config(model))
    width = feature_width(shape.num_kv_heads, shape.head_dim)
    weights = torch.full((shape.num_layers, shape.num_kv_heads, width), value)
    file.parent.mkdir(parents=True, exist_ok=True)
    TokenWorth(weights, weights_revision(model)).save(file)
    return file


def document(model: str, folder: Path, value: float = 0.0) -> WorthDocument:
    file = saved(model, folder / "fitted.npz", value)
    return WorthDocument.of(model_name(model), weights_revision(model), file)


@pytest.fixture
def worth_file(model) -> Path:
    return saved(model, calibration_folder(load_settings(), model) / WORTH_FILE)


def other_weights(model: str) -> None:
    (weights,) = Path(model).glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")


def test_heads_of_a_calibrated_model_compete_for_a_quarter(model, worth_file):
    found = with_calibration(load_settings(), model)
    assert found.competes
    assert found.retention == DEFAULT_RETENTION == 0.25
    assert found.scorer.file == worth_file
    assert scorer_of(found).name == "reconstruction"
    # A child that is told of it finds the same, and so does one that is told of nothing.
    with pytest.MonkeyPatch.context() as patch:
        for name, text in found.to_env().items():
            patch.setenv(name, text)
        assert with_calibration(load_settings(), model) == found
    other = Path(shutil.copy(worth_file, worth_file.with_name("other.npz")))
    assert with_calibration(load_settings(scorer_file=other), model).scorer.file == other
    other_weights(model)
    assert not with_calibration(load_settings(), model).competes, "of another model"


@pytest.mark.parametrize(
    "asked",
    [
        {"retention": 0.1},
        {"quality": 0.9},
        {"budget_tokens": 64},
        {"memory": "memories"},
        {"kernels": "triton"},
        {**TIER, "retention": 0.5, "refresh": "turn", "merge": "keepkv"},
        {**TIER, "refresh": "turn"},
    ],
)
def test_heads_compete_beside_whatever_goes_with_it(asked, model, worth_file):
    found = with_calibration(load_settings(**asked), model)
    share = {} if load_settings(**asked).compacts else {"retention": DEFAULT_RETENTION}
    assert found.competes
    assert found == load_settings(
        **share | asked, head_budgets="adaptive", scorer="reconstruction", scorer_file=worth_file
    )


@pytest.mark.parametrize(
    "asked",
    [
        {"head_budgets": "equal"},
        {"head_profile": "profile.json"},
        {"scorer": "keydiff"},
    ],
)
def test_what_excludes_competing_heads_stays_as_it_was_asked_for(asked, model, worth_file):
    settings = load_settings(**asked)
    assert with_calibration(settings, model) == settings


def test_where_everything_is_kept_a_refresh_has_nothing_to_choose(model):
    asked = {**TIER, "refresh": "turn", "merge": "keepkv"}
    assert with_calibration(load_settings(**asked), model) == load_settings(**TIER)
    equal = load_settings(**asked, retention=0.5)
    assert with_calibration(equal, model) == equal


def test_more_ranks_than_heads_keep_everything(model, worth_file):
    settings = load_settings()
    heads = model_shape(read_config(model)).num_kv_heads
    assert with_calibration(settings, model, ranks=heads).competes
    assert with_calibration(settings, model, ranks=heads + 1) == settings


def test_a_server_with_an_empty_folder_finds_it_in_redis(server, model, tmp_path):
    settings = load_settings(redis_url=server.url)
    assert with_calibration(settings, model) == settings
    assert not settings.compacts
    with open_store(settings) as store:
        store.put(document(model, tmp_path))
    found = with_calibration(settings, model)
    assert found.competes
    assert found.scorer.file == calibration_folder(settings, model) / WORTH_FILE
    assert not TokenWorth.load(found.scorer.file).weights.any()
    # A fit that is newer replaces it.
    with open_store(settings) as store:
        store.put(document(model, tmp_path, 1.0))
    assert TokenWorth.load(with_calibration(settings, model).scorer.file).weights.all()
    other_weights(model)
    assert not with_calibration(settings, model).competes, "under another key"


def test_a_redis_that_is_gone_or_holds_something_else_leaves_the_last_one(model, tmp_path):
    with redis_server() as server:
        settings = load_settings(redis_url=server.url)
        with open_store(settings) as store:
            key = store.put(document(model, tmp_path))
        first = with_calibration(settings, model)
        for text in (b"\xff no document", document(model, tmp_path).to_json().encode()[:-100]):
            server.admin.set(str(key), text)
            assert with_calibration(settings, model) == first
        server.admin.delete(str(key))
        assert with_calibration(settings, model) == first
    assert with_calibration(settings, model) == first
    assert first.competes


def test_one_of_the_largest_comes_back_whole_and_a_larger_one_is_refused(store, tmp_path):
    file = tmp_path / "large.npz"
    # In base64, and a little room for the rest of the document.
    file.write_bytes(b"\xa5" * ((MAX_WORTH_BYTES - 4096) // 4 * 3))
    largest = WorthDocument.of("m", "r", file)
    assert store.get(store.put(largest)) == largest
    file.write_bytes(b"\xa5" * (MAX_WORTH_BYTES // 4 * 3))
    with pytest.raises(CalibrationDocumentError, match=r"kvtier:v1:worth:m:r: document: larger"):
        store.put(WorthDocument.of("m", "r", file))


def test_a_stored_profile_is_used_until_it_is_deleted_whatever_becomes_of_the_store(tmp_path):
    (tmp_path / "model").mkdir()
    settings, kept = load_settings(), profile_document(model="model", revision=None)

    def found(shape=SHAPE):
        return stored_profile(settings, str(tmp_path / "model"), shape)

    assert found() is None
    with open_store(settings) as store:
        key = store.put(kept)
        assert found() == kept.profile
        assert found(SHAPE.model_copy(update={"head_dim": 16})) is None
        store.path(key).write_text("no json")
        assert found() == kept.profile, "the last known one"
        store.delete(key)
        assert found() is None
        store.path(key).write_text("no json")
        assert found() is None, "a deleted one does not come back"
