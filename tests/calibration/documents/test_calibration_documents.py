"""Documents and their keys: what goes in comes out, and nothing that is no document comes in."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone

import pytest
from calibration_samples import (
    DTYPE,
    MODEL,
    POLICY,
    REVISION,
    curve_document,
    memory_document,
    profile_document,
)
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvtier.calibration.curves import HALF_LIMITS, POWER_LIMITS
from kvtier.calibration.documents import parse_document
from kvtier.calibration.keys import DETAILS, UNKNOWN, Key, parse_key
from kvtier.errors import CalibrationDocumentError, CalibrationMismatchError, UsageError
from kvtier.heads.profile import MeasuredCost

halves = st.floats(*HALF_LIMITS)
curves = st.builds(
    lambda low, high, power, policy: curve_document(
        alpha=(high - low) / 3, beta=low - (high - low) / 3, power=power, policy=policy
    ),
    halves, halves, st.floats(*POWER_LIMITS), st.text(min_size=1, max_size=9),
)  # fmt: skip
printable = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=100)
memories = st.builds(
    lambda name, folder, nll_gap, requeue_above: memory_document(
        name=name, location=f"/srv/{folder}", requeue_above=requeue_above, nll_gap=nll_gap,
        held_share=None if nll_gap is None else 0.2,
    ),
    printable, printable, st.none() | st.floats(-1, 9), st.floats(0, 1),
)  # fmt: skip
profiles = st.just(profile_document(scores=((0.5, 1.0, -2.0), (0.0, 0.0, 0.0))))


@given(curves | memories | profiles)
def test_a_stored_document_is_read_back_equal(document):
    assert parse_document(document.key, document.to_json()) == document


@pytest.mark.parametrize(
    ("good", "change", "field"),
    [
        *(
            (memory_document(), change, field)
            for change, field in (
                ({"name": " tools"}, "name"),
                ({"name": "too\nls"}, "name"),
                ({"location": "memories/tools"}, "location"),
                ({"digest": "ab" * 32 + "\n"}, "digest"),
                ({"held_share": None}, "document"),
                ({"prefix": "You are"}, "prefix"),
            )
        ),
        *(
            (curve_document(), change, field)
            for change, field in (
                ({"alpha": float("nan")}, "alpha"),
                ({"alpha": 1e9}, "document"),
                ({"beta": HALF_LIMITS[1] + 10}, "document"),
                ({"power": 1e3}, "document"),
                ({"nll_min": 5.0}, "document"),
                ({"retentions": [0.5, 0.1]}, "retentions"),
                ({"created_at": "2026-11-20T00:00:00"}, "created_at"),
                ({"parameters": {"x": float("nan")}}, "parameters"),
                ({"schema_version": 1}, "schema_version"),
                ({"surprise": 1}, "surprise"),
            )
        ),
    ],
)
def test_what_is_no_document_of_its_kind_is_refused_and_the_field_named(good, change, field):
    text = json.dumps(good.model_dump(mode="json") | change)
    with pytest.raises(CalibrationDocumentError, match=rf":{good.key.detail}: {field}[.:]"):
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
    for document, other in (
        (curve_document(), curve_document(model="other")),
        (memory_document(), memory_document(name="formats")),
    ):
        with pytest.raises(CalibrationMismatchError, match="holds the document of"):
            parse_document(other.key, document.to_json())


@pytest.mark.parametrize("name", ["model", "revision", "policy", "dtype"])
def test_a_curve_fits_only_what_it_was_measured_on(name):
    served = {"model": MODEL, "revision": REVISION, "policy": POLICY, "dtype": DTYPE}
    curve_document().check_fits(**served)
    with pytest.raises(CalibrationMismatchError, match=f"for {name} "):
        curve_document().check_fits(**(served | {name: "other"}))


def test_dates_are_in_utc_whatever_they_were_given_in():
    moment = datetime(2026, 11, 20, 3, tzinfo=timezone(timedelta(hours=5)))
    document = curve_document(created_at=moment)
    assert document.created_at.tzinfo == UTC
    assert json.loads(document.to_json())["created_at"] == "2026-11-19T22:00:00Z"


def test_no_context_keeps_less_than_was_ever_measured():
    document = curve_document(alpha=0.0, beta=0.01, power=1.0, retentions=(0.25, 0.5))
    assert document.curve.retention(0.95, 2.0) < 0.1
    assert document.retention(0.95, 2.0) == 0.25
    assert document.retention(1.0, 2.0) == 1.0


names = st.text(min_size=1, max_size=20)


@given(names, st.none() | names, names)
def test_keys_round_trip_and_no_part_can_be_read_as_a_pattern(model, revision, name):
    for kind, detail in DETAILS.items():
        key = Key.of(kind, model, revision, detail and name)
        assert parse_key(str(key)) == key
        assert key.revision == (revision or UNKNOWN)
        assert not set("*?[]\\/ \n") & set(str(key))


def test_a_hub_id_reads_as_designed():
    key = str(Key.of("curve", "org/model:7b", None, "c32"))
    assert key == "kvtier:v1:curve:org%2Fmodel%3A7b:unknown:c32"
    assert str(Key.of("profile", "m", "r")) == "kvtier:v1:profile:m:r"
    assert str(Key.of("memory", "m", "r", "my tools")) == "kvtier:v1:memory:m:r:my%20tools"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kvtier:v1:",
        "kvtier:v1:curve:a:b",
        "kvtier:v1:curve:a:b:c:d",
        "kvtier:v1:profile:a:",
        "kvtier:v1:memory:a:b:my tools",
        "kvtier:v1:shape:a:b",
        "kvtier:v2:profile:a:b",
        "other:v1:profile:a:b",
        "kvtier:v1:profile:a/b:c",
        "kvtier:v1:profile:a%2fb:c",
        "kvtier:v1:profile:%61:c",
    ],
)
def test_what_is_no_key_is_refused_by_name(text):
    with pytest.raises(UsageError, match=r"^KEY: expected .*kvtier:v1:memory:MODEL:REVISION:NAME"):
        parse_key(text, "KEY")


@pytest.mark.parametrize("model", ["", "\ud800"])
def test_a_part_that_cannot_be_written_is_named(model):
    with pytest.raises(UsageError, match=r"^model"):
        str(Key("curve", model, "r", "p"))
