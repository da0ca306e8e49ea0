"""KV of other weights or of another adapter is never taken for a model's own: real engines, one
tier, the same prompt. Of another configuration: test_what_changes_kv.py.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from engine_process import CLEAN_ENVIRONMENT, DEMO_MODEL, run_engine
from safetensors.torch import load_file, save_file
from tierd.live_tier import live_tier
from tiered_engine import ENGINE, RULE

pytestmark = pytest.mark.engine

PROMPT = [random.Random(5).randrange(6, 384) for _ in range(1100)]
ASK = [{"input_ids": PROMPT, "max_new_tokens": 8}]


@pytest.fixture
def tier(tmp_path):
    with live_tier(tmp_path, "--memory", "512m") as live:
        yield RULE | {"KVTIER_TIER": live.address}


@pytest.fixture(scope="module")
def retrained(tmp_path_factory) -> Path:
    """The demo model under its own name, with other weights."""
    folder = tmp_path_factory.mktemp("retrained") / DEMO_MODEL.name
    shutil.copytree(DEMO_MODEL, folder)
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(1)
    for name, weight in weights.items():
        if "k_proj" in name or "v_proj" in name:
            weights[name] = weight + 0.3 * weight.std() * torch.randn_like(weight)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # The heads were found for other weights.
    (folder / "head_profile.json").unlink()
    return folder


def asked(folder, rounds, env, **engine):
    """Return per round the tokens that were cached, and the answer."""
    found = run_engine(folder, ENGINE | engine, rounds, env)
    assert found["state"]["integrity"] == []
    return [(r[0]["cached_tokens"], r[0]["output_ids"]) if r else None for r in found["rounds"]]


def unbound(env, folder) -> dict[str, str]:
    """Return the environment with a head profile that is not bound to the demo model's weights."""
    profile = json.loads((DEMO_MODEL / "head_profile.json").read_text())
    path = folder / "unbound_profile.json"
    path.write_text(json.dumps(profile | {"revision": None}))
    return env | {"KVTIER_HEAD_PROFILE": str(path)}


def test_new_weights_never_meet_kv_of_the_old_ones(tmp_path, tier, retrained):
    """After a restart the KV that was stored since is there under the new weights' names, and the
    KV from before under the old's."""
    ((_, wanted),) = asked(tmp_path, [ASK], unbound(RULE, tmp_path), model_path=str(retrained))
    env, updated = unbound(tier, tmp_path), [ASK, {"weights": str(retrained)}, ASK]
    (cached, old), _, (cached_then, then) = asked(tmp_path, updated, env)
    assert (cached, cached_then) == (0, 0)
    assert then == wanted != old
    (cached, again), _, (cached_then, then) = asked(tmp_path, updated, env)
    assert (again, then) == (old, wanted)
    assert min(cached, cached_then) >= 1024


def write_adapter(folder: Path, seed: int) -> None:
    """A LoRA of the demo model's attention outputs, which SGLang adapts on a CPU, too; in PEFT's
    format."""
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    hidden, rank = config["hidden_size"], 4
    torch.manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        inputs = config["head_dim"] * config["num_attention_heads"]
        weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs) * 0.1
        weights[f"{prefix}.lora_B.weight"] = torch.randn(hidden, rank) * 0.3
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["o_proj"],
        "base_model_name_or_path": "kvtier-demo",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def test_an_adapter_trained_again_at_its_path_does_not_find_the_old_ones_kv(tmp_path, tier):
    folder = tmp_path / "adapter"
    lora = {
        "enable_lora": True,
        "lora_paths": {"tenant": str(folder)},
        "max_lora_rank": 4,
        "lora_target_modules": ["o_proj"],
        "lora_backend": "torch_native",
    }
    ask = [[ASK[0] | {"adapter": "tenant"}]]
    folders = [str(Path(__file__).with_name("unpinned")), CLEAN_ENVIRONMENT["PYTHONPATH"]]
    unpinned = {"PYTHONPATH": os.pathsep.join(folders)}
    tier, alone = tier | unpinned, RULE | unpinned
    write_adapter(folder, seed=1)
    first, _, (cached, tokens) = asked(tmp_path, [*ask, {"flush": True}, *ask], tier, **lora)
    assert first == (0, tokens)
    assert cached >= 1024
    write_adapter(folder, seed=2)
    ((_, wanted),) = asked(tmp_path, ask, alone, **lora)
    assert wanted != tokens
    assert asked(tmp_path, ask, tier, **lora) == [(0, wanted)]
