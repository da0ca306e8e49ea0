"""Gates: at 0 and 1 they are the probe's masks; in between, their gradient is the loss's slope."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_head_probe import CONTEXT, MIXED, QUESTIONS
from tiny_llama import RULE, SHAPE

from kvtier.errors import UsageError
from kvtier.heads.methods import make_method
from kvtier.heads.methods.gates import Gates
from kvtier.heads.methods.ranking import best_heads
from kvtier.heads.methods.taylor import Taylor
from kvtier.heads.probes.context import IGNORE, HeadProbe, ProbeBatch
from kvtier.heads.probes.gates import answer_logits, gate_gradient
from kvtier.heads.probes.quality import Kept
from kvtier.heads.profile import full_profile, window_profile
from kvtier.heads.samples.questions import CalibrationSample
from kvtier.retention.locality import LocalityRule

SAMPLE = CalibrationSample(CONTEXT, QUESTIONS)


@pytest.fixture(scope="module")
def batch(model: Any) -> ProbeBatch:
    return HeadProbe(model, RULE, chunk_tokens=16).prepare(SAMPLE)


def gates_of(kept: Kept) -> torch.Tensor:
    return torch.tensor(kept, dtype=torch.float32)


def loss_at(batch: ProbeBatch, gates: torch.Tensor) -> float:
    with torch.no_grad():
        logits, targets = answer_logits(batch, gates)
    return float(torch.nn.functional.cross_entropy(logits.double(), targets))


@pytest.mark.parametrize("compensation", [True, False])
@pytest.mark.parametrize(
    "profile", [full_profile(SHAPE), window_profile(SHAPE), MIXED], ids=["all", "none", "some"]
)
def test_open_and_closed_gates_are_the_probes_masks(
    model: Any, profile: Any, compensation: bool
) -> None:
    rule = LocalityRule(5, 7, 3, compensation=compensation)
    batch = HeadProbe(model, rule).prepare(SAMPLE)
    kept = batch.probe.mask(profile)
    logits, targets = answer_logits(batch, gates_of(kept))
    scored = batch.targets != IGNORE
    assert targets.tolist() == batch.targets[scored].tolist()
    torch.testing.assert_close(logits.detach(), batch.logits(kept)[scored], atol=1e-4, rtol=1e-4)


def test_the_gradient_is_the_slope_of_the_loss(batch: ProbeBatch) -> None:
    gates = torch.rand(3, 2, generator=torch.Generator().manual_seed(1))
    loss, gradient = gate_gradient(batch, gates)
    assert loss == pytest.approx(loss_at(batch, gates), rel=1e-5)
    step = 1e-2
    for layer in range(3):
        for head in range(2):
            ahead, behind = gates.clone(), gates.clone()
            ahead[layer, head] += step
            behind[layer, head] -= step
            slope = (loss_at(batch, ahead) - loss_at(batch, behind)) / (2 * step)
            assert float(gradient[layer, head]) == pytest.approx(slope, rel=0.02, abs=2e-3)


def test_the_divergence_from_the_gated_model_itself_is_nothing(batch: ProbeBatch) -> None:
    gates = torch.rand(3, 2, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        teacher = torch.log_softmax(answer_logits(batch, gates)[0], dim=-1)
    loss, gradient = gate_gradient(batch, gates, teacher)
    assert loss == pytest.approx(0, abs=1e-5)
    assert float(gradient.abs().max()) < 1e-4
    assert gate_gradient(batch, 1 - gates, teacher)[0] > 0.01


def test_the_model_is_as_it_was(model: Any, batch: ProbeBatch) -> None:
    before = batch.logits(batch.probe.full())
    gate_gradient(batch, torch.full((3, 2), 0.5))
    assert all("forward" not in vars(layer) for layer in model.get_decoder().layers)
    assert all(parameter.grad is None for parameter in model.parameters())
    batch.forget()
    torch.testing.assert_close(batch.logits(batch.probe.full()), before, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("name", "parameters", "argument"),
    [
        ("taylor", {"seed": -1}, "seed"),
        ("gates", {"steps": 0}, "steps"),
        ("gates", {"step_size": 0.0}, "step_size"),
        ("gates", {"price": -1.0}, "price"),
    ],
)
def test_bad_parameters_are_named(name: str, parameters: dict[str, Any], argument: str) -> None:
    with pytest.raises(UsageError) as error:
        make_method(name, **parameters)
    assert error.value.argument == argument


def test_the_best_third_of_learned_gates_goes_by_taylors_order(batch: ProbeBatch) -> None:
    scores = Gates(steps=8, seed=3).score([batch])
    worth = Taylor(seed=3).score([batch]).mean
    learned = best_heads(scores.mean, 6)
    assert sorted(scores.order) == sorted(learned)
    first, second, *others = scores.order
    assert {first, second} == set(learned[:2])
    assert others == learned[2:]
    assert worth[first[0]][first[1]] >= worth[second[0]][second[1]]
    assert Gates(steps=8, seed=3).ranking(scores, SHAPE) == list(scores.order)


def test_a_ranking_is_the_scores_where_they_say_no_other(batch: ProbeBatch) -> None:
    scores = Taylor(seed=3).score([batch])
    assert scores.order == ()
    assert Taylor().ranking(scores, SHAPE) == best_heads(scores.mean, 6)
