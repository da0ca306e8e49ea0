"""The language stage trains one MLP on its stored input, and touches nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvtier.synthetic.recall import DEFAULT_LANGUAGE, make_session
from models import language
from models.batches import SessionShape
from models.export import HISTORY, export
from models.language import (
    collect_residuals,
    finish,
    language_loss,
    last_mlp_inputs,
)
from models.net import Net
from models.nll import class_masks
from models.recipe import stage_named
from models.train import anchored_mask, start, train

STRETCHED = SessionShape(tokens=192, batch=2, max_span=5000)


@pytest.fixture
def small_data(monkeypatch):
    """The stage's data set, cut down to a few thousand tokens."""
    monkeypatch.setattr(language, "CONTEXTS", ((256, 3), (700, 1)))
    monkeypatch.setattr(language, "STRETCHED_BATCHES", 2)
    monkeypatch.setattr(language, "SPLIT_EXERCISES", 1)
    monkeypatch.setattr(language, "SPLIT_TURNS", 8)
    monkeypatch.setattr(language, "SHORTEST_SPLIT_TOKENS", 900)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def test_the_stored_input_gives_the_model_s_own_logits(net):
    session = make_session(np.random.default_rng(0), 300, 2)
    ids = torch.from_numpy(session.context_ids)[None]
    with torch.no_grad():
        with last_mlp_inputs(net) as seen:
            expected = net(ids)
        torch.testing.assert_close(net.logits(finish(net, seen[0])), expected)


def test_learned_is_what_follows_filler_in_a_context_and_nothing_else(net, small_data):
    """Words are told by their embeddings: with silent layers, they are what enters the MLP."""
    for layer in net.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    rng = np.random.default_rng(1)
    residuals = collect_residuals(net, rng, STRETCHED, anchored_mask(), longest=1000)
    words = DEFAULT_LANGUAGE
    before, kept = spoken(net, residuals.inputs), spoken(net, residuals.kept_inputs)
    assert bool((before >= words.filler.start).all())
    assert not bool((kept >= words.filler.start).any())
    assert not bool((kept == words.pad).any())
    for word in (words.user, words.assistant, words.bos, words.codes.start, words.full_stop):
        assert bool((kept == word).any())
    # A walk goes on, or a fact begins; the first question ends what is learned.
    after = residuals.targets
    adjectives = (after >= words.adjectives.start) & (after < words.adjectives.stop)
    assert bool(((after >= words.filler.start) | adjectives).all())


def spoken(net: Net, inputs: torch.Tensor) -> torch.Tensor:
    """The word of every embedding in `inputs` `[tokens, hidden]`."""
    return torch.cdist(inputs, net.model.embed_tokens.weight.detach()).argmin(1)


def test_the_loss_starts_without_drift(net, small_data):
    rng = np.random.default_rng(1)
    residuals = collect_residuals(net, rng, STRETCHED, anchored_mask(), longest=1000)
    loss, seen = language_loss(net, rng, residuals)
    assert seen["drift"] == pytest.approx(0.0, abs=1e-6)
    assert loss.item() == pytest.approx(seen["language"], abs=1e-6)


def test_the_stage_changes_the_last_mlp_alone_and_is_reproducible(net, small_data, tmp_path):
    """Also: a model folder is a place to start from, and its log is kept."""
    old = [{"stage": "older", "step": 1}]
    export({"net": net.state_dict(), "log": old}, tmp_path)
    stage = replace(stage_named("language"), max_steps=3, real_tokens=1000)
    runs = []
    for _ in range(2):
        run = start(tmp_path)
        train(run, stage)
        runs.append(run)
    before, after = net.state_dict(), runs[0].net.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    last = f"model.layers.{net.config.num_layers - 1}."
    mlp = {f"{last}mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert changed == mlp | {f"{last}post_attention_layernorm.weight"}
    assert all(torch.equal(value, runs[1].net.state_dict()[name]) for name, value in after.items())
    assert all(parameter.requires_grad for parameter in runs[0].net.parameters())
    assert runs[0].log[:1] == old == json.loads((tmp_path / HISTORY).read_text())["steps"]
    assert runs[0].log[-1]["stage"] == "language"


def test_every_word_of_a_context_is_of_one_class():
    session = make_session(np.random.default_rng(3), 600, 0, 10)
    ids = torch.from_numpy(session.context_ids)
    masks = class_masks(ids)
    counted = torch.stack(list(masks.values())).sum(0)
    assert counted.max() == 1
    assert torch.equal(counted == 0, ids[1:] == DEFAULT_LANGUAGE.full_stop)
    assert int(masks["codes"].sum()) == 80
    assert 0 < int(masks["refill"].sum()) <= 11
