"""The probe: equal to plain transformers; with heads dropped, to the reference implementation."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from tiny_llama import LAYERS, RULE, SHAPE, brute_force_logits, make_ids, profile_of

from kvtier.errors import HeadProfileMismatchError, SizeError
from kvtier.heads.probes.context import HeadProbe, ProbeBatch
from kvtier.heads.probes.quality import kept_heads, measure
from kvtier.heads.profile import ModelShape, full_profile
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


@pytest.fixture(scope="module")
def batch(model: Any) -> ProbeBatch:
    return HeadProbe(model, RULE, chunk_tokens=16).prepare(SAMPLE)


def branch(question: Question) -> list[int]:
    return [*CONTEXT, *question.prompt_ids, *question.answer_ids[:-1]]


def test_with_nothing_dropped_it_is_the_plain_forward(model: Any, batch: ProbeBatch) -> None:
    logits = batch.logits(batch.probe.full())
    for index, question in enumerate(QUESTIONS):
        with torch.inference_mode():
            plain = model(torch.tensor([branch(question)]), use_cache=False).logits[0]
        rows = plain[len(CONTEXT) :].float()
        torch.testing.assert_close(logits[index, : len(rows)], rows, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("compensation", [True, False])
def test_with_heads_dropped_it_is_masked_attention(model: Any, compensation: bool) -> None:
    rule = LocalityRule(5, 7, 3, compensation=compensation)
    batch = HeadProbe(model, rule).prepare(SAMPLE)
    logits = batch.logits(kept_heads(MIXED.ca_heads, SHAPE))
    node = (0, len(CONTEXT), len(CONTEXT))
    for index, question in enumerate(QUESTIONS):
        expected = brute_force_logits(model, MIXED, [node], branch(question), rule)
        rows = expected[len(CONTEXT) :].float()
        torch.testing.assert_close(logits[index, : len(rows)], rows, atol=1e-4, rtol=1e-4)


def test_it_answers_as_a_session_would(model: Any) -> None:
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


def test_unscored_tokens_do_not_count(batch: ProbeBatch) -> None:
    scored = (batch.targets != -100).sum(1).tolist()
    assert scored == [3, 3, 7]


def test_remembered_states_change_nothing(model: Any, batch: ProbeBatch) -> None:
    masks = [
        kept_heads(layers, SHAPE) for layers in product([(), (0,), (1,), (0, 1)], repeat=LAYERS)
    ][::5]
    remembered = [batch.quality(mask) for mask in masks]
    for mask, quality in zip(reversed(masks), reversed(remembered), strict=True):
        batch.forget()
        assert batch.quality(mask) == pytest.approx(quality)


def test_the_memo_is_bounded(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.heads.probes.context.MEMO_BYTES", 20_000)
    small = HeadProbe(model, RULE).prepare(SAMPLE)
    for mask in (small.probe.full(), small.probe.mask(MIXED)):
        small.quality(mask)
        assert sum(s.out.nbytes + s.lse.nbytes for s in small._memo.values()) <= 20_000


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


def test_measure_weighs_samples_by_their_questions(model: Any, batch: ProbeBatch) -> None:
    single = batch.probe.prepare(CalibrationSample(CONTEXT, QUESTIONS[:1]))
    full = batch.probe.full()
    a, b = batch.quality(full), single.quality(full)
    assert measure([batch, single], full).loss == pytest.approx((3 * a.loss + b.loss) / 4)
    assert math.isfinite(a.loss)


def test_errors_name_what_is_wrong(model: Any) -> None:
    probe = HeadProbe(model, RULE)
    with pytest.raises(SizeError, match="--len"):
        probe.prepare(CalibrationSample(CONTEXT[:13], QUESTIONS))
    other = ModelShape(num_layers=1, num_kv_heads=2, num_attention_heads=4, head_dim=16)
    with pytest.raises(HeadProfileMismatchError):
        probe.mask(full_profile(other))
