"""An engine in a process of its own, and sessions held in it: one policy of `gpu.serving`, of
`cost.decoding` or of `cost.drafts`.

python -m benchmarks.gpu.serving_worker PLAN.json OUT.json
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from kvtier.bench.worker import die_with_parent

# Of the kvtier part of an engine's state, where it has one.
STATE = ("kv_used_bytes", "kv_peak_bytes", "integrity")


class Load(BaseModel):
    """What is asked of every policy: `sessions` contexts of `context` tokens, and then so many
    turns of all at once. chunk: of a prefill, in tokens; ids: tokens are drawn from the first to
    below the second; seed: of all tokens; phrase: of so many tokens, which a session says over and
    over instead of new ones; prefix: what every context begins with."""

    model_config = ConfigDict(frozen=True)

    sessions: int
    context: int
    turns: int
    turn_tokens: int
    answer_tokens: int
    chunk: int
    ids: tuple[int, int]
    seed: int
    phrase: int | None = None
    prefix: tuple[int, ...] = ()


class Plan(BaseModel):
    """engine: keyword arguments of sglang.Engine."""

    model_config = ConfigDict(frozen=True)

    engine: dict[str, Any]
    load: Load


async def ask(engine: Any, prompt: Sequence[int], new_tokens: int) -> dict[str, Any]:
    """One streamed request: its answer, and when its tokens came. Raises RuntimeError where it is
    aborted, whose time is none of an answer's."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    began, first = time.perf_counter(), 0.0
    answer: dict[str, Any] = {}
    stream = await engine.async_generate(
        input_ids=list(prompt), sampling_params=sampling, stream=True
    )
    async for chunk in stream:
        answer, first = chunk, first or time.perf_counter()
    ended = time.perf_counter()
    reason = answer["meta_info"]["finish_reason"]
    if reason["type"] == "abort":
        raise RuntimeError(f"a request of {len(prompt)} tokens was aborted: {reason['message']}")
    return {
        "output_ids": list(answer["output_ids"]),
        "cached_tokens": answer["meta_info"]["cached_tokens"],
        # With drafts: tokens for each pass that verified some.
        "accept_length": answer["meta_info"].get("spec_accept_length", 1.0),
        "ttft_s": first - began,
        "tpot_s": (ended - first) / max(1, new_tokens - 1),
    }


async def hold(engine: Any, load: Load) -> dict[str, Any]:
    """All sessions from their first turn to their last."""
    chance = random.Random(load.seed)

    def tokens(count: int) -> list[int]:
        return [chance.randrange(*load.ids) for _ in range(count)]

    def new_text() -> Callable[[int], list[int]]:
        """What a session says next: new tokens, or its phrase from where it stopped."""
        if load.phrase is None:
            return tokens
        phrase = cycle(tokens(load.phrase))
        return lambda count: list(islice(phrase, count))

    # Compiles what is compiled on first use.
    await ask(engine, tokens(2 * load.chunk), 4)
    await engine.tokenizer_manager.flush_cache()
    histories, first, texts = [], [], [new_text() for _ in range(load.sessions)]
    for text in texts:
        prompt = [*load.prefix, *text(load.context)]
        answer = await ask(engine, prompt, load.answer_tokens)
        first.append(answer)
        histories.append([*prompt, *answer["output_ids"]])
    later = []
    for _ in range(load.turns - 1):
        for history, text in zip(histories, texts, strict=True):
            history += text(load.turn_tokens)
        answers = await asyncio.gather(
            *(ask(engine, history, load.answer_tokens) for history in histories)
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
        "accept_length": statistics.mean(one["accept_length"] for one in (*first, *later)),
        "first_answers": [one["output_ids"] for one in first],
    }


async def _held(engine: Any, load: Load) -> dict[str, Any]:
    found = await hold(engine, load)
    (state,) = await engine.tokenizer_manager.get_internal_state()
    kvtier = state.get("kvtier", {})
    return found | {key: kvtier[key] for key in STATE if key in kvtier}


def main(argv: Sequence[str]) -> int:
    """The worker: plan in, figures out."""
    import sglang

    die_with_parent()
    plan = Plan.model_validate_json(Path(argv[0]).read_text())
    began = time.perf_counter()
    engine = sglang.Engine(**plan.engine)
    load_s = time.perf_counter() - began
    try:
        found = engine.loop.run_until_complete(_held(engine, plan.load))
    finally:
        engine.shutdown()
    Path(argv[1]).write_text(json.dumps({"load_s": load_s, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
