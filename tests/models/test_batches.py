"""The promises of the training tricks: short rows and turns behind a real context are exactly what
the evaluation shows."""

from __future__ import annotations

import numpy as np
import torch

from models.batches import SessionShape, session_batch
from models.grounding import _turn_hidden, exercise_loss, make_exercise
from models.longcontext import turn_hidden
from models.net import Net, NetConfig
from models.train import anchored_mask


def anchored(value: bool) -> torch.Tensor:
    config = NetConfig()
    return torch.full((config.num_layers, config.num_kv_heads), value)


def test_a_split_in_which_every_head_is_anchored_changes_nothing():
    shape = SessionShape(tokens=192, batch=2, max_span=5000, anchored=anchored(True))
    batch = session_batch(np.random.default_rng(1), shape)
    net = Net()
    with torch.no_grad():
        plain = net.hidden(batch.ids, batch.positions, batch.bias)
        split = net.hidden(batch.ids, batch.positions, batch.bias, batch.split)
    torch.testing.assert_close(plain, split)


def test_turns_on_a_real_context_are_what_the_evaluation_shows_under_either_policy():
    """Every weight is trained, and none of the context."""
    torch.manual_seed(0)
    net = Net()
    exercise = make_exercise(net, np.random.default_rng(1), 1500, 8)
    for mask in (anchored_mask(), anchored(True)):
        with torch.no_grad():
            expected = turn_hidden(net, exercise.cache, exercise.turn_ids, mask)
            got = _turn_hidden(net, exercise, mask)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    loss, accuracy = exercise_loss(net, exercise, anchored_mask())
    loss.backward()
    assert 0 <= accuracy <= 1
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in net.parameters())
    assert not exercise.cache.keys[0].requires_grad
