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

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.command import ROOT
from kvtier.heads.model_config import model_shape
from kvtier.heads.profile import HeadProfile

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
POLICIES = ("stock", "full", "kvtier")
# In every layer as many, anywhere.
CA_HEADS = 2
SLACK_TOKENS = 4096


def engine_arguments(options: argparse.Namespace, policy: str, model: Path) -> dict[str, Any]:
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


async def ask(engine: Any, prompt: Sequence[int], new_tokens: int) -> dict[str, Any]:
    """One streamed request: its answer, and when its tokens came."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    began, first = time.perf_counter(), 0.0
    answer: dict[str, Any] = {}
    stream = await engine.async_generate(
        input_ids=list(prompt), sampling_params=sampling, stream=True
    )
    async for chunk in stream:
        answer, first = chunk, first or time.perf_counter()
    ended = time.perf_counter()
    return {
        "output_ids": list(answer["output_ids"]),
        "cached_tokens": answer["meta_info"]["cached_tokens"],
        "ttft_s": first - began,
        "tpot_s": (ended - first) / max(1, new_tokens - 1),
    }


async def hold(engine: Any, options: argparse.Namespace) -> dict[str, Any]:
    """All sessions from their first turn to their last."""
    chance = random.Random(options.seed)

    def tokens(count: int) -> list[int]:
        return [chance.randrange(1000, LLAMA_8B["vocab_size"] - 1000) for _ in range(count)]

    # Compiles what is compiled on first use.
    await ask(engine, tokens(2 * options.chunk), 4)
    await engine.tokenizer_manager.flush_cache()
    histories, first = [], []
    for _ in range(options.sessions):
        prompt = tokens(options.context)
        answer = await ask(engine, prompt, options.answer_tokens)
        first.append(answer)
        histories.append([*prompt, *answer["output_ids"]])
    later = []
    for _ in range(options.turns - 1):
        for history in histories:
            history += tokens(options.turn_tokens)
        answers = await asyncio.gather(
            *(ask(engine, history, options.answer_tokens) for history in histories)
        )
        for history, answer in zip(histories, answers, strict=True):
            history += answer["output_ids"]
        later += answers
    return {
        "first_turn_ttft_s": statistics.median(one["ttft_s"] for one in first),
        "first_turn_tpot_s": statistics.median(one["tpot_s"] for one in first),
        "ttft_s": statistics.median(one["ttft_s"] for one in later),
        "tpot_s": statistics.median(one["tpot_s"] for one in later),
        "cached_tokens": min(one["cached_tokens"] for one in later),
    }


def work(plan_path: str, out_path: str) -> None:
    """In a process of its own: one policy."""
    import sglang

    plan = json.loads(Path(plan_path).read_text())
    options = argparse.Namespace(**plan["options"])
    began = time.perf_counter()
    engine = sglang.Engine(**plan["engine"])
    load_s = time.perf_counter() - began
    try:
        found = engine.loop.run_until_complete(_held(engine, options))
    finally:
        engine.shutdown()
    Path(out_path).write_text(json.dumps({"load_s": load_s, **found}))


async def _held(engine: Any, options: argparse.Namespace) -> dict[str, Any]:
    found = await hold(engine, options)
    (state,) = await _internal_states(engine)
    kvtier = state.get("kvtier", {})
    return found | {
        key: kvtier[key] for key in ("kv_used_bytes", "kv_peak_bytes", "integrity") if key in kvtier
    }


async def _internal_states(engine: Any) -> list[dict[str, Any]]:
    states: list[dict[str, Any]] = await engine.tokenizer_manager.get_internal_state()
    return states


def run(options: argparse.Namespace, policy: str, model: Path) -> dict[str, Any]:
    """One policy's worker."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVTIER_")}
    environment["KVTIER_DATA_DIR"] = str(model)
    turn = options.turn_tokens + options.answer_tokens
    if policy == "kvtier":
        environment |= {
            "KVTIER_HEAD_PROFILE": str(model / "head_profile.json"),
            "KVTIER_SESSION_TOKENS": str(options.context),
            "KVTIER_SESSION_TURN_TOKENS": str(options.turns * turn),
            "KVTIER_PREFILL": options.prefill,
        }
    plan, out, log = (model / f"{policy}-{name}" for name in ("plan.json", "out.json", "log"))
    plan.write_text(
        json.dumps(
            {
                "engine": engine_arguments(options, policy, model),
                "options": {k: v for k, v in vars(options).items() if k != "out"},
            }
        )
    )
    command = [sys.executable, "-m", "benchmarks.gpu.serving", "--work", str(plan), str(out)]
    with log.open("wb") as stream:
        code = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=stream, stderr=stream, check=False
        ).returncode
    if code or not out.exists():
        return {"failed": log.read_text(errors="replace")[-6000:]}
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--work"]:
        work(*arguments[1:])
        return 0
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu.serving", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--context", type=int, default=64 << 10, help="tokens of each")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--turn-tokens", type=int, default=128)
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--prefill", choices=("exact", "streaming"), default="exact")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--stock-attention", default="triton")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="JSON of the outcome")
    options = parser.parse_args(arguments)
    import torch

    document: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "options": {k: v for k, v in vars(options).items() if k != "out"},
        "policies": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for policy in options.policies:
            found = run(options, policy, Path(folder))
            document["policies"][policy] = found
            print(policy, json.dumps(found)[-1500:], flush=True)
            if options.out is not None:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(document, indent=1) + "\n")
    return int(any("failed" in found for found in document["policies"].values()))


if __name__ == "__main__":
    sys.exit(main())
