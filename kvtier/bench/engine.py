"""The engine as the bench sees it, and the real one behind it.

`Engine` is all that the loops over sessions and traces know. It is used from one thread; the caller
that opens an engine closes it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from kvtier.bench.schema import Occupancy, Plan, TierReading

Answered = TypeVar("Answered")
# The engine's names of what a reading of the tier calls otherwise.
TIER_NAMES = {"stored_bytes": "put_bytes", "missed": "refresh_missed"}


@dataclass(frozen=True)
class Scored:
    """A greedy continuation and what the engine thought of a wanted one.

    output_ids:    what it generated instead
    logprobs:      per generated token i, the log-probability of wanted token i at that place, nats
    cached_tokens: of the prompt, what came from the cache
    """

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int


@dataclass(frozen=True)
class Answer:
    """One finished request. restored_tokens: of the cached ones, those that came from the tier.
    sent_s: when it was to be sent, in seconds from a replay's beginning."""

    output_ids: tuple[int, ...]
    cached_tokens: int
    ttft_ms: float
    latency_ms: float
    restored_tokens: int = 0
    sent_s: float = 0.0


@dataclass(frozen=True)
class Arrival:
    """A request that generates so many tokens, whatever they are.

    at_s:  when it comes, in seconds from the beginning; or, where it waits for an answer, how long
           after that
    after: the place of the request whose answer it waits for; None where it waits for none
    """

    at_s: float
    input_ids: tuple[int, ...]
    output_tokens: int
    after: int | None = None


class Engine(Protocol):
    """Greedy generation from token ids over a prefix cache."""

    device: str

    def generate(
        self, input_ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]
    ) -> Answer:
        """Generate until one of `stop_ids` (which is part of the output) or `max_new_tokens`."""
        ...

    def replay(
        self, arrivals: Sequence[Arrival], tell: Callable[[int, Answer], None]
    ) -> list[Answer]:
        """Send every request at its time, or so long after the answer that it waits for, and wait
        for all answers, in the order of `arrivals`.
        Times count from when a request was to be sent. tell: hears of each answer when it is
        complete, with its number."""
        ...

    def score(self, input_ids: Sequence[int], wanted_ids: Sequence[int]) -> Scored:
        """Generate as many tokens as are wanted, greedily. Log-probabilities are of the served
        model over its cache as it is, and of generated places only: nothing of the prompt is
        computed again for them."""
        ...

    def occupancy(self) -> Occupancy:
        """Return the present state of the KV pool, and start a new peak."""
        ...

    def flush(self) -> None:
        """Forget every cached prefix."""
        ...

    def close(self) -> None:
        """Stop the engine and its processes."""
        ...


EngineFactory = Callable[[Plan], Engine]


class EngineError(Exception):
    """The engine answered with something that cannot be measured."""


class StreamClock:
    """Times the chunks of one stream. start: when the request was to be sent, if that is not
    now."""

    def __init__(
        self, now: Callable[[], float] = time.perf_counter, start: float | None = None
    ) -> None:
        self._now = now
        self._start = now() if start is None else start
        self._tokens, self._first, self._last = 0, 0.0, 0.0

    def see(self, num_tokens: int) -> None:
        """A chunk arrived that brings the output to `num_tokens`."""
        if num_tokens > self._tokens:
            self._last = self._now()
            self._first = self._first or self._last
            self._tokens = num_tokens

    def answer(
        self, output_ids: Sequence[int], cached_tokens: int, restored_tokens: int = 0
    ) -> Answer:
        """The finished request. Raises EngineError when no token came."""
        if not self._tokens:
            raise EngineError("the engine finished a request without a single token")
        return Answer(
            output_ids=tuple(output_ids),
            cached_tokens=cached_tokens,
            ttft_ms=(self._first - self._start) * 1e3,
            latency_ms=(self._last - self._start) * 1e3,
            restored_tokens=restored_tokens,
        )


def _check_finished(chunk: dict[str, Any], prompt_tokens: int) -> None:
    """Raise EngineError for a request that did not come to its end."""
    reason = chunk["meta_info"]["finish_reason"] if chunk else None
    if not reason or reason["type"] not in ("stop", "length"):
        raise EngineError(f"a request of {prompt_tokens} tokens ended with {reason}")


def _answer(clock: StreamClock, chunk: dict[str, Any]) -> Answer:
    """A request's outcome by the last chunk of its stream."""
    told = chunk["meta_info"]
    # SGLang counts what a tier brought as host memory's, or as a storage's behind it.
    sources = told.get("cached_tokens_details") or {}
    restored = sources.get("host", 0) + sources.get("storage", 0)
    return clock.answer(chunk["output_ids"], told["cached_tokens"], restored)


def _tier_reading(report: dict[str, Any] | None) -> TierReading | None:
    """The tier's part of the engine's state; what has not happened yet is not in it."""
    if report is None:
        return None
    names = {name: TIER_NAMES.get(name, name) for name in TierReading.model_fields}
    found = {name: report[theirs] for name, theirs in names.items() if theirs in report}
    return TierReading.model_validate(found)


class SglangEngine:
    """`sglang.Engine` in this process, its scheduler in a child. engine_args: its keyword
    arguments."""

    def __init__(self, engine_args: Mapping[str, Any]) -> None:
        import sglang as sgl
        import torch

        self._engine: Any = sgl.Engine(**engine_args)
        on_cuda = engine_args["device"] == "cuda"
        self.device = torch.cuda.get_device_name() if on_cuda else "cpu"

    def generate(
        self, input_ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]
    ) -> Answer:
        more = {"max_new_tokens": max_new_tokens, "stop_token_ids": list(stop_ids)}
        return self._wait_for(self._stream(input_ids, time.perf_counter(), more))

    def replay(
        self, arrivals: Sequence[Arrival], tell: Callable[[int, Answer], None]
    ) -> list[Answer]:
        return self._wait_for(self._replay(arrivals, tell))

    def _wait_for(self, answers: Coroutine[Any, Any, Answered]) -> Answered:
        # SGLang's own loop, in which its tokenizer manager listens.
        found: Answered = self._engine.loop.run_until_complete(answers)
        return found

    async def _replay(
        self, arrivals: Sequence[Arrival], tell: Callable[[int, Answer], None]
    ) -> list[Answer]:
        origin = time.perf_counter()

        ended: dict[int, asyncio.Future[float]] = {
            one.after: asyncio.get_running_loop().create_future()
            for one in arrivals
            if one.after is not None
        }

        async def one(index: int, arrival: Arrival) -> Answer:
            before = origin if arrival.after is None else await ended[arrival.after]
            start = before + arrival.at_s
            await asyncio.sleep(start - time.perf_counter())
            more = {"max_new_tokens": arrival.output_tokens, "ignore_eos": True}
            answer = await self._stream(arrival.input_ids, start, more)
            answer = replace(answer, sent_s=start - origin)
            if index in ended:
                ended[index].set_result(time.perf_counter())
            tell(index, answer)
            return answer

        # A request that fails ends the replay: the others are cancelled, not left behind.
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(*each)) for each in enumerate(arrivals)]
        return [task.result() for task in tasks]

    async def _stream(
        self, input_ids: Sequence[int], start: float, more: Mapping[str, Any]
    ) -> Answer:
        """Send a greedy request. start: when it was to be sent; more: sampling parameters."""
        clock, chunk = StreamClock(start=start), dict[str, Any]()
        stream = await self._engine.async_generate(
            input_ids=list(input_ids), sampling_params={"temperature": 0, **more}, stream=True
        )
        async for chunk in stream:
            clock.see(chunk["meta_info"]["completion_tokens"])
        _check_finished(chunk, len(input_ids))
        return _answer(clock, chunk)

    def score(self, input_ids: Sequence[int], wanted_ids: Sequence[int]) -> Scored:
        done = self._engine.generate(
            input_ids=list(input_ids),
            sampling_params={
                "temperature": 0,
                "max_new_tokens": len(wanted_ids),
                "ignore_eos": True,
            },
            return_logprob=True,
            logprob_start_len=-1,  # starts at the answer: the prompt's would be computed exactly
            token_ids_logprob=sorted(set(wanted_ids)),
        )
        _check_finished(done, len(input_ids))
        told = [
            {token: logprob for logprob, token, _ in place}
            for place in done["meta_info"]["output_token_ids_logprobs"]
        ]
        return Scored(
            output_ids=tuple(done["output_ids"]),
            logprobs=tuple(
                float(found[wanted]) for found, wanted in zip(told, wanted_ids, strict=True)
            ),
            cached_tokens=done["meta_info"]["cached_tokens"],
        )

    def state(self) -> dict[str, Any]:
        """Return what kvtier says of itself in the engine's state. Raises EngineError."""
        state: dict[str, dict[str, Any]] = self._engine.get_server_info()["internal_states"][0]
        if "kvtier" not in state:
            raise EngineError(
                "the engine reports no pool occupancy: is the kvtier plugin installed "
                "(pip install -e .) and not hidden by SGLANG_PLUGINS?"
            )
        return state["kvtier"]

    def occupancy(self) -> Occupancy:
        report = self.state()
        return Occupancy(
            kv_used_bytes=report["kv_used_bytes"],
            kv_peak_bytes=report["kv_peak_bytes"],
            kv_capacity_bytes=report["kv_capacity_bytes"],
            evicted_tokens=report.get("kv_evicted_tokens", 0),
            tier=_tier_reading(report.get("tier")),
        )

    def flush(self) -> None:
        self._engine.flush_cache()

    def close(self) -> None:
        self._engine.shutdown()
