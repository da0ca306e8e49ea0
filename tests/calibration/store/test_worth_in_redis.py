"""The worth of tokens comes from the Redis of the settings, and stays where that is away."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from redis_server import redis_server

from kvtier.calibration.defaults import WORTH_FILE, calibration_folder, with_calibration
from kvtier.calibration.documents import MAX_WORTH_BYTES, WorthDocument
from kvtier.calibration.store.opening import open_store
from kvtier.config import load_settings
from kvtier.errors import CalibrationDocumentError
from kvtier.heads.model.config import model_name, model_shape, read_config, weights_revision
from kvtier.retention.token_worth import TokenWorth, feature_width

DEMO = Path(__file__).resolve().parents[3] / "models" / "kvtier-demo"


@pytest.fixture
def model(tmp_path):
    return str(shutil.copytree(DEMO, tmp_path / "model"))


def fitted(model: str, folder: Path, value: float = 0.0) -> WorthDocument:
    """Return the document of weights that are all the same."""
    shape = model_shape(read_config(model))
    width = feature_width(shape.num_kv_heads, shape.head_dim)
    weights = torch.full((shape.num_layers, shape.num_kv_heads, width), value)
    TokenWorth(weights, weights_revision(model)).save(folder / "fitted.npz")
    return WorthDocument.of(model_name(model), weights_revision(model), folder / "fitted.npz")


def test_a_server_with_an_empty_folder_finds_it_in_redis(server, model, tmp_path):
    settings = load_settings(redis_url=server.url)
    assert not with_calibration(settings, model).competes
    with open_store(settings) as store:
        store.put(fitted(model, tmp_path))
    found = with_calibration(settings, model)
    assert found.competes
    assert found.scorer.file == calibration_folder(settings, model) / WORTH_FILE
    assert not TokenWorth.load(found.scorer.file).weights.any()
    # A fit that is newer replaces it.
    with open_store(settings) as store:
        store.put(fitted(model, tmp_path, 1.0))
    assert TokenWorth.load(with_calibration(settings, model).scorer.file).weights.all()


def test_a_redis_that_is_gone_or_holds_something_else_leaves_the_last_one(model, tmp_path):
    with redis_server() as server:
        settings = load_settings(redis_url=server.url)
        with open_store(settings) as store:
            key = store.put(fitted(model, tmp_path))
        first = with_calibration(settings, model)
        for text in (b"\xff no document", fitted(model, tmp_path).to_json().encode()[:-100]):
            server.admin.set(str(key), text)
            assert with_calibration(settings, model) == first
        server.admin.delete(str(key))
        assert with_calibration(settings, model) == first
    assert with_calibration(settings, model) == first
    assert first.competes


def test_other_weights_have_another_key(server, model, tmp_path):
    settings = load_settings(redis_url=server.url)
    with open_store(settings) as store:
        store.put(fitted(model, tmp_path))
    (weights,) = Path(model).glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert not with_calibration(settings, model).competes


def test_one_of_the_largest_comes_back_whole_and_a_larger_one_is_refused(store, tmp_path):
    file = tmp_path / "large.npz"
    # In base64, and a little room for the rest of the document.
    file.write_bytes(b"\xa5" * ((MAX_WORTH_BYTES - 4096) // 4 * 3))
    document = WorthDocument.of("m", "r", file)
    assert store.get(store.put(document)) == document
    file.write_bytes(b"\xa5" * (MAX_WORTH_BYTES // 4 * 3))
    with pytest.raises(CalibrationDocumentError, match=r"kvtier:v1:worth:m:r: document: larger"):
        store.put(WorthDocument.of("m", "r", file))
