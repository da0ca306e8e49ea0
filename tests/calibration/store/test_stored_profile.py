"""The head profile that a server starts with: the store's, or the last one that it had."""

from __future__ import annotations

from calibration_samples import SHAPE, profile_document

from kvtier.calibration.store.opening import open_store
from kvtier.config import load_settings
from kvtier_sglang.compression.calibration import stored_profile


def test_a_stored_profile_is_used_until_it_is_deleted_whatever_becomes_of_the_store(tmp_path):
    (tmp_path / "model").mkdir()
    settings, document = load_settings(), profile_document(model="model", revision=None)

    def found(shape=SHAPE):
        return stored_profile(settings, str(tmp_path / "model"), shape)

    assert found() is None
    with open_store(settings) as store:
        key = store.put(document)
        assert found() == document.profile
        assert found(SHAPE.model_copy(update={"head_dim": 16})) is None
        store.path(key).write_text("no json")
        assert found() == document.profile, "the last known one"
        store.delete(key)
        assert found() is None
        store.path(key).write_text("no json")
        assert found() is None, "a deleted one does not come back"
