"""The gain from n-gram drafts where a text repeats itself: tokens a pass, and time a token.

The same sessions with and without SGLang's drafts, over kvtier. Each says one phrase over and over,
and so does the model. Both engines take turns, because a machine's speed drifts.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.bars import at_least, at_most
from benchmarks.common.benchmark import RESULTS, ROOT, Arguments, Benchmark, Measured, Options
from benchmarks.common.table import new_table, show
from benchmarks.cost.engine import engine_arguments, serve
from benchmarks.gpu.serving_worker import Load, Plan
from kvtier.sizes import format_size

# The ids are those of the demo model's vocabulary, and of any other's, without special ids.
IDS = (6, 384)
TURNS, TURN_TOKENS, SLACK_TOKENS = 3, 16, 4096
LEAST_ACCEPTED = 1.5


def declare(arguments: Arguments) -> None:
    arguments.add(
        "--model-path", type=Path, default=ROOT / "models" / "kvtier-demo", metavar="DIR",
        help="a model whose ids 6 … 383 are no special ones",
    )  # fmt: skip
    arguments.add("--head-profile", type=Path, help="(head_profile.json of the model)")
    arguments.size("--len", "1k", "context tokens")
    arguments.whole("--phrase", 40, "tokens that a session repeats", least=2)
    arguments.whole("--sessions", 4, "sessions, each with a phrase of its own")
    arguments.whole("--answer-tokens", 128, "of every answer", least=2)
    arguments.whole("--drafts", 8, "tokens that a pass verifies, the newest among them", least=2)
    arguments.whole("--rounds", 3, "engines with drafts, and without")


def run(options: Options) -> Measured:
    profile = options.head_profile or options.model_path / "head_profile.json"
    found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for number in range(options.rounds):
        # Forwards and backwards, so that what drifts meets both alike.
        for drafted in (False, True) if number % 2 == 0 else (True, False):
            with tempfile.TemporaryDirectory(prefix="kvtier-drafts-") as folder:
                plan = make_plan(options, drafted=drafted)
                found[drafted].append(serve(plan, Path(folder), profile))
    plain, drafted_ms = (
        statistics.median(1000 * one["tpot_s"] for one in found[drafted])
        for drafted in (False, True)
    )
    accepted = statistics.mean(one["accept_length"] for one in found[True])
    answers = [one["first_answers"] for rounds in found.values() for one in rounds]
    differing = sum(a != b for one in answers[1:] for a, b in zip(one, answers[0], strict=True))
    table = new_table(
        f"Answers that repeat a phrase of {options.phrase} tokens, behind "
        f"{format_size(options.len)} of it",
        ("", "ms per token", "tokens a pass", "without / with"),
        left=("",),
    )
    table.add_row("without drafts", f"{plain:.2f}", "1.00", "")
    ratio = plain / drafted_ms
    table.add_row("with drafts", f"{drafted_ms:.2f}", f"{accepted:.2f}", f"{ratio:.2f}x")
    show(table)
    figures = {
        "model": options.model_path.name, "context_tokens": options.len, "phrase": options.phrase,
        "sessions": options.sessions, "answer_tokens": options.answer_tokens,
        "drafts": options.drafts, "tpot_ms": {"without": plain, "with": drafted_ms},
        "tpot_ratio": ratio, "accept_length": accepted, "differing_answers": differing,
    }  # fmt: skip
    bars = [
        at_least("tokens a pass", accepted, LEAST_ACCEPTED),
        at_most("first answers that differ", differing, 0),
    ]
    return Measured(figures, bars)


def make_plan(options: Options, *, drafted: bool) -> Plan:
    chunk = min(options.len, 4096)
    session = options.len + TURNS * (TURN_TOKENS + options.answer_tokens)
    room = options.sessions * session + chunk + SLACK_TOKENS
    engine = engine_arguments(options.model_path, chunk, room, options.seed)
    engine |= {"attention_backend": "kvtier", "radix_cache_backend": "kvtier"}
    if drafted:
        engine |= {
            "speculative_algorithm": "NGRAM",
            "speculative_num_draft_tokens": options.drafts,
        }
    load = Load(
        sessions=options.sessions,
        context=options.len,
        turns=TURNS,
        turn_tokens=TURN_TOKENS,
        answer_tokens=options.answer_tokens,
        chunk=chunk,
        ids=IDS,
        seed=options.seed,
        phrase=options.phrase,
    )
    return Plan(engine=engine, load=load)


BENCHMARK = Benchmark(
    "cost.drafts", __doc__, declare, run, out=RESULTS / "drafts.json", seeded="of all phrases"
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
