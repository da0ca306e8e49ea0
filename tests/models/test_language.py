"""The language stage trains one MLP on its stored input, and touches nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import torch

from kvtier.synthetic.recall import make_session
from models import language
from models.export import HISTORY, export
from models.language import finish, last_mlp_inputs
from models.net import Net
from models.recipe import stage_named
from models.train import start, train


def test_the_stage_changes_the_last_mlp_alone_and_is_reproducible(monkeypatch, tmp_path):
    """Also: a model folder is a place to start from, and its log is kept."""
    # A data set of a few thousand tokens.
    monkeypatch.setattr(language, "CONTEXTS", ((256, 3), (700, 1)))
    monkeypatch.setattr(language, "STRETCHED_BATCHES", 2)
    monkeypatch.setattr(language, "SPLIT_EXERCISES", 1)
    monkeypatch.setattr(language, "SPLIT_TURNS", 8)
    monkeypatch.setattr(language, "SHORTEST_SPLIT_TOKENS", 900)
    torch.manual_seed(0)
    net = Net()
    ids = torch.from_numpy(make_session(np.random.default_rng(0), 300, 2).context_ids)[None]
    with torch.no_grad():
        with last_mlp_inputs(net) as seen:
            expected = net(ids)
        torch.testing.assert_close(net.logits(finish(net, seen[0])), expected)
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
