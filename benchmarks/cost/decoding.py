"""The cost of a decoding step of one session: kvtier and full KV beside stock SGLang.

Short contexts show the fixed cost of a step, long ones what is read of the cache. Engines of all
policies take turns, because a machine's speed drifts by more than what is compared.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.benchmark import RESULTS, ROOT, Arguments, Benchmark, Measured, Options
from benchmarks.common.table import new_table, show
from benchmarks.cost.engine import engine_arguments, serve
from benchmarks.gpu.serving_worker import Load, Plan
from kvtier.sizes import format_size

POLICIES = ("stock", "full", "kvtier")
# Words of the demo model's vocabulary, without its special ids.
IDS = (6, 384)
TURNS, TURN_TOKENS, SLACK_TOKENS = 3, 16, 4096


def declare(arguments: Arguments) -> None:
    arguments.add(
        "--model-path", type=Path, default=ROOT / "models" / "kvtier-demo", metavar="DIR",
        help="a model with a head_profile.json, whose ids 6 … 383 are no special ones",
    )  # fmt: skip
    arguments.size("--len", "1k", "context tokens")
    arguments.whole("--answer-tokens", 256, "of every answer", least=2)
    arguments.whole("--rounds", 3, "engines of each policy")


def run(options: Options) -> Measured:
    found: dict[str, list[dict[str, Any]]] = {policy: [] for policy in POLICIES}
    for number in range(options.rounds):
        # Forwards and backwards, so that what drifts meets all alike.
        for policy in POLICIES if number % 2 == 0 else POLICIES[::-1]:
            with tempfile.TemporaryDirectory(prefix="kvtier-decoding-") as folder:
                profile = options.model_path / "head_profile.json" if policy == "kvtier" else None
                found[policy].append(serve(make_plan(options, policy), Path(folder), profile))
    policies = {policy: summary(rounds) for policy, rounds in found.items()}
    table = new_table(
        f"A decoding step behind {format_size(options.len)} tokens",
        ("policy", "ms per token", "least and most", "stock / policy"),
        left=("policy",),
    )
    for policy, one in policies.items():
        least, most = min(one["tpot_ms"]), max(one["tpot_ms"])
        ratio = policies["stock"]["median_tpot_ms"] / one["median_tpot_ms"]
        table.add_row(
            policy, f"{one['median_tpot_ms']:.2f}", f"{least:.2f} … {most:.2f}", f"{ratio:.2f}x"
        )
    show(table)
    return Measured(
        {
            "context_tokens": options.len,
            "answer_tokens": options.answer_tokens,
            "rounds": options.rounds,
            "policies": policies,
        }
    )


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """tpot_ms: of each engine, the median of its later turns."""
    tpot_ms = [1000 * one["tpot_s"] for one in rounds]
    return {
        "median_tpot_ms": statistics.median(tpot_ms),
        "tpot_ms": tpot_ms,
        "cached_tokens": min(one["cached_tokens"] for one in rounds),
    }


def make_plan(options: Options, policy: str) -> Plan:
    chunk = min(options.len, 4096)
    turn = TURN_TOKENS + options.answer_tokens
    room = options.len + TURNS * turn + chunk + SLACK_TOKENS
    engine = engine_arguments(options.model_path, chunk, room, options.seed)
    engine["attention_backend"] = "torch_native" if policy == "stock" else "kvtier"
    if policy == "kvtier":
        engine["radix_cache_backend"] = "kvtier"
    load = Load(
        sessions=1,
        context=options.len,
        turns=TURNS,
        turn_tokens=TURN_TOKENS,
        answer_tokens=options.answer_tokens,
        chunk=chunk,
        ids=IDS,
        seed=options.seed,
    )
    return Plan(engine=engine, load=load)


BENCHMARK = Benchmark(
    "cost.decoding", __doc__, declare, run, out=RESULTS / "decoding-1k.json", seeded="of all tokens"
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
