"""The engine of the fault benchmark in a process of its own, told by its parent what to serve.

    python -m benchmarks.tier.faults.engine JOB.json READ_FD WRITE_FD

One JSON object per line in, one out. `references` asks every session once and returns the answers;
`take` is told them; `begin` begins a round of requests from nothing, `lot` serves the next few of
them and returns how long that took; `start` begins to serve without end, `tally` says how that
goes, `stop` ends it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from benchmarks.common.remote import parents_lines
from benchmarks.tier.faults.load import TURNS, Answers, Asked, Book, LoadSession, requests
from kvtier.bench.worker import die_with_parent
from kvtier.synthetic.recall import ANSWER_TOKENS, DEFAULT_LANGUAGE

# A request that takes longer has failed: it would have been computed in a fraction of a second.
PATIENCE_S = 60.0
EXAMPLES = 5


class EngineJob(BaseModel):
    """engine: arguments of sglang.Engine; clients: requests under way at a time."""

    model_config = ConfigDict(frozen=True)

    engine: dict[str, Any]
    sessions: tuple[LoadSession, ...]
    clients: int
    visits: int


@dataclass
class Tally:
    """The count of what was seen since the start. wrong: answers that are not those of the engine
    that had no tier; examples: of failures and wrong answers."""

    finished: int = 0
    failed: int = 0
    wrong: int = 0
    tokens: int = 0
    slowest_s: float = 0.0
    examples: list[str] = field(default_factory=list)

    def note(self, what: str) -> None:
        if len(self.examples) < EXAMPLES:
            self.examples.append(what)


class LoadedEngine:
    """An engine under load. engine: sglang.Engine, used from its own event loop."""

    def __init__(self, engine: Any, job: EngineJob) -> None:
        self.engine, self.job = engine, job
        self.book = Book(job.sessions, [[] for _ in job.sessions])
        self.tally = Tally()
        self._serving: list[asyncio.Task[None]] = []
        self._coming: Iterator[Asked] = iter(())
        self._stopping = False

    async def answer(self, asked: Asked) -> list[int]:
        """The tokens said. Raises RuntimeError where a request does not end as it should."""
        answer = await asyncio.wait_for(
            self.engine.async_generate(
                input_ids=self.book.prompt(asked),
                sampling_params={
                    "temperature": 0,
                    "max_new_tokens": ANSWER_TOKENS,
                    "stop_token_ids": [DEFAULT_LANGUAGE.eot],
                },
                cache_salt=asked.salt,
            ),
            PATIENCE_S,
        )
        reason = answer["meta_info"]["finish_reason"]
        if not reason or reason["type"] not in ("stop", "length"):
            raise RuntimeError(f"it ended with {reason}")
        return list(answer["output_ids"])

    async def references(self, salt: str) -> Answers:
        """Every turn of every session, each on top of what was said before."""
        self.book.answers = [[] for _ in self.job.sessions]
        for turn in range(TURNS):
            asked = [Asked(i, turn, salt) for i in range(len(self.job.sessions))]
            for first in range(0, len(asked), self.job.clients):
                some = asked[first : first + self.job.clients]
                for one, said in zip(some, await asyncio.gather(*map(self.answer, some)),
                                     strict=True):  # fmt: skip
                    self.book.answers[one.session].append(said)
        return self.book.answers

    async def ask(self, asked: Asked) -> None:
        """One request, judged."""
        began = time.perf_counter()
        try:
            said = await self.answer(asked)
        except Exception as error:
            self.tally.failed += 1
            self.tally.note(f"{asked}: {type(error).__name__}: {error}")
            return
        finally:
            taken = time.perf_counter() - began
            self.tally.slowest_s = max(self.tally.slowest_s, taken)
        self.tally.finished += 1
        self.tally.tokens += len(said)
        expected = self.book.answers[asked.session][asked.turn]
        if said != expected:
            self.tally.wrong += 1
            self.tally.note(f"{asked}: {said} instead of {expected}")

    async def _client(self, coming: Iterator[Asked]) -> None:
        while not self._stopping and (asked := next(coming, None)) is not None:
            await self.ask(asked)

    def _clients(self, coming: Iterator[Asked]) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self._client(coming)) for _ in range(self.job.clients)]

    def _requests(self, seed: int, name: str) -> Iterator[Asked]:
        return requests(len(self.job.sessions), self.job.visits, seed, name)

    # -- what the parent may say --

    async def begin(self, seed: int) -> dict[str, Any]:
        """A round, with an empty cache."""
        await self.engine.tokenizer_manager.flush_cache()
        self._coming = self._requests(seed, f"round-{seed}")
        return {}

    async def lot(self) -> dict[str, Any]:
        """Serve as many of the round's requests as are served at a time; returns the seconds, and
        a tally of their own.

        All of them are answered before the next lot: what is evicted depends on the order of
        requests, and engines that shall be compared must compute the same.
        """
        self.tally = Tally()
        began = time.perf_counter()
        await asyncio.gather(*(self.ask(next(self._coming)) for _ in range(self.job.clients)))
        return {"seconds": time.perf_counter() - began, **asdict(self.tally)}

    async def start(self, seed: int) -> dict[str, Any]:
        self.tally, self._stopping = Tally(), False
        self._serving = self._clients(self._requests(seed, f"load-{seed}"))
        return {}

    async def stop(self) -> dict[str, Any]:
        self._stopping = True
        await asyncio.gather(*self._serving)
        return await self.look()

    async def look(self) -> dict[str, Any]:
        """The tally, and what the engine says of its tier and its own soundness."""
        (state,) = (await self.engine.tokenizer_manager.get_internal_state())[:1]
        ours = state["kvtier"]
        return {
            **asdict(self.tally),
            "tier": ours.get("tier"),
            "integrity": ours["integrity"],
        }

    async def obey(self, said: dict[str, Any]) -> dict[str, Any]:
        match said:
            case {"do": "references", "salt": salt}:
                return {"answers": await self.references(salt)}
            case {"do": "take", "answers": answers}:
                self.book.answers = answers
                return {}
            case {"do": "begin", "seed": seed}:
                return await self.begin(seed)
            case {"do": "lot"}:
                return await self.lot()
            case {"do": "start", "seed": seed}:
                return await self.start(seed)
            case {"do": "tally"}:
                return await self.look()
            case {"do": "stop"}:
                return await self.stop()
        raise ValueError(f"an unknown command: {said}")


async def serve(loaded: LoadedEngine, reads: Any, writes: Any) -> None:
    """Obey commands until the parent hangs up."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, reads.readline):
        reply = await loaded.obey(json.loads(line))
        print(json.dumps(reply, default=int), file=writes, flush=True)


def main(argv: Sequence[str]) -> int:
    """The worker."""
    import sglang

    die_with_parent()
    job = EngineJob.model_validate_json(Path(argv[0]).read_text())
    with parents_lines(argv[1:]) as (reads, writes):
        engine = sglang.Engine(**job.engine)
        try:
            engine.loop.run_until_complete(serve(LoadedEngine(engine, job), reads, writes))
        finally:
            engine.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
