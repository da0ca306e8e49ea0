"""Plans: the memory arithmetic and what each policy asks of the engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bench_models import write_model

from kvtier.bench.__main__ import main
from kvtier.bench.options import parse_options
from kvtier.bench.planning import PolicyPlan, make_plans
from kvtier.bench.runner import _Files, worker_environment
from kvtier.errors import UsageError
from kvtier.retention.token_worth import TokenWorth, feature_width

TOKEN_BYTES = 2 * 32 * 4 * 12


def plans_for(folder: Path, *flags: str) -> dict[str, PolicyPlan]:
    given = ["--len", "4k", "--device", "cpu", "--policies", "stock,full,kvtier,window", *flags]
    _, plans = make_plans(parse_options([*given, "--model-path", str(folder)]))
    return {entry.policy.name: entry for entry in plans}


def test_a_token_costs_the_same_under_every_policy_when_nothing_is_dropped(model_path: Path):
    for entry in plans_for(model_path).values():
        votes = 4 * 12 * (entry.profile.ca_share < 1)
        beside = 8 + votes if entry.policy.splits_heads and entry.profile.ca_share < 1 else 0
        assert entry.slot_bytes == TOKEN_BYTES + beside


def test_only_the_backends_differ_between_policies(model_path: Path):
    args = {name: entry.plan.engine_args for name, entry in plans_for(model_path).items()}
    backends = {
        name: (a["attention_backend"], a.get("radix_cache_backend")) for name, a in args.items()
    }
    assert backends == {
        "stock": ("torch_native", None),
        "full": ("kvtier", None),
        "kvtier": ("kvtier", "kvtier"),
        "window": ("kvtier", "kvtier"),
    }
    differing = {"attention_backend", "radix_cache_backend", "max_total_tokens"}
    common = [{k: v for k, v in a.items() if k not in differing} for a in args.values()]
    assert all(each == common[0] for each in common)
    assert common[0]["dtype"] == "float32"


def test_a_budget_gives_every_policy_the_same_bytes(model_path: Path):
    plans = plans_for(model_path, "--sessions", "5", "--budget-sessions", "3")
    budget = plans["full"].plan.pools.budget_bytes
    assert budget == 3 * TOKEN_BYTES * plans["full"].session.total_tokens
    for entry in plans.values():
        pools = entry.plan.pools
        assert pools.budget_bytes == budget
        assert entry.slot_bytes * pools.max_total_tokens <= budget
    assert plans["full"].plan.pools.sessions == pytest.approx(3)
    assert plans["kvtier"].plan.pools.sessions > 5
    assert plans["window"].plan.pools.sessions > plans["kvtier"].plan.pools.sessions


def test_an_fp8_policy_pays_for_half_of_each_byte_of_16_bits_out_of_the_same_budget(
    model_path: Path,
):
    policies = ["--policies", "full,full-fp8,kvtier-fp8"]
    plans = plans_for(model_path, *policies, "--kv-dtype", "bfloat16", "--budget-sessions", "3")
    assert plans["full"].slot_bytes == TOKEN_BYTES // 2
    for name in ("full-fp8", "kvtier-fp8"):
        beside = 8 + 4 * 12 if name == "kvtier-fp8" else 0
        assert plans[name].slot_bytes == TOKEN_BYTES // 4 + beside
        assert plans[name].plan.pools.budget_bytes == plans["full"].plan.pools.budget_bytes
    assert plans["full-fp8"].plan.pools.sessions == pytest.approx(6, rel=0.01)
    assert plans["kvtier-fp8"].profile.ca_share < 1
    dtypes = {name: entry.plan.engine_args["kv_cache_dtype"] for name, entry in plans.items()}
    assert dtypes == {"full": "bfloat16", "full-fp8": "fp8_e4m3", "kvtier-fp8": "fp8_e4m3"}


def test_without_a_budget_each_policy_gets_room_for_one_session(model_path: Path):
    for entry in plans_for(model_path).values():
        pools = entry.plan.pools
        assert pools.sessions == 1
        assert pools.max_total_tokens > entry.session.total_tokens


WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 256,
}


def test_layers_with_a_window_hold_it_alone(tmp_path: Path):
    """A third of the layers is full, and keeps a quarter."""
    model = write_model(tmp_path, **WINDOWS)
    TokenWorth(torch.zeros(3, 4, feature_width(4, 32))).save(tmp_path / "token_worth.npz")
    given = ["--model-path", str(model), "--len", "6k", "--retention", "0.25"]
    full, ours = make_plans(parse_options([*given, "--policies", "full,kvtier"]))[1]
    context = full.session.context_tokens
    assert full.session.kept_tokens == context
    assert ours.session.kept_tokens == pytest.approx(256 + (context - 256) / 12, rel=0.05)
    for policies, flag in (("full,window", "--policies"), ("kvtier", "--scorer-file")):
        (tmp_path / "token_worth.npz").unlink(missing_ok=True)
        with pytest.raises(UsageError, match=rf"^{flag}: .* some layers have a window"):
            make_plans(parse_options([*given, "--policies", policies]))


def test_settings_reach_the_worker_and_nothing_else_does(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KVTIER_LOCALITY_SINK_TOKENS", "32")
    plans = plans_for(model_path)
    parent = {
        "PATH": "/bin",
        "KVTIER_LOCALITY_RECENT_TOKENS": "9",
        "KVTIER_HEAD_PROFILE": "elsewhere",
    }
    full, kvtier = (
        worker_environment(parent, plans[name].plan, _Files(tmp_path))
        for name in ("full", "kvtier")
    )
    assert kvtier["PATH"] == "/bin"
    assert kvtier["KVTIER_LOCALITY_SINK_TOKENS"] == "32"
    assert "KVTIER_LOCALITY_RECENT_TOKENS" not in kvtier
    written = json.loads(Path(kvtier["KVTIER_HEAD_PROFILE"]).read_text())
    assert written["ca_heads"] == [[], [0, 1, 2], []]
    assert "KVTIER_HEAD_PROFILE" not in full


def test_a_dry_run_prints_the_arithmetic_of_any_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = {
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_attention_heads": 32,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
    }
    folder = write_model(tmp_path / "big", weights=False, tokenizer=False, **config)
    flags = [
        "--questions",
        "1",
        "--dry-run",
        "--len",
        "64k",
        "--model-path",
        str(folder),
        "--device",
        "cuda",
    ]
    assert main([*flags, "--kv-budget", "40g"]) == 0
    table = capsys.readouterr().out
    assert "assumed: 25% CA heads" in table
    assert "131,072" in table  # bytes per token: 32 layers, 8 heads, K and V, 128 wide, 2 bytes
    assert main([*flags, "--format", "json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert [plan["policy"] for plan in plans] == ["full", "kvtier"]
    assert plans[0]["session_bytes"] / plans[1]["session_bytes"] > 3.8
