"""Recall contexts in the real engine, one engine process per setting.

    with recall_engine(contexts, model, profile, settings) as ask:    starts a worker
        asked = ask(0)                                                one context, by its number
    ask_engine(contexts, model, profile, settings)                    all of them
    python -m benchmarks.common.recall_engine …                              the worker

The context is sent alone with one token to generate, so its turn ends and the engine compresses
it. Every question then comes as context + question; an answer counts only if the engine served
the whole context from its cache, or it would be an answer from exact KV.

    request 1      [ context ]              compressed when it ends
    request 2 …    [ context | question ]   context cached, question new
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from benchmarks.common.recall_contexts import RecallContext, load_contexts, save_contexts
from benchmarks.common.remote import clean_environment, parents_lines, running_module
from kvtier.bench.engine import ChatEngine, EngineError, SglangEngine
from kvtier.bench.measure import settled
from kvtier.bench.options import parse_options
from kvtier.bench.planning import make_plans
from kvtier.bench.schema import Plan, RetainedTurn, TierReading
from kvtier.bench.worker import die_with_parent
from kvtier.config import ENV_PREFIX
from kvtier.heads.profile import HeadProfile
from kvtier.synthetic.recall import ANSWER_TOKENS, DEFAULT_LANGUAGE, score_answer

PROFILE_FILE = "head_profile.json"


class Asked(BaseModel):
    """One context, compressed once and asked about.

    recalls:  per question, the share of codes right, each at its place
    kv_bytes: what the context took on the device, measured
    turn_s:   from sending the context until its turn was prefilled, answered and compressed
    retained: what its CA heads kept, None where they were not asked to drop anything
    tier:     what the tier had done by the end, None without one
    """

    model_config = ConfigDict(frozen=True)

    kind: str
    context: int
    recalls: tuple[float, ...]
    kv_bytes: int
    turn_s: float
    retained: RetainedTurn | None
    tier: TierReading | None = None


def ask_engine(
    contexts: Sequence[RecallContext],
    model: Path,
    profile: HeadProfile,
    settings: Mapping[str, str],
) -> list[Asked]:
    """Every context in an empty engine, with all its questions. Raises WorkerError.

    settings: KVTIER_* variables by their name without the prefix, such as {"RETENTION": "0.5"}
    """
    with recall_engine(contexts, model, profile, settings) as ask:
        return [ask(index) for index in range(len(contexts))]


@contextmanager
def recall_engine(
    contexts: Sequence[RecallContext],
    model: Path,
    profile: HeadProfile,
    settings: Mapping[str, str],
) -> Iterator[Callable[[int], Asked]]:
    """Start an engine and ask it a context at a time, as `ask_engine` does; it sleeps in
    between."""
    with tempfile.TemporaryDirectory(prefix="kvtier-recall-") as name:
        folder = Path(name)
        profile.save(folder / PROFILE_FILE)
        save_contexts(folder / "contexts.json", contexts, DEFAULT_LANGUAGE.eot)
        plan = make_plan(model, contexts, folder / PROFILE_FILE)
        (folder / "plan.json").write_text(plan.model_dump_json())
        environment = worker_environment(folder, plan, settings)
        files = [folder / name for name in ("plan.json", "contexts.json")]
        worker = running_module(
            "benchmarks.common.recall_engine", files, environment, folder / "worker.log"
        )
        with worker as remote:
            yield lambda index: Asked.model_validate(remote.tell("ask", context=index))


def make_plan(model: Path, contexts: Sequence[RecallContext], profile: Path) -> Plan:
    """A plan of the bench with room for one context and all its questions."""
    flags = {
        "--workload": "recall",
        "--policies": "kvtier",
        "--turns": "1",
        "--questions": str(len(contexts[0].questions)),
        "--len": str(len(contexts[0].context_ids)),
        "--model-path": str(model),
        "--head-profile": str(profile),
    }
    return bench_plan(flags)


def bench_plan(flags: Mapping[str, str]) -> Plan:
    """Return the plan that the bench would start by these flags of `python -m kvtier.bench`, of one
    policy."""
    _, plans = make_plans(parse_options([part for flag in flags.items() for part in flag]))
    return plans[0].plan


def worker_environment(folder: Path, plan: Plan, settings: Mapping[str, str]) -> dict[str, str]:
    """This process's, with the plan's and the caller's settings and no other KVTIER_* variable."""
    config = folder / "kvtier.toml"
    config.touch()  # empty, so that no file of the working directory has a say
    own = {"CONFIG": str(config), **settings}
    if "HEAD_BUDGETS" not in settings:
        own = {"HEAD_PROFILE": str(folder / PROFILE_FILE), **own}
    return {
        **clean_environment(),
        **plan.environment,
        **{ENV_PREFIX + name: value for name, value in own.items()},
    }


def ranks_on_a_cpu(ranks: int) -> dict[str, str]:
    """Return the environment that SGLang's ranks want on a CPU: cores, and without a compiler no
    traced all-reduce. Its own checker ends a server whose ranks part. It is empty for one rank."""
    if ranks == 1:
        return {}
    cores = os.cpu_count() or 1
    return {
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(f"{rank % cores}" for rank in range(ranks)),
        "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }


def ask_all(engine: ChatEngine, context: RecallContext) -> Asked:
    """Compress one context in an empty engine and ask its questions.

    Raises EngineError when a question was not answered from the compressed context.
    """
    eot = DEFAULT_LANGUAGE.eot
    engine.flush()
    empty = engine.occupancy()
    began = time.perf_counter()
    engine.generate(context.context_ids, 1, [eot])
    engine.occupancy()  # answered by the thread that compresses, when it has done so
    turn_s = time.perf_counter() - began
    full = settled(engine)
    recalls = []
    for question in context.questions:
        prompt = [*context.context_ids, *question.prompt_ids]
        answer = engine.generate(prompt, ANSWER_TOKENS, [eot])
        if answer.cached_tokens < len(context.context_ids):
            raise EngineError(
                f"context {context.index}: only {answer.cached_tokens} of "
                f"{len(context.context_ids)} context tokens came from the cache"
            )
        recalls.append(score_answer(question.answer_ids, answer.output_ids).codes)
    return Asked(
        kind=context.kind,
        context=context.index,
        recalls=tuple(recalls),
        kv_bytes=full.kv_used_bytes - empty.kv_used_bytes,
        turn_s=turn_s,
        retained=full.newest if full.compacted_turns > empty.compacted_turns else None,
        tier=engine.occupancy().tier,
    )


def main(argv: Sequence[str]) -> int:
    """The worker: PLAN CONTEXTS READ_FD WRITE_FD; numbers of contexts in, answers out."""
    die_with_parent()
    plan = Plan.model_validate_json(Path(argv[0]).read_text())
    contexts = load_contexts(Path(argv[1]))
    with parents_lines(argv[2:]) as (reads, writes):
        # Engines may take turns: one that waits must not spin.
        sleeps = {"engine_args": {**plan.engine_args, "sleep_on_idle": True}}
        engine = SglangEngine(plan.model_copy(update=sleeps))
        try:
            for line in reads:
                asked = ask_all(engine, contexts[json.loads(line)["context"]])
                print(asked.model_dump_json(), file=writes, flush=True)
        finally:
            engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
