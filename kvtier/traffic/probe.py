"""A trace that measures an engine's rates when it is replayed, to calibrate the simulator.

    alone     prompts of several lengths, each by itself, nothing of it cached
    longer    the same prompts and some blocks more, each by itself, and then one block more, as an
              agent's next turn has: a cached prefix, with few new tokens behind it
    together  prompts that arrive at once, so that they decode in one batch
    again     the first prompts, which have been evicted by now where the budget is small: computed
              again, or restored from a tier

It shares no block with any other trace. Lengths are those of the format; a replay scales them as it
scales the trace that will be simulated.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvtier.traffic.trace import BLOCK_TOKENS, Trace, TraceRequest

LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536, 114688)
BATCHES = (2, 4, 8)
ANSWER_TOKENS = 1024
LONGER_BLOCKS = 6
# The trace's ids are of a range of their own.
FIRST_ID = 1 << 40


def probe_trace(gap_s: float, token_s: float, repeats: int = 2) -> Trace:
    """Return the trace. A pause follows each request or batch, in which it is answered:
    `gap_s`, and `token_s` for each token of its prompts. repeats: the number of prompts per
    length."""
    fresh = iter(range(FIRST_ID, 1 << 62))
    requests, at = [], 0.0

    def after(tokens: int) -> float:
        return gap_s + token_s * tokens

    prompts = [_new(fresh, tokens) for _ in range(repeats) for tokens in LENGTHS]
    longer = [[*ids, *_new(fresh, LONGER_BLOCKS * BLOCK_TOKENS)] for ids in prompts]
    turns = [turn for ids in longer for turn in (ids, [*ids, *_new(fresh, BLOCK_TOKENS)])]
    for ids in (*prompts, *turns, *prompts[: len(LENGTHS)]):
        requests.append(_request(at, ids))
        at += after(len(ids) * BLOCK_TOKENS)
        if ids is turns[-1]:
            for batch in _batches(fresh):
                requests += [_request(at, one) for one in batch]
                at += after(sum(map(len, batch)) * BLOCK_TOKENS)
    return Trace(tuple(requests))


def _batches(fresh: Iterator[int]) -> Iterator[list[list[int]]]:
    for tokens in (LENGTHS[0], LENGTHS[3]):
        for size in BATCHES:
            yield [_new(fresh, tokens) for _ in range(size)]


def _new(fresh: Iterator[int], tokens: int) -> list[int]:
    return [next(fresh) for _ in range(tokens // BLOCK_TOKENS)]


def _request(at_s: float, ids: list[int]) -> TraceRequest:
    return TraceRequest(round(at_s, 3), len(ids) * BLOCK_TOKENS, ANSWER_TOKENS, tuple(ids))
