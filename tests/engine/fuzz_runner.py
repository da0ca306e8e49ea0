"""Random life of a server: `python fuzz_runner.py plan.json out.json`.

plan: {"engine": {...}, "operations": int, "seed": int, "until"?: path, "fault"?: str,
"longest"?: tokens of a prompt, "edits"?: whether half of those that are no forks have a text of
theirs changed, "prefixes"?: [[...], ...], what half of the arrivals begin with,
"done"?: [[counter, ...], ...]}.
Operations are arrivals (half of them forks somewhere inside an earlier conversation), aborts, waits
and flushes, with far more work in flight than the pools hold; it ends after that many, or once
there is that file and a tier has restored a request; FILE.begun says that it has begun. SGLang's
own memory checks are on, busy and idle: a violation kills the scheduler and with it this process.
done: arrivals then follow one by one until each list has a counter above zero.
fault: of the last rank, see ranks/faulty_ranks.py.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

from engine_runner import ENGINE_DEFAULTS, play
from waiting import be_slow_async, wait_for_async

LONGEST_PROMPT = 700
# Requests in flight where a file ends a run: more would still wait when it is there.
MOST_RUNNING = 64
# The share of requests that ask for exact answers.
EXACT = 0.15


class Fuzzer:
    """Issues operations and remembers every finished conversation to fork from."""

    def __init__(self, engine: Any, plan: dict[str, Any]) -> None:
        self.engine = engine
        self.prefixes: list[list[int]] = plan.get("prefixes", [])
        self.longest: int = plan.get("longest", LONGEST_PROMPT)
        self.edits: bool = plan.get("edits", False)
        self.rng = random.Random(plan["seed"])
        self.running: dict[str, asyncio.Task[Any]] = {}
        self.history: list[list[int]] = [self._tokens(self.longest - 300)]
        self.counts = {"arrivals": 0, "forks": 0, "aborts": 0, "waits": 0, "flushes": 0}
        self.finished = 0
        self.refused = 0

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(6, 384) for _ in range(count)]

    async def operate(self) -> None:
        choice = self.rng.random()
        if choice < 0.55:
            self._arrive()
        elif choice < 0.75:
            self._abort()
        elif choice < 0.97:
            self.counts["waits"] += 1
            await be_slow_async(self.rng.random() * 0.1)
        else:
            self.counts["flushes"] += 1
            await self.engine.tokenizer_manager.flush_cache()

    def _arrive(self) -> None:
        base = self.rng.choice(self.history)
        if self.rng.random() < 0.5:
            base = base[: self.rng.randrange(len(base) + 1)]
            self.counts["forks"] += 1
        elif self.edits and self.rng.random() < 0.5:
            begin = self.rng.randrange(len(base) // 3)
            gone, new = self.rng.randrange(60), self._tokens(self.rng.randrange(60))
            base = base[:begin] + new + base[begin + gone :]
        elif self.prefixes and self.rng.random() < 0.5:
            base = self.rng.choice(self.prefixes)
        more = self._tokens(self.rng.randrange(1, self.longest * 2 // 7))
        prompt = (base + more)[: self.longest]
        rid = f"request-{self.counts['arrivals']}"
        self.counts["arrivals"] += 1
        self.running[rid] = asyncio.create_task(self._generate(rid, prompt))

    async def _generate(self, rid: str, prompt: list[int]) -> None:
        params = {
            "temperature": 0,
            "max_new_tokens": self.rng.randrange(1, 40),
            "ignore_eos": True,
        }
        if self.rng.random() < EXACT:
            params["custom_params"] = {"kvtier": {"exact": True}}
        try:
            answer = await self.engine.async_generate(
                input_ids=prompt, sampling_params=params, rid=rid
            )
        except ValueError:
            self.refused += 1
            return
        finally:
            self.running.pop(rid, None)
        if answer["meta_info"]["finish_reason"]["type"] == "length":
            self.finished += 1
            self.history.append(prompt + answer["output_ids"])

    def _abort(self) -> None:
        if self.running:
            self.counts["aborts"] += 1
            self.engine.tokenizer_manager.abort_request(rid=self.rng.choice(list(self.running)))

    async def _done(self, lists: list[list[str]]) -> bool:
        """Return whether each list has a counter, of the server or its tier, above zero."""
        state = (await self.engine.tokenizer_manager.get_internal_state())[0]["kvtier"]
        counted = {**state, **(state.get("tier") or {})}
        return all(any(counted.get(name) for name in names) for names in lists)

    async def run(self, operations: int, until: Path | None, done: list[list[str]]) -> None:
        if until is not None:
            until.with_suffix(".begun").touch()
        for _ in range(operations):
            if until is not None:
                await wait_for_async(lambda: len(self.running) <= MOST_RUNNING)
                if until.exists() and await self._done([["restored_requests"]]):
                    break
            await self.operate()
            await be_slow_async(0.01)
        await asyncio.gather(*list(self.running.values()))
        for _ in range(operations):
            if await self._done(done):
                break
            self._arrive()
            await asyncio.gather(*list(self.running.values()))


def main(plan_path: str, out_path: str) -> None:
    import sglang

    plan = json.loads(Path(plan_path).read_text())
    play(plan.get("fault"))
    engine = sglang.Engine(**{**ENGINE_DEFAULTS, **plan["engine"]})
    fuzzer = Fuzzer(engine, plan)
    try:
        until = Path(plan["until"]) if "until" in plan else None
        life = fuzzer.run(plan["operations"], until, plan.get("done", []))
        engine.loop.run_until_complete(life)
        # A scheduler with nothing else to do checks itself between two requests.
        engine.get_server_info()
        busy = engine.get_server_info()["internal_states"][0]["kvtier"]
        engine.flush_cache()
        empty = engine.get_server_info()["internal_states"][0]["kvtier"]
    finally:
        engine.shutdown()
    report = {
        "counts": fuzzer.counts,
        "finished": fuzzer.finished,
        "refused": fuzzer.refused,
        "state": busy,
        "after_flush": empty,
    }
    Path(out_path).write_text(json.dumps(report, default=int))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
