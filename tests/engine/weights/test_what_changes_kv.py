"""Everything of SGLang's that can change KV is known: its arguments, its calls, its endpoints.

A name that SGLang adds fails here until it was looked at: arguments that change what is computed
go into `tier.identity.KV_ARGUMENTS`, calls that change weights into `plugin.WEIGHT_CHANGES`; all
others into the files beside this one.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.server_args import ServerArgs
from sglang_versions import routes, unreviewed

from kvtier_sglang.plugin import WEIGHT_CHANGES, hooks_of
from kvtier_sglang.pool.scales import KvScales
from kvtier_sglang.runtime import Runtime
from kvtier_sglang.tier.identity import KV_ARGUMENTS, ModelIdentity, adapter_digest

HERE = Path(__file__).parent
# Arguments of older versions alone, which compute nothing else.
GONE = {"speculative_skip_dp_mlp_sync"}
# The calls of the manager of weights that only read them, or prepare connections over which they
# come.
HARMLESS_CALLS = {
    "destroy_weights_update_group",
    "flush_cache_after_weight_update",
    "get_weights_by_name",
    "init_weights_update_group",
    "record_weight_version_after_update",
    "save_remote_model",
    "save_sharded_model",
}
# Endpoints that change weights, by the manager's call behind them.
WEIGHT_ENDPOINTS = {
    "/begin_weight_update": "begin_weight_update",
    "/end_weight_update": "end_weight_update",
    "/release_memory_occupation": "release_memory_occupation",
    "/resume_memory_occupation": "resume_memory_occupation",
    "/update_weights_from_disk": "update_weights_from_disk",
    "/update_weights_from_distributed": "update_weights_from_distributed",
    "/update_weights_from_ipc": "update_weights_from_ipc",
    "/update_weights_from_tensor": "update_weights_from_tensor",
    "/weights_checker": "check_weights",
}
# An adapter is named by its contents, whenever it is loaded.
ADAPTER_ENDPOINTS = {
    "/load_lora_adapter",
    "/load_lora_adapter_from_tensors",
    "/unload_lora_adapter",
}


def reviewed(file: str) -> set[str]:
    return set((HERE / file).read_text().split())


def test_every_server_argument_was_looked_at():
    names = set(ServerArgs.__struct_fields__)
    assert set(KV_ARGUMENTS) <= names
    assert not unreviewed(names - GONE, set(KV_ARGUMENTS) | reviewed("server_arguments.txt"))
    assert not set(KV_ARGUMENTS) & reviewed("server_arguments.txt")


def test_every_endpoint_was_looked_at():
    paths = {route.path for route in routes() if hasattr(route, "path")}
    known = set(WEIGHT_ENDPOINTS) | ADAPTER_ENDPOINTS | reviewed("http_endpoints.txt")
    assert not unreviewed(paths, known)
    assert set(WEIGHT_ENDPOINTS.values()) == set(WEIGHT_CHANGES)


def test_every_call_that_can_change_weights_is_hooked():
    public = {
        name
        for name, value in vars(SchedulerWeightUpdaterManager).items()
        if callable(value) and not name.startswith("_")
    }
    assert not unreviewed(public, set(WEIGHT_CHANGES) | HARMLESS_CALLS)
    for name in WEIGHT_CHANGES:
        assert any(
            target.endswith(f"WeightUpdaterManager.{name}") for target in hooks_of(Runtime())
        )


def model_identity(**changes):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).to(changes.get("dtype", torch.float32))
    model.register_buffer("scales", torch.ones(2))
    model.register_buffer("cache", torch.ones(2), persistent=False)
    config = {"rope_theta": 10_000.0, "_name_or_path": "/somewhere"} | changes.get("config", {})
    runner = SimpleNamespace(
        model=model,
        model_config=SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: config)),
        lora_manager=None,
        token_to_kv_pool=SimpleNamespace(scales=KvScales([changes.get("layer")])),
    )
    arguments = dict.fromkeys(KV_ARGUMENTS) | changes.get("arguments", {})
    return ModelIdentity(runner, SimpleNamespace(**arguments)), model


def test_equal_models_share_their_kv_wherever_they_lie():
    moved = model_identity(config={"_name_or_path": "/elsewhere", "transformers_version": "6"})[0]
    assert model_identity()[0].digest() == moved.digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {"rope_theta": 20_000.0}},
        {"config": {"rope_scaling": {"type": "yarn"}}},
        {"dtype": torch.bfloat16},
        {"layer": SimpleNamespace(k_scale=0.5, v_scale=1.0)},
        *({"arguments": {name: "other"}} for name in KV_ARGUMENTS),
    ],
    ids=str,
)
def test_what_computes_other_kv_has_another_name(changes):
    assert model_identity()[0].digest() != model_identity(**changes)[0].digest()


def test_the_last_bit_of_any_parameter_or_persistent_buffer_changes_the_name():
    identity, model = model_identity()
    seen = {identity.digest()}
    for tensor in (model.weight, model.bias, model.scales):
        bits = tensor.data.view(torch.int32).view(-1)
        bits[-1] ^= 1
        seen.add(identity.digest())
    assert len(seen) == 4
    model.cache += 1
    assert identity.digest() in seen


def adapter(**changes):
    weights = {"q.lora_A.weight": torch.arange(6.0), "q.lora_B.weight": torch.ones(2, 2)}
    return SimpleNamespace(
        scaling=changes.get("scaling", 2.0),
        config=SimpleNamespace(hf_config={"r": 2, "target_modules": {"q", "k", "v"}}),
        layers=[SimpleNamespace(weights=weights | changes.get("weights", {}))],
        embedding_layers={},
        added_tokens_embeddings={},
    )


def test_an_adapter_is_named_by_what_is_in_it_whenever_it_is_loaded():
    identity, _ = model_identity()
    assert identity.adapter("a") is None
    loaded = {"a": adapter()}
    identity._runner.lora_manager = SimpleNamespace(loras=loaded)
    before = identity.adapter("a")
    assert identity.adapter("a") == before == adapter_digest(adapter())
    retrained = {"weights": {"q.lora_B.weight": torch.full((2, 2), 1.5)}}
    for changes in (retrained, {"scaling": 3.0}):
        loaded["a"] = adapter(**changes)
        assert identity.adapter("a") == adapter_digest(adapter(**changes)) != before
    assert identity.adapter("b") is None
