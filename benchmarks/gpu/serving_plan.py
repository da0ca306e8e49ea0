"""The configuration of each policy of `benchmarks.gpu.serving`: a model without weights, settings,
the engine's arguments, and as many sessions as go into the same bytes of KV."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from benchmarks.common.benchmark import ROOT, Options
from benchmarks.common.remote import clean_environment
from benchmarks.gpu.serving_worker import Load, Plan
from kvtier.config import Settings
from kvtier.config.sections import ScorerSettings
from kvtier.heads.model.config import model_shape
from kvtier.heads.profile import HeadProfile, full_profile, load_profile
from kvtier.pool_sizing import PoolPlan, SessionShape, kept_slots, plan_pool, slot_bytes
from kvtier.retention.shares import expected_share

# Ids at both ends of a vocabulary may be special: so many of Llama's 128k are left out.
MARGIN_SHARE = 1 / 128
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072 + 4096,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
DEMO = ROOT / "models" / "kvtier-demo" / "config.json"
POLICIES = ("stock", "full", "kvtier", "adaptive")
# Policies with kvtier's cache: what a session keeps depends on the policy.
COMPRESSING = ("kvtier", "adaptive")
# The share of the heads, in every layer as many, anywhere; and of the entries, where heads compete.
SHARE = 0.25
# The spread of tokens' worth with their KV, and that between heads, where nothing was fitted.
WORTH_SPREAD, APPETITE_SPREAD = 0.02, 1.2
SLACK_TOKENS = 4096


def model_config(options: Options) -> dict[str, Any]:
    """Return the configuration of the model that is served: Llama-3.1-8B's, the demo model's in a
    dry run."""
    config: dict[str, Any] = json.loads(DEMO.read_text()) if options.dry else LLAMA_8B
    return config


def write_model(options: Options, folder: Path) -> None:
    """A configuration, a head profile for it, and what tokens are worth; no weights."""
    import torch

    from kvtier.retention.token_worth import TokenWorth, feature_width

    config = model_config(options)
    (folder / "config.json").write_text(json.dumps(config))
    shape = model_shape(config)
    chance = random.Random(options.seed)
    ca_heads = int(SHARE * shape.num_kv_heads)
    heads = tuple(
        tuple(sorted(chance.sample(range(shape.num_kv_heads), ca_heads)))
        for _ in range(shape.num_layers)
    )
    HeadProfile(model="dummy", shape=shape, method="assumed", ca_heads=heads).save(
        folder / "head_profile.json"
    )
    generator = torch.Generator().manual_seed(options.seed)
    rows = (shape.num_layers, shape.num_kv_heads)
    width = feature_width(shape.num_kv_heads, shape.head_dim)
    weights = WORTH_SPREAD * torch.randn(*rows, width, generator=generator)
    weights[..., -1] = APPETITE_SPREAD * torch.randn(*rows, generator=generator)
    TokenWorth(weights).save(folder / "token_worth.npz")


def make_plan(options: Options, policy: str, folder: Path, sessions: int | None = None) -> Plan:
    """Return what a policy's engine is started with, and the load, which is the same for all.
    sessions: where they are not those asked for, but as many as go into their bytes. folder:
    with the model."""
    config = model_config(options)
    margin = int(MARGIN_SHARE * config["vocab_size"])
    load = Load(
        sessions=options.sessions if sessions is None else sessions,
        context=options.context,
        turns=options.turns,
        turn_tokens=options.turn_tokens,
        answer_tokens=options.answer_tokens,
        chunk=options.chunk,
        ids=(margin, config["vocab_size"] - margin),
        seed=options.seed,
    )
    engine = engine_arguments(options, policy, folder)
    if sessions is not None:
        engine |= room_for(options, sessions, equal_pool(options, policy, folder).slots)
    return Plan(engine=engine, load=load)


def policy_settings(options: Options, policy: str, folder: Path) -> Settings:
    """kvtier's settings of a policy's engine. Heads compete where the policy says so alone,
    whatever is calibrated."""
    data_dir = folder / "data"
    if policy not in COMPRESSING:
        return Settings(data_dir=data_dir, head_budgets="equal")
    if policy == "kvtier":
        return Settings(
            data_dir=data_dir,
            head_budgets="equal",
            head_profile=folder / "head_profile.json",
        )
    return Settings(
        data_dir=data_dir,
        head_budgets="adaptive",
        retention=SHARE,
        scorer=ScorerSettings(name="reconstruction", file=folder / "token_worth.npz"),
    )


def environment(options: Options, policy: str, folder: Path) -> dict[str, str]:
    """Return the environment of a policy's engine: its settings, and no other KVTIER_* variable."""
    return clean_environment() | policy_settings(options, policy, folder).to_env()


def engine_arguments(options: Options, policy: str, folder: Path) -> dict[str, Any]:
    """Keyword arguments of sglang.Engine."""
    arguments: dict[str, Any] = {
        "model_path": str(folder),
        "load_format": "dummy",
        "device": "cpu" if options.dry else "cuda",
        "dtype": "float32" if options.dry else "bfloat16",
        "skip_tokenizer_init": True,
        "grammar_backend": "none",
        "skip_server_warmup": True,
        "chunked_prefill_size": options.chunk,
        # kvtier has no CUDA graphs of prefill, so the other policies go without them, too.
        "disable_prefill_cuda_graph": True,
        "random_seed": options.seed,
        "log_level": "warning",
        "attention_backend": options.stock_attention if policy == "stock" else "kvtier",
        **room_for(options, options.sessions, options.sessions * _session_tokens(options)),
    }
    if options.dry:
        arguments["disable_cuda_graph"] = True
    if policy in COMPRESSING:
        arguments["radix_cache_backend"] = "kvtier"
    return arguments


def room_for(options: Options, sessions: int, tokens: int) -> dict[str, Any]:
    """Return those of an engine's arguments that sessions of so many tokens in all want. There is
    slack beside them: a chunk in flight, and SLACK_TOKENS."""
    return {
        "max_total_tokens": tokens + options.chunk + SLACK_TOKENS,
        "max_running_requests": sessions,
        "cuda_graph_bs_decode": sorted({1, sessions}),
    }


def equal_pool(options: Options, policy: str, folder: Path) -> PoolPlan:
    """Slots and sessions of a policy in the bytes that the sessions asked for take with full KV:
    those that rest, and a prefill, which drops nothing before its turn ends. `room_for` adds slack.

    Raises BudgetError where not one session fits.
    """
    # Scorers need torch, which plans of other policies do without.
    from kvtier.retention.rules import state_width

    shape = model_shape(model_config(options))
    if policy not in COMPRESSING:
        return PoolPlan(options.sessions * _session_tokens(options), options.sessions)
    settings = policy_settings(options, policy, folder)
    profile = full_profile(shape)
    if settings.head_profile is not None:
        profile = load_profile(settings.head_profile)
    heads, anchored = shape.num_layers * shape.num_kv_heads, profile.num_ca_heads
    edges = settings.locality.kept_tokens(competes=settings.competes)
    share = expected_share(settings)
    kept = kept_slots(options.context, edges, share, anchored, heads)
    session = SessionShape(options.context, _turns_tokens(options), kept)
    per_slot = slot_bytes(
        shape, _itemsize(options), state_width=state_width(settings), votes=int(anchored < heads)
    )
    return plan_pool(full_bytes(options), per_slot, session)


def full_bytes(options: Options) -> int:
    """Return the bytes of the KV of the sessions asked for, where nothing is dropped."""
    token = slot_bytes(model_shape(model_config(options)), _itemsize(options))
    return int(options.sessions * _session_tokens(options) * token)


def _itemsize(options: Options) -> int:
    return 4 if options.dry else 2


def _turns_tokens(options: Options) -> int:
    """Return the tokens of all turns of a session."""
    return int(options.turns * (options.turn_tokens + options.answer_tokens))


def _session_tokens(options: Options) -> int:
    return int(options.context) + _turns_tokens(options)
