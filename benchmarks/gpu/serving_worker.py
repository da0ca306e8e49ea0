"""An engine in a process of its own, and sessions held in it: one policy of `gpu.serving`, of
`cost.decoding` or of `cost.drafts`; where it is asked for, what a step of decoding consists of.

python -m benchmarks.gpu.serving_worker PLAN.json OUT.json
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from benchmarks.gpu.step_parts import parts_of, read_trace
from kvtier.bench.worker import die_with_parent

# The keys of the kvtier part of an engine's state, where it has one.
STATE = ("kv_used_bytes", "kv_peak_bytes", "integrity")


class Load(BaseModel):
    """The load that is the same for every policy: `sessions` contexts of `context` tokens, and then
    so many turns of all at once. chunk: of a prefill, in tokens; ids: tokens are drawn from the
    first to below the second; seed: of all tokens; phrase: of so many tokens, which a session says
    over and over instead of new ones; prefix: what every context begins with."""

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


class Profile(BaseModel):
    """A profile of one more turn, once all sessions decode. folder: for the trace; steps: that are
    recorded; products: matrix products of a step; activity: of SGLang's profiler, GPU or CPU."""

    model_config = ConfigDict(frozen=True)

    folder: Path
    steps: int
    products: int
    activity: str


class Plan(BaseModel):
    """engine: keyword arguments of sglang.Engine."""

    model_config = ConfigDict(frozen=True)

    engine: dict[str, Any]
    load: Load
    profile: Profile | None = None


async def ask(
    engine: Any, prompt: Sequence[int], new_tokens: int, begun: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """One streamed request: its answer, and when its tokens came. begun: called at the first.
    Raises RuntimeError where it is aborted, whose time is none of an answer's."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    began, first = time.perf_counter(), 0.0
    answer: dict[str, Any] = {}
    stream = await engine.async_generate(
        input_ids=list(prompt), sampling_params=sampling, stream=True
    )
    async for chunk in stream:
        answer, first = chunk, first or time.perf_counter()
        begun()
    ended = time.perf_counter()
    reason = answer["meta_info"]["finish_reason"]
    if reason["type"] == "abort":
        raise RuntimeError(f"a request of {len(prompt)} tokens was aborted: {reason['message']}")
    return {
        "output_ids": list(answer["output_ids"]),
        "cached_tokens": answer["meta_info"]["cached_tokens"],
        # An engine with drafts says how many tokens each pass gave that verified some.
        "accept_length": answer["meta_info"].get("spec_accept_length", 1.0),
        "ttft_s": first - began,
        "tpot_s": (ended - first) / max(1, new_tokens - 1),
    }


class Sessions:
    """The sessions of a load: what was said so far in each, and what is said next."""

    def __init__(self, engine: Any, load: Load) -> None:
        self._engine, self._load = engine, load
        self._chance = random.Random(load.seed)
        self._texts: list[Callable[[int], list[int]]] = []
        self._histories: list[list[int]] = []

    async def begin(self) -> list[dict[str, Any]]:
        """The answers of all first turns, one after the other."""
        load = self._load
        # Compiles what is compiled on first use.
        await ask(self._engine, self._tokens(2 * load.chunk), 4)
        await self._engine.tokenizer_manager.flush_cache()
        self._texts = [self._new_text() for _ in range(load.sessions)]
        answers = []
        for text in self._texts:
            prompt = [*load.prefix, *text(load.context)]
            answers.append(await ask(self._engine, prompt, load.answer_tokens))
            self._histories.append([*prompt, *answers[-1]["output_ids"]])
        return answers

    async def go_on(
        self, once_all_decode: Callable[[], Awaitable[None]] | None = None
    ) -> list[dict[str, Any]]:
        """The answers of one more turn, of all sessions at a time. once_all_decode: is called, and
        waited for, when the first token of every answer is there."""
        for history, text in zip(self._histories, self._texts, strict=True):
            history += text(self._load.turn_tokens)
        begun = [asyncio.Event() for _ in self._histories]
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(ask(self._engine, history, self._load.answer_tokens, one.set))
                for history, one in zip(self._histories, begun, strict=True)
            ]
            if once_all_decode is not None:
                for one in begun:
                    await one.wait()
                await once_all_decode()
        answers = [one.result() for one in asked]
        for history, answer in zip(self._histories, answers, strict=True):
            history += answer["output_ids"]
        return answers

    def _tokens(self, count: int) -> list[int]:
        return [self._chance.randrange(*self._load.ids) for _ in range(count)]

    def _new_text(self) -> Callable[[int], list[int]]:
        """Return a function that gives what a session says next: new tokens, or its phrase from
        where it stopped."""
        if self._load.phrase is None:
            return self._tokens
        phrase = cycle(self._tokens(self._load.phrase))
        return lambda count: list(islice(phrase, count))


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
        "accept_length": statistics.mean(one["accept_length"] for one in (*first, *later)),
        "first_answers": [one["output_ids"] for one in first],
    }


async def state_of(engine: Any) -> dict[str, Any]:
    """Return what STATE names, where the engine has it."""
    (state,) = await engine.tokenizer_manager.get_internal_state()
    kvtier = state.get("kvtier", {})
    return {key: kvtier[key] for key in STATE if key in kvtier}


async def step_of(engine: Any, sessions: Sessions, profile: Profile) -> dict[str, Any]:
    """The parts of a decoding step, by SGLang's profiler, in one more turn; `failed` says why
    where there are none."""
    from sglang.srt.managers.io_struct import ProfileReq

    manager = engine.tokenizer_manager

    async def start() -> None:
        steps, activities = profile.steps, [profile.activity]
        more = {"with_stack": False, "record_shapes": False}
        request = ProfileReq(
            output_dir=str(profile.folder), num_steps=steps, activities=activities, **more
        )
        await manager.start_profile(request)

    try:
        await sessions.go_on(start)
        with suppress(RuntimeError):
            # It has stopped by itself, after so many steps.
            await manager.stop_profile()
        (trace,) = profile.folder.glob("*.trace.json.gz")
        return parts_of(read_trace(trace), profile.products)
    except Exception as error:
        # The times of the turns before stay what they are.
        return {"failed": f"{type(error).__name__}: {error}"}


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
        # They are written now, or an engine that ends under a profile would take them with it.
        out.write_text(json.dumps(found))
        if plan.profile is not None:
            found["step"] = wait_for(step_of(engine, sessions, plan.profile))
    finally:
        engine.shutdown()
    out.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
