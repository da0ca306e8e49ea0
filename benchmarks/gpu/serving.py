"""What kvtier saves and costs while serving a model of real size on this GPU.

    python -m benchmarks.gpu.serving --out out/gpu-serving.json        where SGLang and kvtier are

A model of Llama-3.1-8B's shape with random weights (SGLang's `load_format="dummy"`): its answers
mean nothing, but its time and memory are those of the real one. Sessions prefill a long context one
after another, then all ask at once, a few turns in a row. Each policy has an engine of its own in
this run, with the same requests:

    stock     SGLang's radix cache and its Triton attention (--stock-attention names another)
    full      SGLang's radix cache, kvtier's attention over every head
    kvtier    a quarter of the heads keeps the context, the others sink + recent

The JSON has per policy the bytes of KV that the sessions hold between turns (from the pools), and
the medians of time to first token and time per output token of the later turns.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.bars import Bar
from benchmarks.common.benchmark import Arguments, Benchmark, Measured, Options
from benchmarks.common.remote import WorkerError, clean_environment, run_module
from benchmarks.gpu.serving_worker import Load, Plan
from kvtier.config import ENV_PREFIX
from kvtier.heads.model.config import model_shape
from kvtier.heads.profile import HeadProfile

VOCAB_SIZE = 128256
# Ids at both ends of a vocabulary may be special.
MARGIN_IDS = 1000
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 131072 + 4096,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
POLICIES = ("stock", "full", "kvtier")
# In every layer as many, anywhere.
CA_HEADS = 2
SLACK_TOKENS = 4096
LOG_TAIL_CHARACTERS = 6000


def declare(arguments: Arguments) -> None:
    add, whole = arguments.add, arguments.whole
    whole("--sessions", 4, "that are held at a time")
    whole("--context", 64 << 10, "tokens of each")
    whole("--turns", 4, "of each, the one with its context included", least=2)
    whole("--turn-tokens", 128, "that a later turn asks")
    whole("--answer-tokens", 64, "of every answer")
    whole("--chunk", 8192, "tokens prefilled at a time")
    add("--prefill", choices=("exact", "streaming"), default="exact", help="(%(default)s)")
    add("--policies", nargs="+", choices=POLICIES, default=POLICIES, help="(all)")
    add("--stock-attention", default="triton", metavar="NAME", help="(%(default)s)")


def run(options: Options) -> Iterator[Measured]:
    """One policy after the other; what was measured so far comes after each of them."""
    import torch

    policies: dict[str, dict[str, Any]] = {}
    figures = {
        "device": torch.cuda.get_device_name(),
        "options": {key: value for key, value in vars(options).items() if key != "out"},
        "policies": policies,
    }
    with tempfile.TemporaryDirectory(prefix="kvtier-serving-") as folder:
        write_model(Path(folder))
        for policy in options.policies:
            policies[policy] = serve(options, policy, Path(folder))
            print(policy, json.dumps(policies[policy])[-1500:], flush=True)
            yield Measured(figures, make_bars(policies))


def serve(options: Options, policy: str, folder: Path) -> dict[str, Any]:
    """One policy in an engine of its own; `failed` has the log's end where it could not. folder:
    with the model, and for the engine's files."""
    plan, out, log = (folder / f"{policy}-{name}" for name in ("plan.json", "out.json", "log"))
    plan.write_text(make_plan(options, policy, folder).model_dump_json())
    try:
        run_module(
            "benchmarks.gpu.serving_worker", [plan, out], environment(options, policy, folder), log
        )
    except WorkerError:
        return {"failed": log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]}
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def make_plan(options: Options, policy: str, model: Path) -> Plan:
    """What a policy's engine is started with, and the load, which is the same for all."""
    load = Load(
        sessions=options.sessions,
        context=options.context,
        turns=options.turns,
        turn_tokens=options.turn_tokens,
        answer_tokens=options.answer_tokens,
        chunk=options.chunk,
        ids=(MARGIN_IDS, VOCAB_SIZE - MARGIN_IDS),
        seed=options.seed,
    )
    return Plan(engine=engine_arguments(options, policy, model), load=load)


def environment(options: Options, policy: str, model: Path) -> dict[str, str]:
    """Of a policy's engine: no KVTIER_* variable but what the policy needs."""
    settings = {"DATA_DIR": str(model)}
    if policy == "kvtier":
        turn = options.turn_tokens + options.answer_tokens
        settings |= {
            "HEAD_PROFILE": str(model / "head_profile.json"),
            "SESSION_TOKENS": str(options.context),
            "SESSION_TURN_TOKENS": str(options.turns * turn),
            "PREFILL": options.prefill,
        }
    return clean_environment() | {ENV_PREFIX + name: value for name, value in settings.items()}


def engine_arguments(options: Options, policy: str, model: Path) -> dict[str, Any]:
    """Keyword arguments of sglang.Engine."""
    turn = options.turn_tokens + options.answer_tokens
    session = options.context + options.turns * turn
    arguments: dict[str, Any] = {
        "model_path": str(model),
        "load_format": "dummy",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "grammar_backend": "none",
        "skip_server_warmup": True,
        "chunked_prefill_size": options.chunk,
        "max_total_tokens": options.sessions * session + options.chunk + SLACK_TOKENS,
        "max_running_requests": options.sessions,
        # kvtier has no CUDA graphs of prefill, so the other policies go without them, too.
        "disable_prefill_cuda_graph": True,
        "cuda_graph_bs_decode": sorted({1, options.sessions}),
        "random_seed": options.seed,
        "log_level": "warning",
        "attention_backend": options.stock_attention if policy == "stock" else "kvtier",
    }
    if policy == "kvtier":
        arguments["radix_cache_backend"] = "kvtier"
    return arguments


def write_model(folder: Path) -> None:
    """A configuration, and a head profile for it; no weights."""
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    shape = model_shape(LLAMA_8B)
    chance = random.Random(0)
    heads = tuple(
        tuple(sorted(chance.sample(range(shape.num_kv_heads), CA_HEADS)))
        for _ in range(shape.num_layers)
    )
    HeadProfile(model="dummy", shape=shape, method="assumed", ca_heads=heads).save(
        folder / "head_profile.json"
    )


def make_bars(policies: Mapping[str, Mapping[str, Any]]) -> list[Bar]:
    """Every policy served, and no engine found a fault with its own accounts."""
    bars = []
    for policy, found in policies.items():
        bars.append(
            Bar(f"{policy}: the engine served", "failed" not in found, "failed" not in found)
        )
        problems = found.get("integrity", [])
        bars.append(Bar(f"{policy}: the engine's accounts", problems or "sound", not problems))
    return bars


BENCHMARK = Benchmark(
    "gpu.serving", __doc__, declare, run, seeded="of all tokens and of the weights", gpu=True
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
