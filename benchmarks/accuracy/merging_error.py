"""The cost of merging to later queries: the error of attention over what a head kept.

    python -m benchmarks.accuracy.merging_error

No model: keys, values and queries are drawn from a seed. Every method keeps the same entries of
the same context, chosen by the newest 32 queries, and is then asked by queries it has not seen:

    clustered   keys like 7 others (cosine 0.80 to 0.95), merged above 0.8
    random      keys like no other, merged with the nearest all the same
    drifting    each query is 0.98 of the last; fresh: queries share nothing but their mean
    logit std   how sharply heads attend: 1 spreads over hundreds of tokens, 4 over a few

one entry: all that is not kept is folded into one; plain mean: merged with votes but no scores. The
error is ‖o' - o‖ / ‖o‖ against attention over everything, in float64, averaged over queries,
heads and contexts. The baseline is eviction: what is not kept is gone.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from rich.table import Table

from benchmarks.common.benchmark import RESULTS, Arguments, Benchmark, Measured, Options
from benchmarks.common.table import new_table, show
from kvtier.retention.keepkv import KeepKV, QueryWindow, Retained, expected_output
from kvtier_kernels.merging import Entries, assign, compensate, exact_entries, merge_bins

BASELINE = "eviction"
# The weight of the voices of a group's query heads in the key and value they share: their attention
# to the entry, to this power.
VOICES = {"merged, alike": 0.0, "merged": 1.0, "merged, squared": 2.0}
METHODS = (BASELINE, "one entry", "plain mean", *VOICES)
HEADS, DIM, CLUSTER_TOKENS, WINDOW, NEW_QUERIES = 4, 64, 8, 32, 32
SCALE = DIM**-0.5
Keys = Literal["clustered", "random"]
Queries = Literal["drifting", "fresh"]
KEYS: tuple[Keys, ...] = ("clustered", "random")
QUERIES: tuple[Queries, ...] = ("drifting", "fresh")
GROUPS = (1, 4)
FLOOR: dict[Keys, float] = {"clustered": 0.8, "random": -1.0}


@dataclass(frozen=True)
class Case:
    """One kind of context. group: query heads per KV head. kept: share of the entries."""

    keys: Keys
    group: int
    logit_std: float
    queries: Queries
    kept: float


CASES = tuple(
    Case(keys, group, logit_std, queries, kept)
    for keys in KEYS
    for group in GROUPS
    for logit_std in (1.0, 4.0)
    for queries in QUERIES
    for kept in (0.5, 0.25, 0.1)
)


@dataclass(frozen=True)
class Context:
    """k, v `[heads, tokens, dim]`; seen, new `[queries, heads, group, dim]`."""

    k: torch.Tensor
    v: torch.Tensor
    seen: torch.Tensor
    new: torch.Tensor


def declare(arguments: Arguments) -> None:
    arguments.whole("--tokens", 1024, "context tokens", least=64)
    arguments.whole("--contexts", 4, "contexts per case")


def run(options: Options) -> Measured:
    """Measure every case."""
    seeds = range(options.seed, options.seed + options.contexts)
    measured = [(case, mean_errors(case, options.tokens, seeds)) for case in CASES]
    for keys, group in itertools.product(KEYS, GROUPS):
        rows = [(c, e) for c, e in measured if (c.keys, c.group) == (keys, group)]
        show(make_table(f"{keys} keys, group of {group}", rows))
    return Measured(
        {
            "settings": {
                "context_tokens": options.tokens,
                "contexts": options.contexts,
                "heads": HEADS,
                "dim": DIM,
                "window_queries": WINDOW,
                "new_queries": NEW_QUERIES,
                "floor": FLOOR,
            },
            "cases": [{**asdict(case), "error": errors} for case, errors in measured],
        }
    )


def mean_errors(case: Case, tokens: int, seeds: Sequence[int]) -> dict[str, float]:
    """Mean relative output error at new queries, per method."""
    totals = dict.fromkeys(METHODS, 0.0)
    for seed in seeds:
        context = make_context(case, tokens, seed)
        exact = attention(context.new, exact_entries(context.k, context.v))
        for method in METHODS:
            o = attention(context.new, entries_of(method, context, case))
            error = (o - exact).norm(dim=-1) / exact.norm(dim=-1)
            totals[method] += float(error.mean()) / len(seeds)
    return totals


def entries_of(method: str, context: Context, case: Case) -> Entries:
    """Return the entries that a method leaves of the context."""
    count = max(1, round(case.kept * context.k.shape[1]))
    window, floor = QueryWindow(context.seen, SCALE), FLOOR[case.keys]
    rule = KeepKV(window_queries=WINDOW, floor=floor, pool_width=1)
    exact = exact_entries(context.k, context.v)
    logits_of = rule.prediction(exact, window)
    logits = logits_of(context.k)
    scores = expected_output(exact, logits)
    if method in VOICES:
        kept = rule.retain(context.k, context.v, count, scores=scores).kept
        assignment = assign(context.k, kept, floor=floor)
        power = VOICES[method]
        merged = merge_bins(exact, logits, assignment, logits_of, attention_power=power)
        return joined(merged, compensate(exact, assignment))
    if method == "plain mean":
        return all_of(rule.retain(context.k, context.v, count, scores=scores))
    alone = KeepKV(floor=1.0).retain(context.k, context.v, count, scores=scores)
    return alone.entries if method == BASELINE else all_of(alone)


def all_of(retained: Retained) -> Entries:
    """The kept entries and the compensation entry as one block."""
    return joined(retained.entries, retained.compensation)


def joined(a: Entries, b: Entries) -> Entries:
    """Two blocks of entries as one."""
    rows = max(a.log_votes.shape[1], b.log_votes.shape[1])
    votes = [x.log_votes.expand(-1, rows, -1) for x in (a, b)]
    return Entries(torch.cat([a.k, b.k], 1), torch.cat([a.v, b.v], 1), torch.cat(votes, -1))


def attention(q: torch.Tensor, entries: Entries) -> torch.Tensor:
    """Float64 output of q `[queries, heads, group, dim]`."""
    k, v, votes = (x.double() for x in entries)
    logits = torch.einsum("thgd,hnd->thgn", q.double(), k) * SCALE + votes
    return torch.einsum("thgn,hnd->thgd", torch.softmax(logits, -1), v)


def make_context(case: Case, tokens: int, seed: int) -> Context:
    """A context drawn from its case and seed alone."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    clusters = tokens // CLUSTER_TOKENS if case.keys == "clustered" else tokens
    member = torch.randint(0, clusters, (HEADS, tokens), generator=generator)
    index = member.unsqueeze(-1).expand(-1, -1, DIM)
    cosine = 0.8 + 0.15 * torch.rand(HEADS, clusters, 1, generator=generator)
    # Two unit-variance members share a part of variance `cosine`.
    own = (1 - cosine).sqrt().expand(-1, -1, DIM).gather(1, index)
    centre = (cosine.sqrt() * normal(HEADS, clusters, DIM)).gather(1, index)
    k = centre + own * normal(HEADS, tokens, DIM)
    if case.keys == "random":
        k = normal(HEADS, tokens, DIM)
    v = normal(HEADS, clusters, DIM).gather(1, index) + normal(HEADS, tokens, DIM)
    q = case.logit_std * queries(case, generator)
    return Context(k, v, q[:WINDOW], q[WINDOW:])


def queries(case: Case, generator: torch.Generator) -> torch.Tensor:
    """`[seen + new, heads, group, dim]` of unit variance around a mean that a KV head shares."""
    shape = (WINDOW + NEW_QUERIES, HEADS, case.group, DIM)
    noise = torch.randn(*shape, generator=generator)
    mean = torch.randn(HEADS, 1, DIM, generator=generator)
    if case.queries == "drifting":
        for now in range(1, len(noise)):
            noise[now] = 0.98 * noise[now - 1] + (1 - 0.98**2) ** 0.5 * noise[now]
    drawn: torch.Tensor = 0.5 * mean + 0.75**0.5 * noise
    return drawn


def make_table(title: str, rows: Sequence[tuple[Case, dict[str, float]]]) -> Table:
    """A line per case, a column per method; the least error of a line is bold."""
    columns = ("logit std, queries, kept", *METHODS)
    table = new_table(f"Relative output error at new queries: {title}", columns)
    for case, errors in rows:
        least = min(errors.values())
        table.add_row(
            f"{case.logit_std:g} {case.queries} {case.kept:.0%}",
            *(f"[bold]{e:.3f}[/bold]" if e == least else f"{e:.3f}" for e in errors.values()),
        )
    return table


BENCHMARK = Benchmark(
    "accuracy.merging_error",
    __doc__,
    declare,
    run,
    out=RESULTS / "merging-error.json",
    seeded="of the contexts",
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
