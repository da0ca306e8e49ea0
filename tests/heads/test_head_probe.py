"""The probe: equal to plain transformers; with heads dropped, to the reference implementation. With
gates at 0 and 1 it is its own masks; in between, their gradient is the loss's slope."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from tiny_llama import LAYERS, RULE, SHAPE, brute_force_logits, make_ids, profile_of
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvtier.errors import HeadProfileMismatchError, SizeError
from kvtier.heads.probes.context import HeadProbe, ProbeBatch
from kvtier.heads.probes.gates import gate_gradient
from kvtier.heads.probes.held import Asker, entries, selected
from kvtier.heads.probes.quality import Kept, measure
from kvtier.heads.profile import ModelShape, full_profile, window_profile
from kvtier.heads.reference.session import ReferenceSession
from kvtier.heads.samples.questions import CalibrationSample, Question
from kvtier.retention.locality import LocalityRule

CONTEXT = tuple(make_ids(60))
QUESTIONS = (
    Question(tuple(make_ids(6, 1)), tuple(make_ids(5, 2)), unscored=2),
    Question(tuple(make_ids(9, 3)), tuple(make_ids(3, 4))),
    Question(tuple(make_ids(2, 5)), tuple(make_ids(8, 6)), unscored=1),
)
SAMPLE = CalibrationSample(CONTEXT, QUESTIONS)
MIXED = profile_of((0,), (), (0, 1))
BOTH_RULES = pytest.mark.parametrize("compensation", [True, False])


@pytest.fixture(scope="module")
def batch(model: Any) -> ProbeBatch:
    return HeadProbe(model, RULE).prepare(SAMPLE)


def branch(question: Question) -> list[int]:
    return [*CONTEXT, *question.prompt_ids, *question.answer_ids[:-1]]


def assert_answers(batch: ProbeBatch, kept: Kept, expected: Callable[[list[int]], Tensor]) -> None:
    """Logits of the answers' tokens are those `[tokens, vocab]` of each branch, and so is the
    quality."""
    rows, right = [], []
    for question in QUESTIONS:
        first = len(CONTEXT) + len(question.prompt_ids) + question.unscored
        rows.append(expected(branch(question))[first - 1 :].float())
        wanted = torch.tensor(question.answer_ids[question.unscored :])
        right.append(rows[-1].argmax(-1) == wanted)
    logits = batch.asker.logits(lambda layer: batch.held(layer, kept[layer]))
    torch.testing.assert_close(logits, torch.cat(rows), atol=1e-4, rtol=1e-4)
    found, targets = batch.quality(kept), batch.asker.row.targets
    assert found.loss == pytest.approx(float(cross_entropy(logits, targets)))
    assert found.tokens == pytest.approx(float(torch.cat(right).float().mean()))
    assert found.recall == pytest.approx(sum(bool(one.all()) for one in right) / len(right))


def test_with_nothing_dropped_it_is_the_plain_forward(model: Any, batch: ProbeBatch) -> None:
    def plain(ids: list[int]) -> Tensor:
        with torch.inference_mode():
            return model(torch.tensor([ids]), use_cache=False).logits[0]

    assert_answers(batch, batch.probe.full(), plain)


@BOTH_RULES
def test_with_heads_dropped_it_is_masked_attention(model: Any, compensation: bool) -> None:
    rule = LocalityRule(5, 7, 3, compensation=compensation)
    batch = HeadProbe(model, rule).prepare(SAMPLE)
    node = (0, len(CONTEXT), len(CONTEXT))
    assert_answers(
        batch,
        batch.probe.mask(MIXED),
        lambda ids: brute_force_logits(model, MIXED, [node], ids, rule),
    )


def test_it_answers_as_a_session_would(model: Any, batch: ProbeBatch) -> None:
    """Answers taken from greedy sessions are recalled, and any other answer is not."""
    session = ReferenceSession(model, MIXED, RULE)
    session.turn(CONTEXT, 0)
    greedy = [session.fork().turn(q.prompt_ids, 4).token_ids for q in QUESTIONS]
    right = tuple(
        Question(q.prompt_ids, tuple(ids)) for q, ids in zip(QUESTIONS, greedy, strict=True)
    )
    probe = HeadProbe(model, RULE)
    mask = probe.mask(MIXED)
    assert probe.prepare(CalibrationSample(CONTEXT, right)).quality(mask)[:2] == (1.0, 1.0)
    last = right[2]
    wrong = Question(last.prompt_ids, (*last.answer_ids[:-1], (last.answer_ids[-1] + 1) % 97))
    quality = probe.prepare(CalibrationSample(CONTEXT, (*right[:2], wrong))).quality(mask)
    assert quality.recall == pytest.approx(2 / 3)
    assert quality.tokens == pytest.approx(11 / 12)
    # Samples weigh as many questions as they have.
    single = probe.prepare(CalibrationSample(CONTEXT, QUESTIONS[:1]))
    a, b = batch.quality(mask), single.quality(mask)
    assert measure([batch, single], mask).loss == pytest.approx((3 * a.loss + b.loss) / 4)


def test_mass_is_that_of_eager_attention(model: Any, batch: ProbeBatch) -> None:
    rows_m, steps = 4, 2
    total = torch.zeros(LAYERS, SHAPE.num_kv_heads, dtype=torch.float64)
    rows_seen = 0
    before = model.config._attn_implementation
    model.config._attn_implementation = "eager"
    try:
        for question in QUESTIONS:
            ids = torch.tensor([branch(question)])
            with torch.inference_mode():
                attentions = model(ids, use_cache=False, output_attentions=True).attentions
            stop = len(CONTEXT) + len(question.prompt_ids)
            rows = range(stop - min(rows_m, len(question.prompt_ids)), stop + steps)
            for layer, weights in enumerate(attentions):
                mass = weights[0][:, list(rows), 5 : len(CONTEXT) - 7].sum(-1)
                total[layer] += mass.view(SHAPE.num_kv_heads, -1, len(rows)).mean(1).sum(1)
            rows_seen += len(rows)
    finally:
        model.config._attn_implementation = before
    expected = (total / rows_seen).tolist()
    for got, wanted in zip(batch.middle_mass(rows_m, steps), expected, strict=True):
        assert got == pytest.approx(wanted, abs=1e-5)


@BOTH_RULES
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


def test_the_gradient_is_the_slope_of_the_loss_and_the_model_is_as_it_was(
    model: Any, batch: ProbeBatch
) -> None:
    before = batch.quality(batch.probe.full())
    gates = torch.rand(3, 2, generator=torch.Generator().manual_seed(1))
    _, gradient = gate_gradient(batch, gates)
    step = 1e-2
    for layer, head in product(range(3), range(2)):
        ahead, behind = gates.clone(), gates.clone()
        ahead[layer, head] += step
        behind[layer, head] -= step
        slope = (gate_gradient(batch, ahead)[0] - gate_gradient(batch, behind)[0]) / (2 * step)
        assert float(gradient[layer, head]) == pytest.approx(slope, rel=0.02, abs=2e-3)
    assert all("forward" not in vars(layer) for layer in model.get_decoder().layers)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert batch.quality(batch.probe.full()) == before


def test_heads_may_hold_different_numbers_of_entries(model: Any, batch: ProbeBatch) -> None:
    """The queries do not see what a head does not hold, whatever the others of its layer hold."""
    session = ReferenceSession(model, full_profile(SHAPE), RULE)
    session.turn(CONTEXT, 0)
    kv = [session.exact_kv(layer) for layer in range(LAYERS)]
    kept = torch.ones(LAYERS, SHAPE.num_kv_heads, len(CONTEXT), dtype=torch.bool)
    held = selected(kv, kept, SHAPE.group_size)
    assert entries(held, SHAPE.group_size) == kept.numel()
    exact = batch.quality(batch.probe.full()).loss
    assert Asker(model, SAMPLE).quality(held).loss == pytest.approx(exact, abs=1e-6)
    kept = torch.rand(kept.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    kept[0, 0] = False
    held = selected(kv, kept, SHAPE.group_size)
    assert entries(held, SHAPE.group_size) == int(kept.sum())
    found = Asker(model, SAMPLE).quality(held).loss
    # Dropped keys and values may hold anything.
    for (k, v), layer in zip(kv, kept, strict=True):
        for x in (k, v):
            x[~layer] = 1e3
    held = selected(kv, kept, SHAPE.group_size)
    assert Asker(model, SAMPLE).quality(held).loss == pytest.approx(found)


def test_errors_name_what_is_wrong(model: Any) -> None:
    probe = HeadProbe(model, RULE)
    with pytest.raises(SizeError, match="--len"):
        probe.prepare(CalibrationSample(CONTEXT[:13], QUESTIONS))
    other = ModelShape(num_layers=1, num_kv_heads=2, num_attention_heads=4, head_dim=16)
    with pytest.raises(HeadProfileMismatchError):
        probe.mask(full_profile(other))
