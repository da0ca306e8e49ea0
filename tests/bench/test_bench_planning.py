"""Plans: the memory arithmetic and what each policy asks of the engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bench_models import write_model
from text_models import CHATML, write_tokenizer

from kvtier.bench.__main__ import main
from kvtier.bench.options import parse_options
from kvtier.bench.planning import PolicyPlan, make_plans
from kvtier.bench.runner import LOCAL_TIER, TIER_VARIABLE, worker_environment
from kvtier.bench.workload import longest_prompt, open_script, plan_sessions, turn_tokens
from kvtier.config import load_settings
from kvtier.errors import HeadProfileError, SizeError, UsageError
from kvtier.retention.rules import scorer_of
from kvtier.retention.token_worth import TokenWorth, feature_width

TOKEN_BYTES = 2 * 32 * 4 * 12
POLICIES = ["--policies", "stock,full,kvtier,window"]


def plans_for(folder: Path, *flags: str) -> dict[str, PolicyPlan]:
    given = ["--len", "4k", "--device", "cpu", *flags, "--model-path", str(folder)]
    return {entry.policy.name: entry for entry in make_plans(parse_options(given))[1]}


def text_model(folder: Path, max_positions: int = 8192) -> Path:
    write_model(folder, tokenizer=False, vocab_size=640, max_position_embeddings=max_positions)
    return write_tokenizer(folder, template=CHATML, eos="<|im_end|>")


def test_policies_differ_by_their_backends_and_what_heads_drop(model_path: Path):
    plans = plans_for(model_path, *POLICIES)
    args = {name: entry.plan.engine_args for name, entry in plans.items()}
    differing = ("attention_backend", "radix_cache_backend")
    assert {name: [a.get(one) for one in differing] for name, a in args.items()} == {
        "stock": ["torch_native", None],
        "full": ["kvtier", None],
        "kvtier": ["kvtier", "kvtier"],
        "window": ["kvtier", "kvtier"],
    }
    common = [
        {k: v for k, v in a.items() if k not in (*differing, "max_total_tokens")}
        for a in args.values()
    ]
    assert all(each == common[0] for each in common)
    for entry in plans.values():
        splits = entry.policy.splits_heads and entry.profile.ca_share < 1
        # An offset, and the votes of 12 heads.
        assert entry.slot_bytes == TOKEN_BYTES + (8 + 4 * 12 if splits else 0)
        # Without a budget each gets room for one session.
        assert entry.plan.pools.sessions == 1
        assert entry.plan.pools.max_total_tokens > entry.session.total_tokens


def test_a_budget_gives_every_policy_the_same_bytes(model_path: Path):
    plans = plans_for(model_path, *POLICIES, "--sessions", "5", "--budget-sessions", "3")
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


WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 256,
}


def test_layers_with_a_window_hold_it_alone(tmp_path: Path):
    """A third of the layers is full, and keeps a quarter."""
    model = write_model(tmp_path, **WINDOWS)
    TokenWorth(torch.zeros(3, 4, feature_width(4, 32))).save(tmp_path / "token_worth.npz")
    given = ["--len", "6k", "--retention", "0.25"]
    full, ours = plans_for(model, *given).values()
    context = full.session.context_tokens
    assert full.session.kept_tokens == context
    assert ours.session.kept_tokens == pytest.approx(256 + (context - 256) / 12, rel=0.05)
    for policies, flag in (("full,window", "--policies"), ("kvtier", "--scorer-file")):
        (tmp_path / "token_worth.npz").unlink(missing_ok=True)
        with pytest.raises(UsageError, match=rf"^{flag}: .* some layers have a window"):
            plans_for(model, *given, "--policies", policies)


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
        worker_environment(parent, plans[name].plan, tmp_path) for name in ("full", "kvtier")
    )
    assert kvtier["PATH"] == "/bin"
    assert kvtier["KVTIER_LOCALITY_SINK_TOKENS"] == "32"
    assert "KVTIER_LOCALITY_RECENT_TOKENS" not in kvtier
    written = json.loads(Path(kvtier["KVTIER_HEAD_PROFILE"]).read_text())
    assert written["ca_heads"] == [[], [0, 1, 2], []]
    assert "KVTIER_HEAD_PROFILE" not in full


def test_only_the_policy_that_compacts_has_the_tier(model_path: Path):
    flags = ["--tier", "localhost:7311", "--retention", "0.25", "--policies", "full,kvtier,random"]
    flags += ["--refresh", "turn", "--merge", "keepkv"]
    found = {name: entry.plan.environment for name, entry in plans_for(model_path, *flags).items()}
    assert found["kvtier"][TIER_VARIABLE] == "localhost:7311"
    assert found["kvtier"]["KVTIER_REFRESH"] == "turn"
    assert found["kvtier"]["KVTIER_MERGE"] == "keepkv"
    for other in ("full", "random"):
        assert TIER_VARIABLE not in found[other]
        assert found[other]["KVTIER_REFRESH"] == "off"
    both = ["--policies", "kvtier,kvtier-tier"]
    for named, address in (([], LOCAL_TIER), (["--tier", "tier:7311"], "tier:7311")):
        plain, tiered = plans_for(model_path, *both, *named).values()
        assert TIER_VARIABLE not in plain.plan.environment
        assert tiered.plan.environment[TIER_VARIABLE] == address


def test_a_dry_run_prints_the_arithmetic_of_any_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """It needs neither weights nor a tokenizer."""
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
    flags = ["--questions", "1", "--dry-run", "--len", "64k", "--kv-budget", "40g"]
    flags += ["--model-path", str(folder), "--device", "cuda"]
    assert main(flags) == 0
    table = capsys.readouterr().out
    assert "assumed: 25% CA heads" in table
    assert "131,072" in table  # bytes per token: 32 layers, 8 heads, K and V, 128 wide, 2 bytes
    assert main([*flags, "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["workload"]["script"] == "text"
    plans = document["plans"]
    assert [plan["policy"] for plan in plans] == ["full", "kvtier"]
    assert plans[0]["session_bytes"] / plans[1]["session_bytes"] > 3.8


# -- any model --


def test_a_text_has_room_for_its_longest_turns_in_the_models_positions(tmp_path: Path):
    """The tokenizer decides what is said unless the user does."""
    folder = text_model(tmp_path / "model", max_positions=2000)
    flags = ["--len", "1k", "--turns", "3", "--questions", "2"]
    recall = plans_for(folder, "--workload", "recall", *flags)["full"].plan.workload
    assert recall.script == "recall"
    workload = plans_for(folder, *flags)["full"].plan.workload
    script = open_script("text", str(folder))
    (session,) = plan_sessions(workload, script)
    exchange = script.lengths.prompt + script.lengths.answer
    assert workload.script == "text"
    assert turn_tokens(workload) == 6 * exchange
    assert longest_prompt(workload) == 1024 + 4 * exchange
    assert len(session.context_ids) == 1024
    with pytest.raises(SizeError, match=r"--len: expected at most \d+ tokens.*2000 positions"):
        plans_for(folder, "--len", "1k", "--turns", "60")
    with pytest.raises(SizeError, match=r"--len: expected at least \d+ tokens"):
        plans_for(folder, "--len", "64")


def test_heads_that_compete_need_no_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every worker reads the settings again: those of the baseline name the scorer, too."""
    folder, file = text_model(tmp_path / "model"), tmp_path / "worth.npz"
    TokenWorth(torch.zeros(1, 1, 3)).save(file)
    flags = ["--len", "1k", "--retention", "0.5", "--head-budgets", "adaptive"]
    flags += ["--scorer", "reconstruction", "--scorer-file", str(file)]
    full, ours = plans_for(folder, *flags).values()
    assert ours.plan.heads_compete
    assert not full.plan.heads_compete
    assert ours.plan.head_profile is None
    assert ours.plan.environment["KVTIER_HEAD_BUDGETS"] == "adaptive"
    assert ours.notes == (), "heads that compete save what they do not keep"
    assert "KVTIER_HEAD_PROFILE" not in ours.plan.environment
    # A number beside the KV.
    assert ours.slot_bytes > full.slot_bytes
    for one in (full, ours):
        with monkeypatch.context() as worker:
            for name, value in one.plan.environment.items():
                worker.setenv(name, value)
            assert scorer_of(load_settings()).name == "reconstruction"
    with pytest.raises(HeadProfileError, match="--head-budgets: expected equal beside policy ran"):
        plans_for(folder, *flags, "--policies", "random")


@pytest.mark.parametrize(
    ("asked", "compete"),
    [
        ([], True),
        (["--policies", "full,kvtier,window"], True),
        (["--head-budgets", "equal"], False),
        (["--scorer", "compactor", "--retention", "0.5"], False),
    ],
)
def test_heads_of_a_model_with_a_map_beside_it_compete_unless_asked_otherwise(
    tmp_path: Path, asked: list[str], compete: bool
):
    folder = text_model(tmp_path / "model")
    TokenWorth(torch.zeros(1, 1, 3)).save(folder / "token_worth.npz")
    ours = plans_for(folder, "--len", "1k", *asked)["kvtier"]
    assert ours.plan.heads_compete == ours.settings.competes == compete
    assert not compete or ours.plan.environment["KVTIER_RETENTION"] == "0.25"
