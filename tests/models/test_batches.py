"""The promises of the training tricks: short rows that are exactly what they pretend to be."""

from __future__ import annotations

import math

import numpy as np
import torch

from models.batches import NEAR_TOKENS, SessionShape, session_batch, split_policy, vote_bias
from models.net import Net, NetConfig, rope_tables, rotate
from models.train import batch_loss

SHAPE = SessionShape(tokens=256, batch=3, max_span=100_000, fact_density=0.9, few_codes_share=0.5)


def anchored(value: bool) -> torch.Tensor:
    config = NetConfig()
    return torch.full((config.num_layers, config.num_kv_heads), value)


def test_votes_never_reach_the_near_past_or_the_future():
    bias = vote_bias(torch.full((1, 200), math.log(50.0)))[0, 0]
    assert bool((bias.triu(1)[0, 1:] == -math.inf).all())
    distance = torch.arange(200).unsqueeze(1) - torch.arange(200)
    assert bool((bias[(distance >= 0) & (distance <= NEAR_TOKENS)] == 0).all())
    assert bool((bias[distance > NEAR_TOKENS] > 0).all())


def test_stretched_positions_grow_and_stay_inside_the_model():
    batch = session_batch(np.random.default_rng(0), SHAPE)
    steps = batch.positions.diff(dim=1)
    assert bool((steps >= 1).all())
    assert int(batch.positions.max()) < NetConfig().max_positions
    assert int(batch.positions.max()) > 256
    # The turns at the end are one contiguous stretch.
    assert bool((steps[:, -80:] == 1).all())


def test_a_split_in_which_every_head_is_anchored_changes_nothing():
    shape = SessionShape(tokens=192, batch=2, max_span=5000, anchored=anchored(True))
    batch = session_batch(np.random.default_rng(1), shape)
    net = Net()
    with torch.no_grad():
        plain = net.hidden(batch.ids, batch.positions, batch.bias)
        split = net.hidden(batch.ids, batch.positions, batch.bias, batch.split)
    torch.testing.assert_close(plain, split)


def test_the_turns_of_locality_heads_see_sink_recent_and_the_compensation_entry():
    contexts = torch.tensor([120, 130])
    log_votes = torch.zeros(2, 160)
    rng = np.random.default_rng(2)
    split = split_policy(rng, log_votes, contexts, vote_bias(log_votes), anchored(False))
    last = split.bias[0, 0, -1]
    hidden = last[:160] == -math.inf
    assert bool((split.mean_weights[0, hidden] > 0).all())
    assert torch.isclose(last[160], hidden.sum().log())
    assert torch.isclose(split.mean_weights[0].sum(), torch.tensor(1.0))
    # Context rows are untouched: exact prefill.
    assert bool((split.bias[0, 0, 119, :120] == 0).all())
    assert split.bias[0, 0, 119, 160] == -math.inf


def test_a_training_step_has_finite_gradients():
    net = Net()
    shape = SessionShape(tokens=192, batch=2, max_span=90_000, anchored=anchored(False))
    loss, _ = batch_loss(net, session_batch(np.random.default_rng(3), shape))
    loss.backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in net.parameters() if p.grad is not None)


def test_rotary_tables_keep_distances():
    """Shifting all positions leaves every query-key product as it was."""
    config = NetConfig()
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, config.head_dim, generator=generator)

    def product(at_q: int, at_k: int) -> torch.Tensor:
        cos, sin = rope_tables(config, torch.tensor([at_q, at_k]))
        return rotate(q, cos[0], sin[0]) @ rotate(k, cos[1], sin[1])

    torch.testing.assert_close(product(20, 3), product(90_020, 90_003), atol=1e-1, rtol=1e-2)
