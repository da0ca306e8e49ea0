"""The limits on the size and depth of a calibration, wherever it is read or written."""

from __future__ import annotations

import json

import pytest
from calibration_samples import curve_document, profile_document
from hypothesis import given
from hypothesis import strategies as st

from kvtier.calibration.documents import (
    MAX_DOCUMENT_BYTES,
    MAX_EXPORT_BYTES,
    load_curve,
    parse_document,
)
from kvtier.calibration.store.transfer import read_export
from kvtier.errors import CalibrationDocumentError
from kvtier.reading import MAX_NESTING, is_too_deep


def nested(depth: int, mark: str) -> str:
    return "[" * depth + "]" * depth if mark == "[" else '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize("document", [curve_document(), profile_document()], ids=["curve", "heads"])
@pytest.mark.parametrize("depth", [MAX_NESTING, 100_000])
@pytest.mark.parametrize("mark", ["[", "{"])
def test_a_nesting_bomb_is_refused_before_it_is_parsed(document, depth, mark):
    content = document.model_dump(mode="json")
    content.get("profile", content)["parameters"] = {"x": "@"}
    text = json.dumps(content).replace('"@"', nested(depth, mark))
    with pytest.raises(CalibrationDocumentError, match=r"^kvtier:v1:.*nested no deeper than 32"):
        parse_document(document.key, text)


def test_a_file_that_never_ends_is_not_read_to_its_end(tmp_path):
    path = tmp_path / "endless.json"
    with path.open("wb") as stream:
        stream.truncate(MAX_EXPORT_BYTES + 2**40)  # a hole: takes no room on the disk
    for reads in (load_curve, read_export):
        with pytest.raises(CalibrationDocumentError, match="larger than"):
            reads(path)


def test_the_largest_document_is_stored_and_read_and_a_larger_one_is_not_stored(store):
    room = MAX_DOCUMENT_BYTES - len(curve_document(parameters={"x": ""}).to_json())
    largest = curve_document(parameters={"x": "x" * (room - 1)})
    assert store.get(store.put(largest)) == largest
    with pytest.raises(CalibrationDocumentError, match=r"^kvtier:v1:.*larger than"):
        store.put(curve_document(parameters={"x": "x" * (room + 1)}))
    assert store.get(largest.key) == largest


def test_one_document_that_is_too_large_does_not_hide_the_other(server, store):
    server.admin.set(str(curve_document().key), b"x" * (4 * MAX_DOCUMENT_BYTES))
    store.put(profile_document())
    with pytest.raises(CalibrationDocumentError, match="larger than"):
        store.get(curve_document().key)
    assert store.get(profile_document().key) is not None


scalars = st.none() | st.integers() | st.text(st.sampled_from('a"\\[]{}'), max_size=40)
values = st.recursive(scalars, lambda v: st.lists(v) | st.dictionaries(st.text("[]{}"), v))


@given(values, st.booleans())
def test_only_structure_counts_and_never_what_a_string_says(value, ascii_only):
    """Brackets in strings are no nesting, however quotes and backslashes stand around them."""
    flat = json.dumps([value, "[" * 99, {"{" * 99: 1}], ensure_ascii=ascii_only)
    assert not is_too_deep(flat.encode())
    assert is_too_deep(f"{json.dumps([value])[:-1]},{nested(MAX_NESTING, '[')}]".encode())
