"""The cost of choosing: the time of a turn with and without it, in the real engine.

    python -m benchmarks.accuracy.selection

The same contexts are prefilled by one engine per setting: every CA entry kept (the baseline), half
of them by the scorer, and the share that a quality target asks for. The engines take turns,
context by context and in another order every time, so that whatever else the machine does meets
all of them; a second engine that keeps everything says how far two that do the same are apart. A
turn's time ends when its entries are chosen and their slots are free again.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from rich.table import Table

from benchmarks.common.benchmark import RESULTS, Arguments, Benchmark, Measured, Options
from benchmarks.common.recall_arguments import add_model
from benchmarks.common.recall_contexts import STANDING_OUT, make_contexts
from benchmarks.common.recall_engine import PROFILE_FILE, Asked, recall_engine
from benchmarks.common.table import new_table, show
from kvtier.heads.profile import load_profile

BASELINE, AGAIN = "everything kept", "everything kept, again"


def declare(arguments: Arguments) -> None:
    add_model(arguments, "head_profile.json and curve.json")
    arguments.size("--len", "32k", "context tokens")
    arguments.whole("--contexts", 16, "that count, and one to warm up")


def run(options: Options) -> Measured:
    """Time the turns of every setting."""
    model, count = options.model_path, options.contexts + 1
    contexts = make_contexts(STANDING_OUT, options.seed, count, options.len, questions=1)
    profile = load_profile(model / PROFILE_FILE)
    settings: dict[str, dict[str, str]] = {
        BASELINE: {},
        AGAIN: {},
        "half kept": {"RETENTION": "0.5"},
        "quality 0.95": {"QUALITY": "0.95", "CURVE": str(model / "curve.json")},
    }
    with ExitStack() as stack:
        ask = {
            name: stack.enter_context(recall_engine(contexts, model, profile, variables))
            for name, variables in settings.items()
        }
        seconds = in_turns(ask, count, options.seed)
    overhead = overheads(seconds)
    show(make_table(seconds, overhead))
    return Measured(
        {
            "settings": {
                "model": model.name,
                "context_tokens": options.len,
                "contexts": options.contexts,
            },
            "turn_s": seconds,
            "overhead": overhead,
        }
    )


def in_turns(
    ask: Mapping[str, Callable[[int], Asked]], contexts: int, seed: int
) -> dict[str, list[float]]:
    """Seconds of every context's turn by setting; the first context warms up and is left out.

    ask: by setting, serves the context of a number.
    """
    chance, order = random.Random(seed), list(ask)
    seconds: dict[str, list[float]] = {name: [] for name in ask}
    for context in range(contexts):
        chance.shuffle(order)
        for name in order:
            asked = ask[name](context)
            if context > 0:
                seconds[name].append(asked.turn_s)
    return seconds


def overheads(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Median over contexts of (a setting's turn / the baseline's) - 1."""
    return {
        name: statistics.median(
            mine / base for mine, base in zip(turns, seconds[BASELINE], strict=True)
        )
        - 1
        for name, turns in seconds.items()
    }


def make_table(seconds: dict[str, list[float]], overhead: dict[str, float]) -> Table:
    """A line per setting."""
    title = "Time of a turn: prefill, scores, selection"
    table = new_table(title, ("setting", "median turn", "range", "overhead"))
    for name, turns in seconds.items():
        table.add_row(
            name,
            f"{statistics.median(turns):.2f} s",
            f"{min(turns):.2f} … {max(turns):.2f} s",
            f"{overhead[name]:+.1%}",
        )
    return table


BENCHMARK = Benchmark(
    "accuracy.selection",
    __doc__,
    declare,
    run,
    out=RESULTS / "selection-overhead.json",
    schema_version=2,
    seeded="of the contexts",
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
