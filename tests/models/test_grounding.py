"""The stages on real contexts read them exactly as the evaluation does."""

import numpy as np
import torch

from models.grounding import _turn_hidden, exercise_loss, make_exercise
from models.longcontext import turn_hidden
from models.net import Net
from models.train import anchored_mask


def test_turns_see_what_the_evaluation_shows_them_under_either_policy():
    torch.manual_seed(0)
    net = Net()
    exercise = make_exercise(net, np.random.default_rng(1), 1500, 8)
    for anchored in (anchored_mask(), torch.ones_like(anchored_mask())):
        with torch.no_grad():
            expected = turn_hidden(net, exercise.cache, exercise.turn_ids, anchored)
            got = _turn_hidden(net, exercise, anchored)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_every_weight_but_none_of_the_context_is_trained():
    torch.manual_seed(0)
    net = Net()
    exercise = make_exercise(net, np.random.default_rng(1), 1500, 8)
    loss, accuracy = exercise_loss(net, exercise, anchored_mask())
    loss.backward()
    assert 0 <= accuracy <= 1
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in net.parameters())
    assert not exercise.cache.keys[0].requires_grad
