"""The cost of branches of agents' sessions: tokens that are computed, and KV that rests.

    python -m benchmarks.cost.branches --scorer-file out/kvtier-demo/token_worth.npz

    users      eight users over one prompt of 4,000 tokens, each with 700 tokens of their own
    elided     one session of eight turns; a tool's result is whole in its own turn, and a note in
               all later ones, so that every prompt leaves the one before where that result began
    sessions   a hundred sessions over one prompt of 15,000 tokens, each with 200 of their own

The same requests go one after the other through SGLang's own cache and kvtier's, where heads
compete for a quarter of the entries (benchmarks/cost/traffic.py). There is no tier; tokens are
random.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence

from benchmarks.common.bars import Bar
from benchmarks.common.benchmark import RESULTS, Benchmark, Measured, Options
from benchmarks.common.table import new_table, show
from benchmarks.cost.traffic import Cost, Prompt, Traffic, declare, serve
from kvtier.sizes import format_bytes

ARMS = ("full", "kvtier")
IDS = (6, 384)
# A branch may compute so many tokens of every prompt beside what SGLang does: the widest window.
WINDOW_TOKENS = 256


def all_traffic(seed: int, scale: float) -> tuple[Traffic, ...]:
    """The three of the module docstring."""
    chance = random.Random(seed)

    def some(tokens: int) -> tuple[int, ...]:
        return tuple(chance.randrange(*IDS) for _ in range(round(scale * tokens)))

    return (
        Traffic(name="users", prompts=shared_prompt(some, 4000, 8, 700)),
        Traffic(name="elided", prompts=elided_results(some, 8)),
        Traffic(name="sessions", prompts=shared_prompt(some, 15_000, 100, 200)),
    )


def shared_prompt(
    some: Callable[[int], tuple[int, ...]], shared: int, users: int, own: int
) -> tuple[Prompt, ...]:
    prompt = some(shared)
    return tuple((prompt, some(own)) for _ in range(users))


def elided_results(some: Callable[[int], tuple[int, ...]], turns: int) -> tuple[Prompt, ...]:
    """Turns of a question, a tool's result and an answer, after a system prompt."""
    prompts: list[Prompt] = []
    past: Prompt = (some(2000),)
    for turn in range(turns):
        question = some(150)
        prompts.append((*past, question, some(600)))
        past = (*past, question, some(10), turn)
    return tuple(prompts)


def run(options: Options) -> Measured:
    traffic = all_traffic(options.seed, options.scale)
    found = {arm: serve(arm, options, traffic) for arm in ARMS}
    costs = list(zip(*(found[arm] for arm in ARMS), strict=True))
    table = new_table("what branches cost", ("", "computed", "full KV", "KV", "full KV"))
    for full, ours in costs:
        kv = (format_bytes(ours.kv_bytes), format_bytes(full.kv_bytes))
        table.add_row(ours.name, f"{ours.computed:,}", f"{full.computed:,}", *kv)
    show(table)
    figures = {
        "model": options.model_path.name,
        "scale": options.scale,
        **{arm: [cost.model_dump() for cost in found[arm]] for arm in ARMS},
    }
    return Measured(figures, judged(costs, traffic))


def judged(costs: Sequence[tuple[Cost, Cost]], traffic: Sequence[Traffic]) -> list[Bar]:
    (full, ours), (elided_full, elided), (sessions_full, sessions) = costs
    users = len(traffic[0].prompts)
    more, share = ours.computed - full.computed, ours.kv_bytes / full.kv_bytes
    elided_ratio = elided.computed / elided_full.computed
    copies = sessions.kv_bytes / sessions_full.kv_bytes
    most = users * WINDOW_TOKENS
    return [
        Bar(f"users: computed beside SGLang's, at most {most:,}", f"{more:,}", more <= most),
        Bar("users: KV of SGLang's, at most .33", f"{share:.2f}", share <= 0.33),
        Bar("elided: computed, times SGLang's, at most 1.15", f"{elided_ratio:.2f}",
            elided_ratio <= 1.15),
        Bar("sessions: KV of SGLang's, which holds one copy, at most .33", f"{copies:.2f}",
            copies <= 0.33),
    ]  # fmt: skip


BENCHMARK = Benchmark(
    "cost.branches", __doc__, declare, run, out=RESULTS / "branches.json", seeded="of all tokens"
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
