"""Documents: what goes in comes out, and nothing that is no curve comes in."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone

import pytest
from calibration_samples import (
    DTYPE,
    MODEL,
    POLICY,
    REVISION,
    SHAPE,
    curve_document,
    memory_document,
    profile_document,
    synthetic,
)
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvtier.calibration.curves import HALF_LIMITS, POWER_LIMITS, fit_curve
from kvtier.calibration.documents import document_of_fit, parse_document
from kvtier.errors import CalibrationDocumentError, CalibrationMismatchError
from kvtier.heads.profile import MeasuredCost

halves = st.floats(*HALF_LIMITS)


@given(halves, halves, st.floats(*POWER_LIMITS), st.text(min_size=1, max_size=9))
def test_a_stored_curve_is_read_back_equal(low, high, power, policy):
    alpha = (high - low) / 3.0
    document = curve_document(alpha=alpha, beta=low - alpha, power=power, policy=policy)
    again = parse_document(document.key, document.to_json())
    assert again == document
    assert again.curve.retention(0.95, 2.0) == document.curve.retention(0.95, 2.0)


names = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=100)


@given(names, names, st.none() | st.floats(-1, 9), st.floats(0, 1))
def test_a_published_memory_is_read_back_equal(name, folder, nll_gap, requeue_above):
    document = memory_document(
        name=name, location=f"/srv/{folder}", requeue_above=requeue_above, nll_gap=nll_gap,
        held_share=None if nll_gap is None else 0.2,
    )  # fmt: skip
    assert parse_document(document.key, document.to_json()) == document


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": " tools"}, "name"),
        ({"name": "too\nls"}, "name"),
        ({"name": "x" * 101}, "name"),
        ({"location": "memories/tools"}, "location"),
        ({"location": "/srv/\ttools"}, "location"),
        ({"digest": "ab"}, "digest"),
        ({"digest": "ab" * 32 + "\n"}, "digest"),
        ({"nll_gap": float("nan")}, "nll_gap"),
        ({"nll_gap": None}, "document"),
        ({"held_share": None}, "document"),
        ({"schema_version": 2}, "schema_version"),
        ({"prefix": "You are"}, "prefix"),
    ],
)
def test_what_is_no_published_memory_is_refused_and_the_field_named(change, field):
    good = memory_document()
    text = json.dumps(good.model_dump(mode="json") | change)
    with pytest.raises(CalibrationDocumentError, match=rf":tools: {field}: "):
        parse_document(good.key, text)


def test_a_stored_profile_is_read_back_equal():
    document = profile_document(scores=((0.5, 1.0, -2.0), (0.0, 0.0, 0.0)))
    assert parse_document(document.key, document.to_json()) == document


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"alpha": float("nan")}, "alpha"),
        ({"alpha": 1e9}, "document"),
        ({"beta": HALF_LIMITS[1] + 10}, "document"),
        ({"power": 0.0}, "document"),
        ({"power": 1e3}, "document"),
        ({"nll_min": 5.0}, "document"),
        ({"retentions": [0.5, 0.1]}, "retentions"),
        ({"retentions": [0.0, 0.5]}, "retentions"),
        ({"retentions": [0.5, 1.5]}, "retentions"),
        ({"created_at": "2026-11-20T00:00:00"}, "created_at"),
        ({"parameters": {"x": float("nan")}}, "parameters"),
        ({"schema_version": 1}, "schema_version"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_what_is_no_curve_is_refused_and_the_field_named(change, field):
    good = curve_document()
    text = json.dumps(good.model_dump(mode="json") | change)
    with pytest.raises(CalibrationDocumentError, match=rf"{POLICY}: {field}"):
        parse_document(good.key, text)


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[]", b"null", b"\xff\xfe", b"{" * 5000, b"not json"]
)
def test_what_is_no_document_is_refused(text):
    for document in (curve_document(), profile_document(), memory_document()):
        with pytest.raises(CalibrationDocumentError, match=r"^kvtier:v1:"):
            parse_document(document.key, text)


def test_a_profile_with_numbers_that_are_none_is_refused():
    nan = float("nan")
    cost = MeasuredCost(metric="nll", full=1.0, profile=nan, samples=1, context_tokens=1)
    for change in ({"scores": ((nan, 0.0, 0.0), (0.0, 0.0, 0.0))}, {"costs": (cost,)}):
        with pytest.raises(ValidationError, match="not finite"):
            profile_document(**change)


def test_a_document_under_the_wrong_key_is_a_mismatch():
    document = curve_document()
    with pytest.raises(CalibrationMismatchError, match="holds the document of"):
        parse_document(curve_document(model="other").key, document.to_json())
    with pytest.raises(CalibrationMismatchError, match="holds the document of"):
        parse_document(memory_document(name="formats").key, memory_document().to_json())


@pytest.mark.parametrize("name", ["model", "revision", "policy", "dtype"])
def test_a_curve_fits_only_what_it_was_measured_on(name):
    served = {"model": MODEL, "revision": REVISION, "policy": POLICY, "dtype": DTYPE}
    curve_document().check_fits(**served)
    with pytest.raises(CalibrationMismatchError, match=f"for {name} "):
        curve_document().check_fits(**(served | {name: "other"}))
    with pytest.raises(CalibrationMismatchError, match="for revision None"):
        curve_document(revision=None).check_fits(**served)


def test_a_profile_fits_only_its_model_and_shape():
    profile_document().check_fits(MODEL, REVISION, SHAPE)
    other = SHAPE.model_copy(update={"num_layers": 3})
    for served in (("other", REVISION, SHAPE), (MODEL, None, SHAPE), (MODEL, REVISION, other)):
        with pytest.raises(CalibrationMismatchError, match=r"^head profile: made for"):
            profile_document().check_fits(*served)


def test_dates_are_in_utc_whatever_they_were_given_in():
    moment = datetime(2026, 11, 20, 3, tzinfo=timezone(timedelta(hours=5)))
    document = curve_document(created_at=moment)
    assert document.created_at.tzinfo == UTC
    assert json.loads(document.to_json())["created_at"] == "2026-11-19T22:00:00Z"


def test_a_fit_is_described_completely():
    measured = synthetic(0.1, 0.1, 0.02)
    document = document_of_fit(
        measured, model=MODEL, revision=None, policy=POLICY, dtype=DTYPE,
        answer_floor_nats=0.1, parameters={"seed": 3},
    )  # fmt: skip
    assert document.curve == fit_curve(measured)
    assert (document.measurements, document.contexts) == (200, 40)
    assert document.retentions == (0.1, 0.25, 0.5, 0.75, 0.9)
    assert 0 < document.rmse < 0.03
    assert document.r2 > 0.95
    assert document.parameters == {"underestimate_weight": 2.0, "seed": 3}
    assert parse_document(document.key, document.to_json()) == document


def test_no_context_keeps_less_than_was_ever_measured():
    document = curve_document(alpha=0.0, beta=0.01, power=1.0, retentions=(0.25, 0.5))
    assert document.curve.retention(0.95, 2.0) < 0.1
    assert document.retention(0.95, 2.0) == 0.25
    assert document.retention(1.0, 2.0) == 1.0
