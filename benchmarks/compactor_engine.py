"""kvtier's side of the Compactor comparison: the real engine, one process per setting.

    run_engine(contexts, kept_shares, heads)    starts a worker per share and collects its records
    python -m benchmarks.compactor_engine …     the worker

The context is sent alone with one token to generate, so its turn ends and the engine compresses
it. Every question then comes as context + question; an answer counts only if the engine served
the whole context from its cache, or it would be an answer from exact KV.

    request 1      [ context ]              compressed when it ends
    request 2 …    [ context | question ]   context cached, question new

heads "all":     every KV head is context-anchored, so retention is the share kept: like for like
                 with a press, which compresses every head and protects 8 + 4 tokens
heads "profile": the model's head profile and kvtier's own windows, retention chosen for the
                 same bytes
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from benchmarks.compactor_contexts import RecallContext, load_contexts, save_contexts
from benchmarks.compactor_records import Record
from kvtier.bench.engine import ChatEngine, EngineError, SglangEngine
from kvtier.bench.options import parse_options
from kvtier.bench.planning import make_plans
from kvtier.bench.recall import ANSWER_TOKENS, DEFAULT_LANGUAGE, score_answer
from kvtier.bench.runner import stop_group
from kvtier.bench.schema import Plan
from kvtier.bench.worker import die_with_parent
from kvtier.config import ENV_PREFIX, load_settings
from kvtier.errors import KvtierError
from kvtier.heads.model_config import model_shape, read_config
from kvtier.heads.profile import HeadProfile, full_profile, load_profile
from kvtier.retention.pools import slot_bytes

Heads = Literal["all", "profile"]
METHODS: dict[Heads, str] = {"all": "kvtier", "profile": "kvtier + head profile"}
# The first and last tokens kept unseen: those of kvpress's CompactorPress, where heads are alike.
# kvtier's own windows (128 + 256) would be most of what a tenth of 4k may keep.
WINDOWS: dict[Heads, dict[str, str]] = {
    "all": {ENV_PREFIX + "SINK_TOKENS": "8", ENV_PREFIX + "RECENT_TOKENS": "4"},
    "profile": {},
}
ROOT = Path(__file__).resolve().parents[1]
DEMO_MODEL = ROOT / "models" / "kvtier-demo"
PROFILE_FILE = "head_profile.json"
RETENTION_VARIABLE = ENV_PREFIX + "RETENTION"
LOG_TAIL_LINES = 20
DTYPE_BYTES = 4  # float32, as in the peer


class Job(BaseModel):
    """What a worker needs: its engine, and under which name and share it reports."""

    model_config = ConfigDict(frozen=True)

    plan: Plan
    contexts: Path
    method: str
    kept_share: float


class WorkerError(KvtierError):
    """A worker that did not finish; the message ends with its last log lines."""


def run_engine(
    contexts: Sequence[RecallContext],
    kept_shares: Sequence[float],
    heads: Heads,
    model: Path = DEMO_MODEL,
) -> list[Record]:
    """Recall and measured bytes of every context at every share. Raises WorkerError."""
    records: list[Record] = []
    with tempfile.TemporaryDirectory(prefix="kvtier-compactor-") as name:
        folder = Path(name)
        profile = head_profile(model, heads)
        profile.save(folder / PROFILE_FILE)
        save_contexts(folder / "contexts.json", contexts, DEFAULT_LANGUAGE.eot)
        plan = make_plan(model, contexts, folder / PROFILE_FILE)
        for share in kept_shares:
            job = Job(
                plan=plan,
                contexts=folder / "contexts.json",
                method=METHODS[heads],
                kept_share=share,
            )
            retention = retention_for(share, profile, len(contexts[0].context_ids))
            environment = worker_environment(folder, job.plan, heads, retention)
            records += _run_worker(folder, job, environment)
    return records


def head_profile(model: Path, heads: Heads) -> HeadProfile:
    """Every head context-anchored, or the profile stored with the model."""
    if heads == "profile":
        return load_profile(model / PROFILE_FILE)
    return full_profile(model_shape(read_config(str(model))), model.name)


def retention_for(share: float, profile: HeadProfile, context_tokens: int) -> float:
    """Retention of the CA heads at which the cache takes `share` of the bytes of an exact one.

    What kvtier remembers beside keys and values (scores) is paid from the same bytes. 1 where the
    profile alone already keeps less; never below what one token is. Locality heads keep sink,
    recent and one compensation entry.
    """
    if share == 1:
        return 1.0
    settings = load_settings()
    held = min(settings.sink_tokens + settings.recent_tokens + 1, context_tokens)
    exact = slot_bytes(profile, DTYPE_BYTES).full
    ours = slot_bytes(profile, DTYPE_BYTES, scored=True)
    left = share * exact - ours.locality * held / context_tokens
    return min(1.0, max(1 / context_tokens, left / ours.ca))


def make_plan(model: Path, contexts: Sequence[RecallContext], profile: Path) -> Plan:
    """A plan of the bench with room for one context and all its questions."""
    flags = {
        "--policies": "kvtier",
        "--turns": "1",
        "--questions": str(len(contexts[0].questions)),
        "--len": str(len(contexts[0].context_ids)),
        "--prefill": "exact",
        "--model-path": str(model),
        "--head-profile": str(profile),
    }
    _, plans = make_plans(parse_options([part for flag in flags.items() for part in flag]))
    return plans[0].plan


def _run_worker(folder: Path, job: Job, environment: dict[str, str]) -> list[Record]:
    job_file, result, log = (folder / f for f in ("job.json", "records.json", "worker.log"))
    job_file.write_text(job.model_dump_json())
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.compactor_engine", str(job_file), str(result)]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
        try:
            exit_code = process.wait()
        finally:
            stop_group(process)
    if exit_code != 0:
        tail = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        raise WorkerError(f"the engine at share {job.kept_share:g} failed:\n" + "\n".join(tail))
    return [Record.model_validate(entry) for entry in json.loads(result.read_text())]


def worker_environment(folder: Path, plan: Plan, heads: Heads, retention: float) -> dict[str, str]:
    """This process's environment with the plan's settings and no other KVTIER_* variable."""
    config = folder / "kvtier.toml"
    config.touch()  # empty, so that no file of the working directory has a say
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)}
    return {
        **environment,
        **plan.environment,
        **WINDOWS[heads],
        ENV_PREFIX + "CONFIG": str(config),
        ENV_PREFIX + "HEAD_PROFILE": str(folder / PROFILE_FILE),
        RETENTION_VARIABLE: f"{retention:.9f}",
    }


def ask_all(engine: ChatEngine, context: RecallContext, job: Job) -> Record:
    """Compress one context in an empty engine and ask its questions.

    Raises EngineError when a question was not answered from the compressed context.
    """
    eot = DEFAULT_LANGUAGE.eot
    engine.flush()
    empty = engine.occupancy().kv_used_bytes
    engine.generate(context.context_ids, 1, eot)
    kept = engine.occupancy().kv_used_bytes - empty
    recalls = []
    for question in context.questions:
        prompt = [*context.context_ids, *question.prompt_ids]
        answer = engine.generate(prompt, ANSWER_TOKENS, eot)
        if answer.cached_tokens < len(context.context_ids):
            raise EngineError(
                f"context {context.index}: only {answer.cached_tokens} of "
                f"{len(context.context_ids)} context tokens came from the cache"
            )
        recalls.append(score_answer(question.answer_ids, answer.output_ids).codes)
    return Record(
        method=job.method,
        kind=context.kind,
        context=context.index,
        kept_share=job.kept_share,
        recalls=tuple(recalls),
        kv_bytes=kept,
    )


def main(argv: Sequence[str]) -> int:
    """The worker: job file in, records file out."""
    die_with_parent()
    job = Job.model_validate_json(Path(argv[0]).read_text())
    engine = SglangEngine(job.plan)
    try:
        records = [ask_all(engine, context, job) for context in load_contexts(job.contexts)]
    finally:
        engine.close()
    dumped: list[dict[str, Any]] = [record.model_dump() for record in records]
    Path(argv[1]).write_text(json.dumps(dumped))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
