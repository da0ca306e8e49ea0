"""The cost of agents' habits that change something in the middle of a context: tokens that are
computed, and the time to the first one.

    python -m benchmarks.cost.edits --scorer-file out/kvtier-demo/token_worth.npz

    clock      a new time near the front of every turn's prompt
    name       another model's name there, every other turn
    elided     a tool's result is whole in its own turn, and a note in all later ones
    thinking   what was thought is in its own turn's prompt, and in no later one's
    oldest     the oldest exchange is dropped whenever a new one comes
    summary    a summary takes the place of the first half of all exchanges, once

Sixteen turns each, behind 12,000 tokens of tools and system prompt. The same requests in SGLang's
own cache, in kvtier's without reusing what stands behind an edit, and with it; heads compete for a
quarter of the entries. *New* is what no earlier prompt of the session had. And what it costs to
look for such text where there is none: 128k tokens, beside eight contexts of as many.
"""

from __future__ import annotations

import statistics
import sys
import time
from array import array
from collections.abc import Sequence

import numpy as np

from benchmarks.common.bars import Bar, at_most
from benchmarks.common.benchmark import RESULTS, Benchmark, Measured, Options
from benchmarks.common.table import new_table, show
from benchmarks.cost.traffic import (
    Cost,
    Prompt,
    Some,
    Traffic,
    declare,
    drawing,
    plain,
    results,
    serve,
)
from kvtier.config import Settings

# The arms by name: the bench's policy, and settings beside its own.
ARMS = {
    "full": ("full", {}),
    "off": ("kvtier", {"KVTIER_REUSE_BEHIND_EDITS": "off"}),
    "reused": ("kvtier", {}),
}
TURNS, SYSTEM_TOKENS = 16, 12_000
# Times the new tokens that may be computed; milliseconds that looking may take.
MOST_COMPUTED, MOST_LOOKING_MS = 1.2, 1.0
LOOKED_TOKENS, HELD_CONTEXTS, LOOKS = 128_000, 8, 50

LEAST_TOKENS = Settings().reuse_least_tokens


def all_traffic(seed: int) -> tuple[Traffic, ...]:
    """The six of the module docstring."""
    some = drawing(seed)
    habits = (clock, name, elided, thinking, oldest, summary)
    return tuple(Traffic(name=habit.__name__, prompts=habit(some)) for habit in habits)


def clock(some: Some) -> tuple[Prompt, ...]:
    begin, system = some(40), some(SYSTEM_TOKENS)
    times = [some(9) for _ in range(TURNS)]
    return tuple((begin, times[turn], system, *past) for turn, past in enumerate(exchanges(some)))


def name(some: Some) -> tuple[Prompt, ...]:
    begin, system = some(40), some(SYSTEM_TOKENS)
    names = some(4), some(6)
    return tuple(
        (begin, names[turn // 2 % 2], system, *past) for turn, past in enumerate(exchanges(some))
    )


def elided(some: Some) -> tuple[Prompt, ...]:
    return results(some, SYSTEM_TOKENS, TURNS, 300, some(10))


def thinking(some: Some) -> tuple[Prompt, ...]:
    return results(some, SYSTEM_TOKENS, TURNS, 300, ())


def oldest(some: Some) -> tuple[Prompt, ...]:
    """Return prompts of which, from the fifth turn on, the last four exchanges are there."""
    system = some(SYSTEM_TOKENS // 4)
    return tuple(
        (system, *past[max(0, 2 * (turn - 4)) :])
        for turn, past in enumerate(exchanges(some, 12 * 250))
    )


def summary(some: Some) -> tuple[Prompt, ...]:
    """Return prompts in which, from the ninth turn on, the first four exchanges are a summary."""
    system, short = some(SYSTEM_TOKENS // 4), some(300)
    return tuple(
        (system, short, *past[8:]) if turn >= TURNS // 2 else (system, *past)
        for turn, past in enumerate(exchanges(some, 4 * 250))
    )


def exchanges(some: Some, tokens: int = 250) -> list[Prompt]:
    """Return by turn all questions so far, and the answers before the last of them."""
    questions = [some(tokens) for _ in range(TURNS)]
    found: list[Prompt] = []
    past: Prompt = ()
    for turn, question in enumerate(questions):
        found.append((*past, question))
        past = (*past, question, turn)
    return found


def new_tokens(traffic: Traffic) -> int:
    """Tokens of parts that no earlier prompt had, and the last token of every answer, which has no
    KV when its turn ends."""
    seen: set[int | tuple[int, ...]] = set()
    count = 0
    for prompt in traffic.prompts:
        parts = [part for part in prompt if part not in seen]
        count += sum(1 if isinstance(part, int) else len(part) for part in parts)
        seen.update(parts)
    return count


def looking_ms(seed: int) -> float:
    """The median time of a look at a request of which nothing is held."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    from kvtier_sglang.radix.index import TokenIndex
    from kvtier_sglang.radix.node import KvNode

    rng = np.random.default_rng(seed)

    def key() -> RadixKey:
        return RadixKey(array("q", rng.integers(0, 100_000, LOOKED_TOKENS).tolist()))

    root, index = KvNode(), TokenIndex()
    root.key = RadixKey(array("q"))
    for _ in range(HELD_CONTEXTS):
        node = KvNode()
        node.key = key()
        root.attach(node)
        index.add(node)
    asked, times = key(), list[float]()
    for _ in range(LOOKS):
        began = time.perf_counter()
        found = index.runs(asked, 0, LEAST_TOKENS)
        times.append(1e3 * (time.perf_counter() - began))
        assert not found, "random tokens that are alike"
    return statistics.median(times)


def run(options: Options) -> Measured:
    looking = looking_ms(options.seed)
    traffic = all_traffic(options.seed)
    found = {
        arm: serve(policy, options, traffic, settings) for arm, (policy, settings) in ARMS.items()
    }
    new = [new_tokens(one) for one in traffic]
    columns = ("", "new", *(f"computed, {arm}" for arm in ARMS), *(f"TTFT, {arm}" for arm in ARMS))
    table = new_table("what edits cost", columns)
    for at, one in enumerate(traffic):
        costs = [found[arm][at] for arm in ARMS]
        computed = (f"{cost.computed:,}" for cost in costs)
        waited = (f"{cost.ttft_ms:.0f} ms" for cost in costs)
        table.add_row(one.name, f"{new[at]:,}", *computed, *waited)
    show(table)
    figures = {
        "looking_ms": looking,
        "model": options.model_path.name,
        "new": new,
        "longest": [max(len(plain(prompt)) for prompt in one.prompts) for one in traffic],
        **{arm: [cost.model_dump() for cost in costs] for arm, costs in found.items()},
    }
    return Measured(figures, judged(found["reused"], new, looking))


def judged(costs: Sequence[Cost], new: Sequence[int], looking: float) -> list[Bar]:
    return [
        at_most("looking in vain at 128k tokens, ms", looking, MOST_LOOKING_MS),
        *(
            at_most(
                f"{cost.name}: computed, times what is new", cost.computed / tokens, MOST_COMPUTED
            )
            for cost, tokens in zip(costs, new, strict=True)
        ),
    ]


BENCHMARK = Benchmark("cost.edits", __doc__, declare, run, out=RESULTS / "edits.json")
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
