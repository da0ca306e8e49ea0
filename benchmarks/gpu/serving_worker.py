"""An engine in a process of its own, and sessions held in it: one policy of `gpu.serving`.

python -m benchmarks.gpu.serving_worker PLAN.json OUT.json
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from kvtier.bench.worker import die_with_parent

# The keys of the kvtier part of an engine's state, where it has one.
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


async def ask(engine: Any, prompt: Sequence[int], new_tokens: int) -> dict[str, Any]:
    """One streamed request: its answer, and when its tokens came.
    Raises RuntimeError where it is aborted, whose time is none of an answer's."""
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
        "ttft_s": first - began,
        "tpot_s": (ended - first) / max(1, new_tokens - 1),
    }


class Sessions:
    """The sessions of a load: what was said so far in each, and what is said next."""

    def __init__(self, engine: Any, load: Load) -> None:
        self._engine, self._load = engine, load
        self._chance = random.Random(load.seed)
        self._histories: list[list[int]] = []

    async def begin(self) -> list[dict[str, Any]]:
        """The answers of all first turns, one after the other."""
        load = self._load
        # Compiles what is compiled on first use.
        await ask(self._engine, self._tokens(2 * load.chunk), 4)
        await self._engine.tokenizer_manager.flush_cache()
        answers = []
        for _ in range(load.sessions):
            prompt = self._tokens(load.context)
            answers.append(await ask(self._engine, prompt, load.answer_tokens))
            self._histories.append([*prompt, *answers[-1]["output_ids"]])
        return answers

    async def go_on(self) -> list[dict[str, Any]]:
        """The answers of one more turn, of all sessions at a time."""
        for history in self._histories:
            history += self._tokens(self._load.turn_tokens)
        tokens = self._load.answer_tokens
        asked = (ask(self._engine, history, tokens) for history in self._histories)
        answers = await asyncio.gather(*asked)
        for history, answer in zip(self._histories, answers, strict=True):
            history += answer["output_ids"]
        return answers

    def _tokens(self, count: int) -> list[int]:
        return [self._chance.randrange(*self._load.ids) for _ in range(count)]


async def hold(sessions: Sessions, load: Load) -> dict[str, Any]:
    """All sessions from their first turn to their last."""
    first = await sessions.begin()
    began = time.perf_counter()
    later = [answer for _ in range(load.turns - 1) for answer in await sessions.go_on()]
    later_s = time.perf_counter() - began
    return {
        "sessions": load.sessions,
        "first_turn_ttft_s": statistics.median(one["ttft_s"] for one in first),
        "first_turn_tpot_s": statistics.median(one["tpot_s"] for one in first),
        "ttft_s": statistics.median(one["ttft_s"] for one in later),
        "tpot_s": statistics.median(one["tpot_s"] for one in later),
        "tokens_per_s": len(later) * load.answer_tokens / later_s,
        "cached_tokens": min(one["cached_tokens"] for one in later),
    }


async def state_of(engine: Any) -> dict[str, Any]:
    """Return what STATE names, where the engine has it."""
    (state,) = await engine.tokenizer_manager.get_internal_state()
    kvtier = state.get("kvtier", {})
    return {key: kvtier[key] for key in STATE if key in kvtier}


def main(argv: Sequence[str]) -> int:
    """The worker: plan in, figures out."""
    import sglang

    die_with_parent()
    plan, out = Plan.model_validate_json(Path(argv[0]).read_text()), Path(argv[1])
    began = time.perf_counter()
    engine = sglang.Engine(**plan.engine)
    found: dict[str, Any] = {"load_s": time.perf_counter() - began}
    wait_for = engine.loop.run_until_complete
    try:
        sessions = Sessions(engine, plan.load)
        found |= wait_for(hold(sessions, plan.load))
        found |= wait_for(state_of(engine))
    finally:
        engine.shutdown()
    out.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
