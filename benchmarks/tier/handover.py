"""A session that another server goes on with: its context comes from the tier.

    python -m benchmarks.tier.handover --lens 8k 32k

Every server is an engine of its own. One that has no tier computes the context and holds it; what
the others do is set beside that, in the same run.

    prefill, decode    one server computes the prompt and answers a token; another is asked the same
                       prompt again (exact KV), or the prompt with that token (compressed as the
                       first server's turn ended), and answers the rest
    replicas           one server holds the first turn, another gets the second
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common.bars import Bar
from benchmarks.common.benchmark import RESULTS, Arguments, Benchmark, Measured, Options
from benchmarks.common.recall_arguments import add_model
from benchmarks.common.recall_contexts import LOOK_ALIKES, make_context
from benchmarks.common.recall_engine import PROFILE_FILE, bench_plan, worker_environment
from benchmarks.common.remote import run_module
from benchmarks.common.table import new_table, show
from benchmarks.tier.handover_engine import Answer, Request
from kvtier.bench.runner import LOCAL_TIER, TIER_VARIABLE, local_tier
from kvtier.sizes import format_bytes, format_size, parse_size

ANSWER_TOKENS = 24
QUESTIONS = 8


class Servers:
    """Starts servers of a model that share one tier. folder: for their files."""

    def __init__(self, folder: Path, model: Path, tokens: int, tier: Mapping[str, str]) -> None:
        self.folder, self.tier = folder, tier
        flags = {
            "--workload": "recall", "--policies": "kvtier", "--turns": "2", "--questions": "1",
            "--len": str(tokens + 256), "--model-path": str(model),
            "--head-profile": str(model / PROFILE_FILE),
        }  # fmt: skip
        self.plan = bench_plan(flags)
        (folder / PROFILE_FILE).write_bytes((model / PROFILE_FILE).read_bytes())
        (folder / "plan.json").write_text(self.plan.model_dump_json())

    def ask(self, requests: Sequence[Request], namespace: str | None) -> list[Answer]:
        """One server, from start to stop. namespace: of the tier; None: without a tier."""
        settings = {} if namespace is None else {"TIER_NAMESPACE": namespace}
        environment = worker_environment(self.folder, self.plan, settings)
        environment |= self.tier if namespace is not None else {}
        files = [self.folder / name for name in ("plan.json", "job.json", "answers.json")]
        files[1].write_text(json.dumps([request.model_dump() for request in requests]))
        log = self.folder / "worker.log"
        run_module("benchmarks.tier.handover_engine", files, environment, log)
        return [Answer.model_validate(one) for one in json.loads(files[2].read_text())]


@contextmanager
def servers_over_a_tier(model: Path, tokens: int) -> Iterator[Servers]:
    with tempfile.TemporaryDirectory(prefix="kvtier-handover-") as name:
        folder = Path(name)
        with local_tier({TIER_VARIABLE: LOCAL_TIER}, folder / "tier.log") as tier:
            yield Servers(folder, model, tokens, tier or {})


def declare(arguments: Arguments) -> None:
    add_model(arguments, "head_profile.json")
    arguments.add("--lens", nargs="+", default=["8k", "32k"], metavar="SIZE", help="(8k 32k)")


def run(options: Options) -> Measured:
    rows: list[dict[str, Any]] = []
    for text in options.lens:
        tokens = parse_size(text, "--lens")
        with servers_over_a_tier(options.model_path, tokens) as servers:
            rows.append(hand_over(servers, tokens, options.seed))
        show_row(rows[-1])
    settings = {"model": options.model_path.name, "answer_tokens": ANSWER_TOKENS}
    return Measured({"settings": settings, "lengths": rows}, [b for row in rows for b in bars(row)])


def hand_over(servers: Servers, tokens: int, seed: int) -> dict[str, Any]:
    """All ways of one length."""
    context = make_context(LOOK_ALIKES, seed, 0, tokens, QUESTIONS)
    first, second = context.questions[:2]
    prompt = (*context.context_ids, *first.prompt_ids)
    whole = Request(input_ids=prompt, new_tokens=ANSWER_TOKENS)
    # Whatever the first server says: the others are asked about the same past.
    alone = servers.ask([whole], None)[0]
    history = (*prompt, *alone.output_ids, *second.prompt_ids)
    later = Request(input_ids=history, new_tokens=ANSWER_TOKENS)
    stayed = servers.ask([whole, later], None)
    moved = servers.ask([later], None)[0]
    # One server computes, others answer.
    begin = Request(input_ids=prompt, new_tokens=1)
    prefilled = servers.ask([begin], "disaggregated")[0]
    shorter = Request(input_ids=(*prompt, *prefilled.output_ids), new_tokens=ANSWER_TOKENS - 1)
    compressed = servers.ask([shorter], "disaggregated")[0]
    exact = servers.ask([whole], "disaggregated")[0]
    # One server holds the first turn, another gets the second.
    servers.ask([whole], "replicas")
    replica = servers.ask([later], "replicas")[0]
    return {
        "context_tokens": tokens,
        "computed": alone.model_dump(),
        "prefilled": prefilled.model_dump(),
        "decoded, exact": exact.model_dump(),
        "decoded, compressed": compressed.model_dump(),
        "second turn, resident": stayed[1].model_dump(),
        "second turn, another server without a tier": moved.model_dump(),
        "second turn, another replica": replica.model_dump(),
    }


def show_row(row: Mapping[str, Any]) -> None:
    table = new_table(
        f"A context of {format_size(row['context_tokens'])} tokens",
        ("server", "time to first token", "not computed", "KV at rest"),
        left=("server",),
    )
    for name, answer in row.items():
        if isinstance(answer, dict):
            ttft = f"{answer['ttft_ms']:.0f} ms"
            held = format_bytes(answer["kv_bytes"])
            table.add_row(name, ttft, str(answer["cached_tokens"]), held)
    show(table)


def bars(row: Mapping[str, Any]) -> list[Bar]:
    """Return what has to hold of one length."""
    length, computed = format_size(row["context_tokens"]), row["computed"]
    moved = row["second turn, another server without a tier"]
    found = []
    for name, against in (
        ("decoded, exact", computed),
        ("decoded, compressed", computed),
        ("second turn, another replica", moved),
    ):
        mine, theirs = row[name]["ttft_ms"], against["ttft_ms"]
        label = f"{length}, {name}: time to first token below computing"
        found.append(Bar(label, f"{mine:.0f} ms against {theirs:.0f} ms", mine < theirs))
    for name, against in (
        ("decoded, exact", computed),
        ("second turn, another replica", row["second turn, resident"]),
    ):
        equal = row[name]["output_ids"] == against["output_ids"]
        says = "equal" if equal else "different"
        found.append(Bar(f"{length}, {name}: tokens of a single server", says, equal))
    return found


BENCHMARK = Benchmark(
    "tier.handover",
    __doc__,
    declare,
    run,
    out=RESULTS / "tier-handover.json",
    seed=3,
    seeded="of the contexts",
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
