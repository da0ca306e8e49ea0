"""The savings and the costs of kvtier while serving a model of real size on this GPU.

    python -m benchmarks.gpu.serving --equal-bytes --out out/gpu-serving.json       with SGLang
    python -m benchmarks.gpu.serving --equal-bytes --dry             on a CPU, to see that it runs

A model of Llama-3.1-8B's shape with random weights (SGLang's `load_format="dummy"`): its answers
mean nothing, but its time and memory are those of the real one. Sessions prefill a long context one
after another, then all ask at once, a few turns in a row. Each policy has an engine of its own in
this run, with the same requests:

    stock     SGLang's radix cache and its Triton attention (--stock-attention names another)
    full      SGLang's radix cache, kvtier's attention over every head
    kvtier    a quarter of the heads keeps the context, the others sink + recent
    adaptive  all heads compete for a quarter of the entries, by what tokens are worth, drawn at
              random

The JSON has per policy the bytes of KV that the sessions hold between turns (from the pools). It
has the medians of time to first token and time per output token of the later turns, and tokens per
second over these turns.
With --equal-bytes each policy that compresses has a second engine, with as many sessions as go into
the bytes that full KV takes for those of the first. Both engines' pools have slack beside these
bytes: a chunk and 4096 slots. So what sessions hold between turns is compared, not the sizes of
pools.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.bars import Bar, at_least, at_most
from benchmarks.common.benchmark import Arguments, Benchmark, Measured, Options
from benchmarks.common.remote import WorkerError, run_module
from benchmarks.gpu.serving_plan import (
    COMPRESSING,
    POLICIES,
    environment,
    equal_pool,
    full_bytes,
    make_plan,
    write_model,
)
from kvtier.errors import BudgetError

LOG_TAIL_CHARACTERS = 6000
# The sizes are as small as compressing shows.
DRY = {
    "sessions": 2, "context": 1200, "turns": 2, "turn_tokens": 16, "answer_tokens": 12,
    "chunk": 512, "stock_attention": "torch_native",
}  # fmt: skip


def declare(arguments: Arguments) -> None:
    add, whole = arguments.add, arguments.whole
    whole("--sessions", 4, "that are held at a time")
    whole("--context", 64 << 10, "tokens of each")
    whole("--turns", 4, "of each, the one with its context included", least=2)
    whole("--turn-tokens", 128, "that a later turn asks")
    whole("--answer-tokens", 64, "of every answer", least=8)
    whole("--chunk", 8192, "tokens prefilled at a time")
    add("--policies", nargs="+", choices=POLICIES, default=POLICIES, help="(all)")
    add("--stock-attention", default="triton", metavar="NAME", help="(%(default)s)")
    add("--equal-bytes", action="store_true", help="also as many sessions as full KV's bytes hold")
    arguments.number("--limit-s", 3600, "for each engine, which is ended then", metavar="SECONDS")
    add("--dry", action="store_true", help="on a CPU, the demo model's shape, smaller defaults")
    arguments.other_defaults("--dry", DRY)


def run(options: Options) -> Iterator[Measured]:
    """One policy after the other; what was measured so far comes after each of them."""
    import torch

    policies: dict[str, dict[str, Any]] = {}
    figures = {
        "device": "cpu" if options.dry else torch.cuda.get_device_name(),
        "options": {key: value for key, value in vars(options).items() if key != "out"},
        "full_kv_bytes": full_bytes(options),
        "policies": policies,
    }
    with tempfile.TemporaryDirectory(prefix="kvtier-serving-") as name:
        folder = Path(name)
        write_model(options, folder)
        for policy in options.policies:
            policies[policy] = serve(options, policy, folder)
            print(policy, in_short(policies[policy]), flush=True)
            yield Measured(figures, make_bars(policies, options))
        # Last, as a machine may be there for minutes only.
        for policy in options.policies if options.equal_bytes else ():
            policies[policy]["equal_bytes"] = serve_equal_bytes(options, policy, folder, policies)
            yield Measured(figures, make_bars(policies, options))


def serve_equal_bytes(
    options: Options, policy: str, folder: Path, policies: Mapping[str, Any]
) -> dict[str, Any]:
    """Serve as many sessions as the bytes hold: in a second engine, where the first had fewer;
    `failed` says where they hold none beside a prefill."""
    try:
        sessions = int(equal_pool(options, policy, folder).sessions)
    except BudgetError as error:
        return {"failed": str(error)}
    if sessions == options.sessions:
        return dict(policies[policy])
    found = serve(options, policy, folder, sessions)
    print(policy, "in the same bytes", in_short(found), flush=True)
    return found


def serve(
    options: Options, policy: str, folder: Path, sessions: int | None = None
) -> dict[str, Any]:
    """One policy in an engine of its own; `failed` has the log's end where it could not. folder:
    with the model, and for the engine's files; sessions: where they are not those asked for."""
    name = policy if sessions is None else f"{policy}-{sessions}"
    plan, out, log = (folder / f"{name}-{file}" for file in ("plan.json", "out.json", "log"))
    plan.write_text(make_plan(options, policy, folder, sessions).model_dump_json())
    found: dict[str, Any] = {}
    try:
        run_module(
            "benchmarks.gpu.serving_worker",
            [plan, out],
            environment(options, policy, folder),
            log,
            options.limit_s,
        )
    except WorkerError:
        found["failed"] = log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]
    # It may have failed after its figures were written.
    return json.loads(out.read_text()) | found if out.exists() else found


def in_short(found: Mapping[str, Any]) -> str:
    """One policy's figures, or the end of its log, in a line."""
    return json.dumps(found)[-1500:]


def make_bars(policies: Mapping[str, Mapping[str, Any]], options: Options) -> list[Bar]:
    """Every policy served, and no engine found a fault with its own accounts."""
    bars = []
    for policy, one in policies.items():
        bars += _sound(policy, one)
        if "equal_bytes" not in one or policy not in COMPRESSING:
            continue
        name, equal = f"{policy}, equal bytes", one["equal_bytes"]
        bars += _sound(name, equal)
        if "failed" not in equal:
            held = equal["kv_used_bytes"] / full_bytes(options)
            bars.append(at_most(f"{name}: KV between turns / full KV's", held, 1))
            kept = equal["cached_tokens"] / options.context
            bars.append(at_least(f"{name}: of a context, computed once", kept, 1))
    return bars


def _sound(name: str, found: Mapping[str, Any]) -> list[Bar]:
    problems = found.get("integrity", [])
    return [
        Bar(f"{name}: the engine served", "failed" not in found, "failed" not in found),
        Bar(f"{name}: the engine's accounts", problems or "sound", not problems),
    ]


BENCHMARK = Benchmark("gpu.serving", __doc__, declare, run, gpu=True)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
