"""Sessions on two real engines, one after the other, each in a process of its own.

    full KV      every turn is generated greedily, its recorded answer is judged, and judged once
                 more behind little of what the session had before
    as served    every turn's recorded answer and what full KV said are judged over what the server
                 keeps, by requests that leave nothing behind; then the turn runs as recorded

Both have kvtier's attention, so that they differ by what is kept alone.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import takewhile
from typing import Any, NamedTuple

from kvtier.bench.worker import die_with_parent
from kvtier.config import ENV_PREFIX, Settings
from kvtier.errors import StartupError, UsageError
from kvtier.traffic.transcripts import ARGUMENT, Turn
from kvtier_sglang.compat import NAME
from kvtier_sglang.request_options import MEASURE, PARAMS

# Tokens at either end of what a session had before which stay where the rest is taken out.
BARE_TOKENS = 64
_MEASURED = {"custom_params": {PARAMS: {MEASURE: True}}}


class Said(NamedTuple):
    """A turn with full KV.

    held_tokens: how many of the prompt's tokens the session had before
    said_ids:    its greedy answer
    full, bare:  the recorded answer's loss with all of the context and without most of it, nats
    """

    held_tokens: int
    said_ids: list[int]
    full: float
    bare: float


class Kept(NamedTuple):
    """A turn over what a server keeps.

    loss:     of the recorded answer, nats
    best_ids: its own next token in place of each that full KV said
    """

    loss: float
    best_ids: list[int]


def with_full_kv(
    flags: Sequence[str], settings: Settings, sessions: Sequence[Sequence[Turn]], *,
    most_tokens: int, parallel: int,
) -> list[list[Said]]:  # fmt: skip
    """Return what full KV makes of each session's turns, as far as the model's context reaches.

    flags: SGLang's; most_tokens: of an answer; parallel: sessions at a time
    """
    full = settings.keeping_everything().model_copy(update={"memory": None, "head_profile": None})
    # SGLang's own radix cache drops nothing, whatever a store says of the model's heads.
    flags = [*flags, f"--attention-backend={NAME}"]
    return _in_a_process("full KV", flags, full, _all_said, sessions, parallel, most_tokens)


def as_served(
    flags: Sequence[str], settings: Settings, sessions: Sequence[Sequence[Turn]],
    said: Sequence[Sequence[Said]], *, parallel: int,
) -> list[list[Kept]]:  # fmt: skip
    """Return what a server of these settings makes of each session's turns. flags: SGLang's."""
    both = [
        list(zip(turns, told, strict=False)) for turns, told in zip(sessions, said, strict=True)
    ]
    backends = [f"--attention-backend={NAME}", f"--radix-cache-backend={NAME}"]
    return _in_a_process("as served", [*flags, *backends], settings, _all_kept, both, parallel)


def _in_a_process(
    label: str, flags: Sequence[str], settings: Settings, ask: Callable[..., Any],
    sessions: Sequence[Any], parallel: int, *more: int,
) -> Any:  # fmt: skip
    """Engines take their settings from the environment, and leave nothing behind this way."""
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.NamedTemporaryFile(suffix=".toml") as no_config,
        ProcessPoolExecutor(1, mp_context=context, initializer=die_with_parent) as process,
    ):
        environment = settings.to_env() | {f"{ENV_PREFIX}CONFIG": no_config.name}
        asked = (ask, sessions, parallel, more)
        try:
            return process.submit(_run, label, flags, environment, *asked).result()
        except BrokenProcessPool as error:
            raise StartupError(f"the engine ({label}) ended; its log above says why") from error


def _run(
    label: str, flags: Sequence[str], environment: dict[str, str], ask: Callable[..., Any],
    sessions: Sequence[Any], parallel: int, more: tuple[int, ...],
) -> Any:  # fmt: skip
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        del os.environ[name]
    os.environ.update(environment)
    import sglang

    from kvtier_sglang.serve import server_args_of

    engine = sglang.Engine(server_args=server_args_of(flags))
    try:
        asker = _Asker(engine)
        every = _each(asker, label, ask, sessions, parallel, more)
        return engine.loop.run_until_complete(every)
    finally:
        engine.shutdown()


async def _each(
    asker: _Asker, label: str, ask: Callable[..., Awaitable[Any]], sessions: Sequence[Any],
    parallel: int, more: tuple[int, ...],
) -> list[Any]:  # fmt: skip
    room, done = asyncio.Semaphore(parallel), 0

    async def one(session: Any) -> Any:
        nonlocal done
        async with room:
            found = await ask(asker, session, *more)
        done += 1
        print(f"{label}: {done} of {len(sessions)} sessions", file=sys.stderr, flush=True)
        return found

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(session)) for session in sessions]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]


class _Asker:
    """Requests to an engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.longest = int(engine.tokenizer_manager.model_config.context_len)

    async def say(self, prompt_ids: Sequence[int], most_tokens: int) -> list[int]:
        """Return a greedy answer of at most so many tokens."""
        told = await self._ask(prompt_ids, {"max_new_tokens": most_tokens})
        return list(told["output_ids"])

    async def judge(
        self, prompt_ids: Sequence[int], answer_ids: Sequence[int], *, measured: bool = False
    ) -> tuple[float, list[int]]:
        """Return an answer's loss in nats, and the token that is likeliest in place of each of its
        own. measured: over what is kept."""
        if not answer_ids:
            return 0.0, []
        told = await self._ask(
            [*prompt_ids, *answer_ids],
            {"max_new_tokens": 0, **(_MEASURED if measured else {})},
            return_logprob=True, logprob_start_len=len(prompt_ids) - 1, top_logprobs_num=1,
        )  # fmt: skip
        # The first place is that of the prompt's last token, which nothing was asked of.
        own = told["meta_info"]["input_token_logprobs"][1:]
        best = told["meta_info"]["input_top_logprobs"][1:]
        return -sum(logprob for logprob, *_ in own), [place[0][1] for place in best]

    async def _ask(
        self, input_ids: Sequence[int], params: dict[str, Any], **more: Any
    ) -> dict[str, Any]:
        expected = f"turns that the server takes, of which one has {len(input_ids)} tokens"
        try:
            told: dict[str, Any] = await self._engine.async_generate(
                input_ids=list(input_ids), sampling_params={"temperature": 0, **params}, **more
            )
        except ValueError as error:
            raise UsageError(ARGUMENT, expected, str(error)) from error
        reason = told["meta_info"]["finish_reason"]
        if not reason or reason["type"] not in ("stop", "length"):
            raise UsageError(ARGUMENT, expected, (reason or {}).get("message"))
        return told


async def _all_said(asker: _Asker, turns: Sequence[Turn], most_tokens: int) -> list[Said]:
    found: list[Said] = []
    before: list[int] = []
    for prompt_ids, answer_ids in turns:
        if len(prompt_ids) + max(len(answer_ids), most_tokens) >= asker.longest:
            break
        both = zip(before, prompt_ids, strict=False)
        held = len(list(takewhile(lambda pair: pair[0] == pair[1], both)))
        said = await asker.say(prompt_ids, most_tokens)
        full, _ = await asker.judge(prompt_ids, answer_ids)
        bare = full
        if held > 2 * BARE_TOKENS:
            little = [*prompt_ids[:BARE_TOKENS], *prompt_ids[held - BARE_TOKENS :]]
            bare, _ = await asker.judge(little, answer_ids)
        found.append(Said(held, said, full, bare))
        before = [*prompt_ids, *answer_ids]
    return found


async def _all_kept(asker: _Asker, turns: Sequence[tuple[Turn, Said]]) -> list[Kept]:
    found = []
    for (prompt_ids, answer_ids), said in turns:
        loss, _ = await asker.judge(prompt_ids, answer_ids, measured=True)
        _, best_ids = await asker.judge(prompt_ids, said.said_ids, measured=True)
        await asker.say([*prompt_ids, *answer_ids], 0)
        found.append(Kept(loss, best_ids))
    return found
