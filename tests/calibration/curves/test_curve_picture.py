"""The picture of a curve: it is drawn, it groups by NLL, and equal curves give equal files."""

from __future__ import annotations

import pytest
from calibration_samples import synthetic

from kvtier.calibration.curves import Measurement, fit_curve
from kvtier.calibration.picture import by_nll, draw_curve, mean_quality
from kvtier.errors import UsageError


@pytest.mark.parametrize("contexts", [1, 2, 3, 40])
def test_a_picture_is_drawn_and_repeats(contexts, tmp_path):
    measured = synthetic(2.0, -10.0, 0.05, contexts=max(contexts, 2))[: 5 * contexts] * 2
    curve = fit_curve(measured)
    for name in ("a.png", "b.png"):
        draw_curve(curve, measured, tmp_path / name, "a model")
    first, second = ((tmp_path / name).read_bytes() for name in ("a.png", "b.png"))
    assert first.startswith(b"\x89PNG")
    assert first == second


def test_groups_are_thirds_of_the_contexts_by_nll():
    measured = synthetic(0.0, 0.0, 0.0, contexts=9)
    groups = by_nll(measured)
    assert [name for name, _ in groups] == ["low", "mid", "high"]
    assert [len({m.context for m in group}) for _, group in groups] == [3, 3, 3]
    highest = [max(m.nll for m in group) for _, group in groups]
    assert highest == sorted(highest)
    assert sum(len(group) for _, group in groups) == len(measured)


def test_points_are_means_by_retention():
    measured = [Measurement(1.0, 0.5, g, 0) for g in (0.2, 0.4)] + [Measurement(1.0, 0.1, 0.0, 0)]
    assert mean_quality(measured) == [(0.1, 0.0), (0.5, pytest.approx(0.3))]


def test_nothing_cannot_be_drawn():
    with pytest.raises(UsageError, match=r"^measurements"):
        by_nll([])
