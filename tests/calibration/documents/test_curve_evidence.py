"""A curve is used only beside the measurements that it was fitted to."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from calibration_samples import DTYPE, MODEL, POLICY, REVISION, synthetic
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvtier.calibration import documents, evidence
from kvtier.calibration.curves import HALF_LIMITS, MIN_MEASUREMENTS, Measurement
from kvtier.calibration.documents import CurveDocument, document_of_fit, parse_document
from kvtier.errors import CalibrationDocumentError

TARGETS = (0.8, 0.9, 0.95)
LARGE = 0.1  # share of the context, kept more or less than the fitted curve asks for


def fitted(measured: list[Measurement], weight: float = 2.0) -> CurveDocument:
    return document_of_fit(
        measured, model=MODEL, revision=REVISION, policy=POLICY, dtype=DTYPE,
        answer_floor_nats=0.1, underestimate_weight=weight,
    )  # fmt: skip


@cache
def ordinary() -> CurveDocument:
    """A fit that several tests change; a document cannot be changed in place."""
    return fitted(synthetic(0.1, 0.1, 0.05, power=2.0, contexts=12))


def changed(document: CurveDocument, **changes: Any) -> str:
    return json.dumps(document.model_dump(mode="json") | changes)


measurements = st.builds(
    Measurement,
    nll=st.floats(0, 20),
    retention=st.floats(0.001, 1),
    ratio=st.floats(0, 3) | st.sampled_from([0.0, 1.0]),
    context=st.integers(0, 4),
)


@settings(max_examples=20, derandomize=True)
@given(st.lists(measurements, min_size=MIN_MEASUREMENTS, max_size=40), st.floats(1, 20))
def test_every_curve_that_can_be_fitted_is_accepted(measured, weight):
    """However badly it fits: the tolerance is not on how good a curve is."""
    assume(any(one.retention < 1 for one in measured))
    document = fitted(measured, weight)
    assert parse_document(document.key, document.to_json()) == document


@settings(max_examples=8, derandomize=True)
@given(
    st.floats(0.05, 0.9), st.floats(0.05, 0.9), st.floats(0.7, 9), st.floats(0, 0.2),
    st.lists(st.tuples(st.floats(*HALF_LIMITS), st.floats(*HALF_LIMITS)), min_size=9, max_size=9),
    st.integers(0, 5),
)  # fmt: skip
def test_a_curve_that_asks_for_clearly_other_shares_is_refused(
    at_low, at_high, power, noise, others, seed
):
    """m at both ends of the measured range replaced by anything that a document could hold."""
    alpha = (at_high - at_low) / 3
    document = fitted(synthetic(alpha, at_low - alpha, noise, power=power, contexts=12, seed=seed))
    low, high = document.nll_min, document.nll_max
    for other_low, other_high in others:
        alpha = (other_high - other_low) / (high - low)
        changes = {"alpha": alpha, "beta": other_low - alpha * low}
        other = document.model_copy(update=changes)
        moved = max(
            abs(other.retention(target, nll) - document.retention(target, nll))
            for target in TARGETS for nll in (low, (low + high) / 2, high)
        )  # fmt: skip
        if moved > LARGE:
            with pytest.raises(CalibrationDocumentError):
                parse_document(document.key, changed(document, **changes))


def of_points(change: Any) -> Any:
    """Return a change of the measured points."""
    return lambda d: {
        "evidence": d.evidence.model_dump() | {"points": change(list(d.evidence.points))}
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda d: {"alpha": -d.alpha},
        lambda d: {"beta": d.beta - 0.1},
        lambda d: {"power": 3 * d.power},
        lambda d: {"nll_min": 0.5},
        lambda d: {"nll_max": 5.0},
        lambda d: {"rmse": d.rmse + 0.01},
        lambda d: {"retentions": (0.001, *d.retentions)},
        lambda d: {"measurements": d.measurements + 1},
        of_points(lambda points: points[:-1]),
        of_points(lambda points: [*points, points[0]]),
        of_points(lambda points: [(nll, share, 1 - quality) for nll, share, quality in points]),
    ],
)
def test_what_does_not_belong_to_the_measured_points_is_refused_as_a_document(change):
    document = ordinary()
    with pytest.raises(CalibrationDocumentError, match=rf"{POLICY}: document: "):
        parse_document(document.key, changed(document, **change(document)))


def test_more_measurements_than_are_stored_can_still_be_checked(monkeypatch):
    """Texts of different lengths, so that no two shares are equal. Limits that are quick to fit."""
    monkeypatch.setattr(evidence, "MAX_POINTS", 32)
    monkeypatch.setattr(documents, "MAX_RETENTIONS", 16)
    measured = [
        Measurement(m.nll, m.retention - index * 1e-7, m.ratio, m.context)
        for index, m in enumerate(synthetic(0.1, 0.1, 0.05, power=2.0, contexts=20))
    ]
    document = fitted(measured)
    assert parse_document(document.key, document.to_json()) == document
    assert (document.measurements, len(document.evidence.points)) == (100, 32)
    assert len(document.retentions) == 16
    assert document.retentions[0] == min(m.retention for m in measured)
    assert document.retentions[-1] == max(m.retention for m in measured)
    for changes in ({"beta": 0.0}, {"alpha": 0.2}, {"power": 4.0}, {"rmse": 0.001}):
        with pytest.raises(CalibrationDocumentError, match="document: "):
            parse_document(document.key, changed(document, **changes))
