"""A busy server: `python busy_runner.py plan.json out.json`.

plan: {"engine": {...}, "environment"?: {...}, "requests": [{"input_ids", "max_new_tokens",
"priority"?, "routing_key"?, "stream"?}, ...], "pauses"?: int, "aborts"?: int, "seed": int}
Requests arrive in random order, a few at a time. Meanwhile some are aborted, and the server is
paused so often: then everything is retracted, the cache flushed, and the server goes on. SGLang's
own memory checks are on: a violation kills the scheduler and with it this process. environment:
SGLang's variables. out: {"answers": each request's tokens, or null for one that was aborted or
refused, "flushed": of each pause, whether the cache was, "state", "after_flush"}.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from engine_runner import ENGINE_DEFAULTS, flush, settled_states, use

MOST_AT_ONCE = 4


def rid(index: int) -> str:
    """Return a request's name. All are of equal length, as SGLang aborts all requests whose names
    begin with what it is told."""
    return f"request-{index:03}"


class Busy:
    """One life. Aborts and pauses come while at least two requests are in flight."""

    def __init__(self, engine: Any, plan: dict[str, Any]) -> None:
        self.manager = engine.tokenizer_manager
        self.requests = plan["requests"]
        self.rng = random.Random(plan["seed"])
        self.due = ["abort"] * plan.get("aborts", 0) + ["pause"] * plan.get("pauses", 0)
        self.answers: list[list[int] | None] = [None] * len(self.requests)
        self.in_flight: dict[int, asyncio.Task[None]] = {}
        self.flushed: list[bool] = []

    async def run(self) -> None:
        arriving = list(range(len(self.requests)))
        self.rng.shuffle(arriving)
        self.rng.shuffle(self.due)
        while arriving or (self.due and len(self.in_flight) > 1):
            for index in arriving[: self.rng.randrange(2, MOST_AT_ONCE + 1)]:
                arriving.remove(index)
                self.in_flight[index] = asyncio.create_task(self._ask(index))
            if arriving and len(self.in_flight) <= MOST_AT_ONCE:
                continue
            # Some are in the middle of their answers, then.
            await asyncio.wait(self.in_flight.values(), return_when=asyncio.FIRST_COMPLETED)
            if self.due and len(self.in_flight) > 1:
                await self._disturb(self.due.pop())
        await asyncio.gather(*self.in_flight.values())
        assert not self.due, "the server was too quick to be disturbed"

    async def _ask(self, index: int) -> None:
        from fastapi import HTTPException
        from sglang.srt.managers.io_struct import GenerateReqInput

        request, tokens = self.requests[index], []
        asked = GenerateReqInput(
            input_ids=request["input_ids"],
            sampling_params={
                "temperature": 0,
                "max_new_tokens": request["max_new_tokens"],
                "ignore_eos": True,
            },
            rid=rid(index),
            stream=request.get("stream", False),
            priority=request.get("priority"),
            routing_key=request.get("routing_key"),
        )
        ended = None
        try:
            async for part in self.manager.generate_request(asked, None):
                new = part["output_ids"]
                tokens = [*tokens, *new] if self._streams_parts(asked) else new
                ended = part["meta_info"]["finish_reason"]
        except (ValueError, HTTPException):
            # Refused, which it may be before it ran at all.
            return
        finally:
            del self.in_flight[index]
        if ended is not None and ended["type"] == "length":
            self.answers[index] = list(tokens)

    def _streams_parts(self, asked: Any) -> bool:
        return asked.stream and self.manager.server_args.incremental_streaming_output

    async def _disturb(self, how: str) -> None:
        from sglang.srt.managers import io_struct

        if how == "abort":
            self.manager.abort_request(rid=rid(self.rng.choice(list(self.in_flight))))
            return
        await self.manager.pause_generation(io_struct.PauseGenerationReqInput(mode="retract"))
        self.flushed.append((await self.manager.flush_cache()).success)
        await self.manager.continue_generation(io_struct.ContinueGenerationReqInput())


def main(plan_path: str, out_path: str) -> None:
    plan = json.loads(Path(plan_path).read_text())
    checks = ("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "SGLANG_CHECK_KV_PAGE_INVARIANTS")
    use(plan.get("environment", {}) | dict.fromkeys(checks, "1"))
    import sglang

    engine = sglang.Engine(**{**ENGINE_DEFAULTS, **plan["engine"]})
    busy = Busy(engine, plan)
    try:
        engine.loop.run_until_complete(busy.run())
        state = engine.loop.run_until_complete(settled_states(engine))[0]
        engine.loop.run_until_complete(flush(engine))
        empty = engine.loop.run_until_complete(settled_states(engine))[0]
    finally:
        engine.shutdown()
    report = {"answers": busy.answers, "flushed": busy.flushed}
    Path(out_path).write_text(
        json.dumps({**report, "state": state, "after_flush": empty}, default=int)
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
