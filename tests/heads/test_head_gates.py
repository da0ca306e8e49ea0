"""Gates: at 0 and 1 they are the probe's masks; in between, their gradient is the loss's slope."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_head_probe import CONTEXT, MIXED, QUESTIONS
from tiny_llama import RULE, SHAPE

from kvtier.errors import UsageError
from kvtier.heads.methods import make_method
from kvtier.heads.probes.context import HeadProbe, ProbeBatch
from kvtier.heads.probes.gates import gate_gradient
from kvtier.heads.profile import full_profile, window_profile
from kvtier.heads.samples.questions import CalibrationSample
from kvtier.retention.locality import LocalityRule

SAMPLE = CalibrationSample(CONTEXT, QUESTIONS)


@pytest.fixture(scope="module")
def batch(model: Any) -> ProbeBatch:
    return HeadProbe(model, RULE, chunk_tokens=16).prepare(SAMPLE)


@pytest.mark.parametrize("compensation", [True, False])
@pytest.mark.parametrize(
    "profile", [full_profile(SHAPE), window_profile(SHAPE), MIXED], ids=["all", "none", "some"]
)
def test_open_and_closed_gates_are_the_probes_masks(
    model: Any, profile: Any, compensation: bool
) -> None:
    """The gates read all questions in one row, each as if it were alone."""
    batch = HeadProbe(model, LocalityRule(5, 7, 3, compensation=compensation)).prepare(SAMPLE)
    kept = batch.probe.mask(profile)
    loss, _ = gate_gradient(batch, torch.tensor(kept, dtype=torch.float32))
    assert loss == pytest.approx(batch.quality(kept).loss, abs=1e-4)


def test_the_gradient_is_the_slope_of_the_loss(batch: ProbeBatch) -> None:
    gates = torch.rand(3, 2, generator=torch.Generator().manual_seed(1))
    _, gradient = gate_gradient(batch, gates)
    step = 1e-2
    for layer in range(3):
        for head in range(2):
            ahead, behind = gates.clone(), gates.clone()
            ahead[layer, head] += step
            behind[layer, head] -= step
            slope = (gate_gradient(batch, ahead)[0] - gate_gradient(batch, behind)[0]) / (2 * step)
            assert float(gradient[layer, head]) == pytest.approx(slope, rel=0.02, abs=2e-3)


def test_the_model_is_as_it_was(model: Any, batch: ProbeBatch) -> None:
    before = batch.logits(batch.probe.full())
    gate_gradient(batch, torch.full((3, 2), 0.5))
    assert all("forward" not in vars(layer) for layer in model.get_decoder().layers)
    assert all(parameter.grad is None for parameter in model.parameters())
    batch.forget()
    torch.testing.assert_close(batch.logits(batch.probe.full()), before, atol=0, rtol=0)


def test_a_bad_seed_is_named() -> None:
    with pytest.raises(UsageError) as error:
        make_method("taylor", seed=-1)
    assert error.value.argument == "seed"
