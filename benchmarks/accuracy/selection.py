"""What choosing costs: the time of a turn with and without Compactor, in the real engine.

    python -m benchmarks.accuracy.selection

The same contexts are prefilled by one engine per setting: every CA entry kept (the baseline), half
of them by Compactor's scores, and the share that a quality target asks for. The engines take turns,
context by context and in another order every time, so that whatever else the machine does meets
all of them; a second engine that keeps everything says how far two that do the same are apart. A
turn's time ends when its entries are chosen and their slots are free again.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.accuracy.compactor_contexts import STANDING_OUT, make_contexts
from benchmarks.common.command import ROOT, run_command
from benchmarks.common.recall_engine import DEMO_MODEL, PROFILE_FILE, Asked, recall_engine
from kvtier.bench.table import make_console
from kvtier.environment import describe_environment
from kvtier.errors import UsageError
from kvtier.heads.profile import load_profile
from kvtier.sizes import parse_size

SCHEMA_VERSION = 2
BASELINE, AGAIN = "everything kept", "everything kept, again"
OUT = ROOT / "benchmarks" / "results" / "selection-overhead.json"


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0 when everything ran, 1 when the engine failed, 2 for bad input."""
    return run_command("selection", parse_arguments(argv), run)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.accuracy.selection", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--out", type=Path, default=OUT, metavar="FILE", help="JSON of the outcome (%(default)s)")
    add("--model-path", type=Path, default=DEMO_MODEL, help="with profile and curve beside it")
    add("--len", default="32k", help="context tokens (%(default)s)")
    add("--contexts", type=int, default=16, help="that count (%(default)s), and one to warm up")
    add("--seed", type=int, default=0, help="of the contexts (%(default)s)")
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Time every setting and return the outcome."""
    for name, least in (("contexts", 1), ("seed", 0)):
        if getattr(options, name) < least:
            raise UsageError(f"--{name}", f"at least {least}", getattr(options, name))
    started = datetime.now(UTC).isoformat(timespec="seconds")
    environment = describe_environment(options.seed).model_dump()
    model, tokens = options.model_path, parse_size(options.len, "--len")
    count = options.contexts + 1
    contexts = make_contexts(STANDING_OUT, options.seed, count, tokens, questions=1)
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
    make_console().print(make_table(seconds, overhead))
    return {
        "schema_version": SCHEMA_VERSION,
        "started_at": started,
        "environment": environment,
        "settings": {
            "model": model.name,
            "context_tokens": tokens,
            "contexts": options.contexts,
        },
        "turn_s": seconds,
        "overhead": overhead,
    }


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
    table = Table(title="Time of a turn: prefill, scores, selection")
    table.add_column("setting")
    for column in ("median turn", "range", "overhead"):
        table.add_column(column, justify="right")
    for name, turns in seconds.items():
        table.add_row(
            name,
            f"{statistics.median(turns):.2f} s",
            f"{min(turns):.2f} … {max(turns):.2f} s",
            f"{overhead[name]:+.1%}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
