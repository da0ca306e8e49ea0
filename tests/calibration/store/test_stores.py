"""Every store of calibrations lists, replaces and deletes; documents in files are whole or not
there, wherever a model's name would lead."""

from __future__ import annotations

import threading

import pytest
from calibration_samples import curve_document, profile_document
from hypothesis import given
from hypothesis import strategies as st

from kvtier.calibration.keys import Key
from kvtier.calibration.store.directory import DirectoryStore, _key_of, open_store
from kvtier.config import load_settings
from kvtier.errors import CalibrationDocumentError, StoreUnavailableError


@pytest.fixture
def files(tmp_path):
    return DirectoryStore(tmp_path / "data" / "calibration")


@pytest.mark.parametrize("kind", ["files", "store"])
def test_what_was_put_is_listed_replaced_and_deleted(kind, request):
    store = request.getfixturevalue(kind)
    documents = [curve_document(), profile_document(), curve_document(policy="other")]
    keys = [store.put(document) for document in documents]
    assert [store.get(key) for key in keys] == documents
    assert [stored.key for stored in store.list()] == sorted(keys, key=str)
    store.put(curve_document(r2=0.5))
    assert store.get(keys[0]).r2 == 0.5
    assert [store.delete(key) for key in (*keys, keys[0])] == [True, True, True, False]
    assert store.get(keys[0]) is None
    assert store.list() == ()


def test_files_are_what_one_gets_without_a_redis(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTIER_DATA_DIR", str(tmp_path / "data"))
    document = curve_document()
    with open_store(load_settings()) as store:
        assert store.list() == ()
        assert store.get(document.key) is None
        assert not (tmp_path / "data").exists(), "reading makes nothing"
        store.put(document)
    with open_store(load_settings()) as store:
        assert store.get(document.key) == document


def test_files_of_others_are_not_ours_and_a_damaged_one_is_refused_by_its_key(files):
    key = files.put(curve_document())
    folder = files.path(key).parent
    (folder / "notes.json").write_text("{}")
    (folder / "curve:a:b:c.json").write_text("{}")
    (folder / "curve:half.tmp").write_text("{")
    assert [(one.key, one.ttl_s) for one in files.list()] == [(key, None)]
    files.path(key).write_text('{"half a docu')
    with pytest.raises(CalibrationDocumentError, match=r"kvtier:v1:curve"):
        files.get(key)


parts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)


@given(parts | st.sampled_from([".", "..", "a/../b", "%2E", "~"]), parts, parts)
def test_every_key_has_a_place_of_its_own_within_the_directory(tmp_path_factory, model, rev, name):
    directory = tmp_path_factory.getbasetemp() / "keys"
    store = DirectoryStore(directory)
    for kind in ("curve", "memory"):
        key = Key.of(kind, model, rev, name)
        path = store.path(key)
        assert path.resolve().is_relative_to(directory.resolve())
        assert len(path.relative_to(directory).parts) == 3
        assert _key_of(path) == key


def test_a_reader_never_sees_half_of_a_document(files):
    key, over = files.put(curve_document(r2=0.0)), threading.Event()

    def write() -> None:
        for number in range(200):
            files.put(curve_document(r2=number / 1000))
        over.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    while not over.is_set():
        seen.append(files.get(key).r2)
    writer.join()
    assert seen == sorted(seen)
    assert [path.name for path in files.path(key).parent.iterdir()] == [files.path(key).name]


def test_a_place_that_cannot_be_one_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    store = DirectoryStore(tmp_path / "file")
    assert store.get(curve_document().key) is None
    with pytest.raises(StoreUnavailableError, match="file"):
        store.put(curve_document())
