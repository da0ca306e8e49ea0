"""Questions answered from what is held of a context, however many entries each head has."""

from __future__ import annotations

import pytest
import torch
from tiny_llama import KV_HEADS, LAYERS, RULE, make_ids, tiny_model

from kvtier.heads.model.config import shape_of
from kvtier.heads.probes.context import HeadProbe
from kvtier.heads.probes.held import Asker, entries, selected
from kvtier.heads.profile import full_profile
from kvtier.heads.reference.session import ReferenceSession
from kvtier.heads.samples.questions import CalibrationSample, Question

TOKENS = 60
SAMPLE = CalibrationSample(
    tuple(make_ids(TOKENS)), (Question((3, 5, 8), (9, 4)), Question((7, 2), (1, 6, 6)))
)


def exact_kv(model):
    session = ReferenceSession(model, full_profile(shape_of(model)), RULE)
    session.turn(SAMPLE.context_ids, 0)
    return [session.exact_kv(layer) for layer in range(LAYERS)]


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-6), (torch.bfloat16, 0.1)])
def test_who_holds_everything_answers_as_the_model_does(dtype, close):
    model = tiny_model(dtype=dtype)
    group = shape_of(model).group_size
    every = torch.ones(LAYERS, KV_HEADS, TOKENS, dtype=torch.bool)
    held = selected(exact_kv(model), every, group)
    assert entries(held, group) == every.numel()
    probe = HeadProbe(model, RULE)
    expected = probe.prepare(SAMPLE).quality(probe.full())
    assert Asker(model, SAMPLE).quality(held).loss == pytest.approx(expected.loss, abs=close)


def test_heads_may_hold_different_numbers_of_entries():
    """The queries do not see what a head does not hold, whatever the others of its layer hold."""
    model = tiny_model()
    group, kv = shape_of(model).group_size, exact_kv(model)
    kept = torch.rand(LAYERS, KV_HEADS, TOKENS, generator=torch.Generator().manual_seed(1)) < 0.5
    kept[0, 0] = False
    held = selected(kv, kept, group)
    assert entries(held, group) == int(kept.sum())
    found = Asker(model, SAMPLE).quality(held).loss
    # Dropped keys and values may hold anything.
    for (k, v), layer in zip(kv, kept, strict=True):
        for x in (k, v):
            x[~layer] = 1e3
    assert Asker(model, SAMPLE).quality(selected(kv, kept, group)).loss == pytest.approx(found)
