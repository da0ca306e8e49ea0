"""Two engines and one tier under everything at once, their answers compared with stock SGLang's.

    python -m benchmarks.soak --minutes 60

Five real processes on one machine: engine A, which keeps everything; engine B, which compresses by
one rule after the other; their tier, on memory and disk; their Redis; and a reference, stock SGLang
without any cache. Clients hold sessions whose turns go to either engine, fork them, give requests
up, ask the same under other salts, extra keys and adapters. Device pools and tier are small: KV is
evicted and restored all the time. Meanwhile everything fails, again and again:

    the tier     is killed and started again, is stopped for longer than deadlines, has a full disk
                 (a small tmpfs, where this user may mount one); the way to it is slow, flips bits,
                 resets connections. After every fault both engines have to find it well again
    Redis        is killed and started again
    engines      get other weights and back, are emptied; B is ended and started by another rule

An answer is compared wherever it must come from exact KV, by its tokens and by their
log-probabilities (soak/check.py):

    everything kept      all answers of engine A, whichever engine stored what it restored
    computed whole       of B: nothing cached reaches behind a dropped span
    short                of B: contexts that locality heads keep whole, from the cache
    prompt logprobs      of B: they are computed behind nothing that is dropped
    exact fork           of B: it leaves a compressed context early enough; its exact prefix comes
                         from the tier, or is computed
    another rule's KV    of either: restored from the tier, where nothing of it was stored by this
                         engine's rule

What B says from compressed KV is not compared, but some of it is shown to the reference as well: it
tells what the comparison sees. Exit code 1 where a bar is not met.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.benchmark import RESULTS, Arguments, Benchmark, Measured, Options
from benchmarks.soak.faults import EVERY_S
from benchmarks.soak.models import POLICIES
from benchmarks.soak.report import make_bars, make_outcome
from benchmarks.soak.run import Soak
from kvtier.bench.runner import terminated_as_interrupted

MOST_GROWTH = 0.10


def main(argv: Sequence[str] | None = None) -> int:
    """The command; a SIGTERM ends all processes, too."""
    with terminated_as_interrupted():
        return BENCHMARK.main(argv)


def declare(arguments: Arguments) -> None:
    arguments.model()
    arguments.number("--minutes", 60.0, "of load; starting up is extra")
    arguments.add("--most-growth", type=float, default=MOST_GROWTH, metavar="SHARE",
        help="of any process's resident memory (%(default)s)")  # fmt: skip


def run(options: Options) -> Measured:
    """Soak for as long as asked."""
    # Sockets live in it, and their paths must be short.
    with tempfile.TemporaryDirectory(prefix="kvtier-soak-") as name:
        model = options.model_path.resolve()
        seen = Soak(Path(name), model, options.minutes, options.seed).run()
    outcome = make_outcome(seen)
    for example in outcome["examples"]:
        print(example, file=sys.stderr)
    settings = {
        "model": model.name,
        "minutes": options.minutes,
        "most_growth": options.most_growth,
        "rules_of_engine_b": POLICIES,
        "mean_seconds_between_faults": EVERY_S,
        "seed": options.seed,
    }
    figures = {"settings": settings, "outcome": outcome}
    return Measured(figures, make_bars(outcome, options.most_growth))


BENCHMARK = Benchmark("soak", __doc__, declare, run, out=RESULTS / "soak.json")

if __name__ == "__main__":
    sys.exit(main())
