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
    check_json_limits,
    load_curve,
    parse_document,
)
from kvtier.calibration.store.directory import LocalCopy
from kvtier.calibration.store.transfer import read_export
from kvtier.errors import CalibrationDocumentError
from kvtier.reading import MAX_NESTING

DEPTHS = (MAX_NESTING, 190, 1000, 100_000)
DOCUMENTS = (curve_document(), profile_document())
NAMES = ("curve", "profile")


def with_parameters(document, text: str) -> str:
    """The document's JSON with `text` as the only parameter."""
    content = document.model_dump(mode="json")
    content.get("profile", content)["parameters"] = {"x": "@"}
    return json.dumps(content).replace('"@"', text)


def nested(depth: int, mark: str) -> str:
    return "[" * depth + "]" * depth if mark == "[" else '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("mark", ["[", "{"])
def test_a_nesting_bomb_is_refused_before_it_is_parsed(document, depth, mark, tmp_path):
    text = with_parameters(document, nested(depth, mark))
    with pytest.raises(CalibrationDocumentError, match=r"^kvtier:v1:.*nested deeper than 32"):
        parse_document(document.key, text)
    path = LocalCopy(tmp_path).path(document.key)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert LocalCopy(tmp_path).load(document.key) is None
    with pytest.raises(CalibrationDocumentError, match=f"{path}: .*nested deeper"):
        load_curve(path)
    path.write_text(json.dumps({"schema_version": 1, "documents": {}})[:-2] + f'"a":{text}}}}}')
    with pytest.raises(CalibrationDocumentError, match=f"{path}: .*nested deeper"):
        read_export(path)


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_what_is_moderately_deep_is_read_and_written_again(document):
    found = parse_document(document.key, with_parameters(document, nested(20, "{")))
    assert parse_document(document.key, found.to_json()) == found


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_what_is_too_large_is_refused(document, tmp_path):
    text = with_parameters(document, json.dumps("x" * MAX_DOCUMENT_BYTES))
    with pytest.raises(CalibrationDocumentError, match=r"^kvtier:v1:.*larger than 1048576 bytes"):
        parse_document(document.key, text)
    path = LocalCopy(tmp_path).path(document.key)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert LocalCopy(tmp_path).load(document.key) is None
    with pytest.raises(CalibrationDocumentError, match="larger than"):
        load_curve(path)


def test_a_file_that_never_ends_is_not_read_to_its_end(tmp_path):
    path = tmp_path / "endless.json"
    with path.open("wb") as stream:
        stream.truncate(MAX_EXPORT_BYTES + 2**40)  # a hole: takes no room on the disk
    with pytest.raises(CalibrationDocumentError, match="larger than"):
        load_curve(path)
    with pytest.raises(CalibrationDocumentError, match="larger than"):
        read_export(path)


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
    check_json_limits(json.dumps([value, "[" * 99, {"{" * 99: 1}], ensure_ascii=ascii_only))
    with pytest.raises(CalibrationDocumentError, match="nested"):
        check_json_limits(json.dumps([value])[:-1] + "," + nested(MAX_NESTING, "[") + "]")


@given(st.binary(max_size=300))
def test_any_bytes_are_looked_at_without_another_error(raw):
    check_json_limits(raw[:MAX_NESTING])
    check_json_limits(b'"' + raw.replace(b'"', b""))
