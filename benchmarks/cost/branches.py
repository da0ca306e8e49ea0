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

import sys
from collections.abc import Sequence

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
    results,
    serve,
)
from kvtier.sizes import format_bytes

ARMS = ("full", "kvtier")
# A branch may compute so many tokens of every prompt beside what SGLang does: the widest window.
WINDOW_TOKENS = 256


def all_traffic(seed: int) -> tuple[Traffic, ...]:
    """The three of the module docstring."""
    some = drawing(seed)
    return (
        Traffic(name="users", prompts=shared_prompt(some, 4000, 8, 700)),
        Traffic(name="elided", prompts=results(some, 2000, 8, 600, None)),
        Traffic(name="sessions", prompts=shared_prompt(some, 15_000, 100, 200)),
    )


def shared_prompt(some: Some, shared: int, users: int, own: int) -> tuple[Prompt, ...]:
    prompt = some(shared)
    return tuple((prompt, some(own)) for _ in range(users))


def run(options: Options) -> Measured:
    traffic = all_traffic(options.seed)
    found = {arm: serve(arm, options, traffic) for arm in ARMS}
    costs = list(zip(*(found[arm] for arm in ARMS), strict=True))
    table = new_table("what branches cost", ("", "computed", "full KV", "KV", "full KV"))
    for full, ours in costs:
        kv = (format_bytes(ours.kv_bytes), format_bytes(full.kv_bytes))
        table.add_row(ours.name, f"{ours.computed:,}", f"{full.computed:,}", *kv)
    show(table)
    figures = {
        "model": options.model_path.name,
        **{arm: [cost.model_dump() for cost in found[arm]] for arm in ARMS},
    }
    return Measured(figures, judged(costs, len(traffic[0].prompts)))


def judged(costs: Sequence[tuple[Cost, Cost]], users: int) -> list[Bar]:
    """Return the bars. users: over one prompt."""
    (full, ours), (elided_full, elided), (sessions_full, sessions) = costs
    more = ours.computed - full.computed
    return [
        at_most("users: computed beside SGLang's", more, users * WINDOW_TOKENS),
        at_most("users: KV, times SGLang's", ours.kv_bytes / full.kv_bytes, 0.33),
        at_most("elided: computed, times SGLang's", elided.computed / elided_full.computed, 1.15),
        at_most(
            "sessions: KV, times SGLang's, which holds one copy",
            sessions.kv_bytes / sessions_full.kv_bytes,
            0.33,
        ),
    ]


BENCHMARK = Benchmark("cost.branches", __doc__, declare, run, out=RESULTS / "branches.json")
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
