"""An engine in a process of its own, and sessions held in it: one policy of `gpu.serving`.

python -m benchmarks.gpu.serving_worker PLAN.json OUT.json
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from kvtier.bench.engine import Answer, Arrival, Engine, SglangEngine
from kvtier.bench.metrics import tpot_ms
from kvtier.bench.worker import die_with_parent

# The keys of the kvtier part of an engine's state, where it has them.
STATE = ("kv_used_bytes", "kv_peak_bytes", "integrity")


class Load(BaseModel):
    """The load that is the same for every policy: `sessions` contexts of `context` tokens, and then
    so many turns of all at once. chunk: of a prefill, in tokens; ids: tokens are drawn from the
    first to below the second; seed: of all tokens."""

    model_config = ConfigDict(frozen=True)

    sessions: int
    context: int
    turns: int
    turn_tokens: int
    answer_tokens: int
    chunk: int
    ids: tuple[int, int]
    seed: int


class Plan(BaseModel):
    """engine: keyword arguments of sglang.Engine."""

    model_config = ConfigDict(frozen=True)

    engine: dict[str, Any]
    load: Load


def hold(engine: Engine, load: Load) -> dict[str, Any]:
    """Hold all sessions: their first turns one after the other, each later one of all at a time."""
    chance = random.Random(load.seed)

    def drawn(count: int) -> tuple[int, ...]:
        return tuple(chance.randrange(*load.ids) for _ in range(count))

    def ask(prompts: Sequence[tuple[int, ...]], tokens: int) -> list[Answer]:
        arrivals = [Arrival(0.0, prompt, tokens) for prompt in prompts]
        return engine.replay(arrivals, lambda index, answer: None)

    # Compiles what is compiled on first use.
    ask([drawn(2 * load.chunk)], 4)
    engine.flush()
    histories, first, later = list[tuple[int, ...]](), list[Answer](), list[Answer]()
    for _ in range(load.sessions):
        prompt = drawn(load.context)
        first += ask([prompt], load.answer_tokens)
        histories.append((*prompt, *first[-1].output_ids))
    began = time.perf_counter()
    for _ in range(load.turns - 1):
        prompts = [(*history, *drawn(load.turn_tokens)) for history in histories]
        answers = ask(prompts, load.answer_tokens)
        pairs = zip(prompts, answers, strict=True)
        histories = [(*prompt, *answer.output_ids) for prompt, answer in pairs]
        later += answers
    later_s = time.perf_counter() - began
    return {
        "sessions": load.sessions,
        "first_turn_ttft_s": median_s(one.ttft_ms for one in first),
        "first_turn_tpot_s": median_s(map(tpot_ms, first)),
        "ttft_s": median_s(one.ttft_ms for one in later),
        "tpot_s": median_s(map(tpot_ms, later)),
        "tokens_per_s": len(later) * load.answer_tokens / later_s,
        "cached_tokens": min(one.cached_tokens for one in later),
    }


def median_s(values_ms: Iterable[float]) -> float:
    return statistics.median(values_ms) / 1e3


def main(argv: Sequence[str]) -> int:
    """The worker: plan in, figures out."""
    die_with_parent()
    plan, out = Plan.model_validate_json(Path(argv[0]).read_text()), Path(argv[1])
    began = time.perf_counter()
    engine = SglangEngine(plan.engine)
    found: dict[str, Any] = {"load_s": time.perf_counter() - began}
    try:
        found |= hold(engine, plan.load)
        state = engine.state()
        found |= {key: state[key] for key in STATE if key in state}
    finally:
        engine.close()
    out.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
