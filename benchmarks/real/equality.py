"""The engine's answers beside the reference implementation's, on a model that others trained.

    python -m benchmarks.real.equality --model-path out/smollm2 [--ranks 3]

Sessions of three turns over real text are answered greedily. The engine is compared with the
reference on transformers with the model's head profile alone, with a share of the tokens chosen by
two scorers, and with adaptive budgets. With every head context-anchored it is compared with stock
SGLang.

A difference counts unless the reference's two best tokens are nearer to each other there than
rounding. With --ranks kvtier's engine has so many tensor parallel ranks, stock SGLang's one. With
--kv-dtype the cache of all of them holds KV of that dtype. A rounding of float32 can become one of
fp8, so stock SGLang is then compared with itself, too, its prompts cut into other chunks.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel
from torch import Tensor

from benchmarks.common.bars import at_most
from benchmarks.common.benchmark import RESULTS, Arguments, Benchmark, Measured, Options
from benchmarks.common.engines import bench_plan, ranks_on_a_cpu
from benchmarks.common.remote import clean_environment, run_job
from benchmarks.common.table import new_table, show
from kvtier.bench.engine import SglangEngine
from kvtier.bench.schema import Plan
from kvtier.bench.worker import die_with_parent
from kvtier.heads.model.config import model_shape, read_config
from kvtier.heads.model.loading import load_model
from kvtier.heads.profile import HeadProfile, full_profile, load_profile
from kvtier.heads.progress import Progress, rich_progress
from kvtier.heads.reference.compaction import AdaptiveSession, CompactingSession, ScoredSession
from kvtier.heads.samples.synthetic import HELD_OUT, make_samples, tasks_for
from kvtier.retention.locality import LocalityRule
from kvtier.retention.scorers import SCORERS
from kvtier.retention.scorers.reconstruction import Reconstruction
from kvtier.retention.shares import FixedShare, Turn
from kvtier.retention.token_worth import TokenWorth
from kvtier.synthetic.tokenizer import Tokenizer

TASKS = ("quotation", "code", "key-value", "qa")
TURNS, NEW_TOKENS, CHUNK_TOKENS = 3, 12, 512
OTHER_CHUNK_TOKENS = 384
ITSELF = "stock SGLang in other chunks"
SHARE = 0.35
# Flags of the bench beside the model's head profile.
SETTINGS: Mapping[str, dict[str, str]] = {
    "head profile": {},
    "head profile, 35% by distinct-keys": {"--retention": str(SHARE), "--scorer": "distinct-keys"},
    "head profile, 35% by compactor": {"--retention": str(SHARE), "--scorer": "compactor"},
    "35% by adaptive budgets": {
        "--retention": str(SHARE), "--scorer": "reconstruction", "--head-budgets": "adaptive",
    },
}  # fmt: skip
# Float32 may go either way where the two best tokens differ by fewer nats.
ROUNDING = 1e-3
RULE = LocalityRule(sink_tokens=16, recent_tokens=64, branch_recent_tokens=32)
RULE_VARIABLES = {
    "KVTIER_LOCALITY_SINK_TOKENS": str(RULE.sink_tokens),
    "KVTIER_LOCALITY_RECENT_TOKENS": str(RULE.recent_tokens),
    "KVTIER_LOCALITY_BRANCH_RECENT_TOKENS": str(RULE.branch_recent_tokens),
}

# The names are those that users write; None stands for the model's own dtype.
KV_DTYPES = {"auto": None, "fp8_e4m3": torch.float8_e4m3fn}

Turns = list[list[int]]
"""The token ids of a session's turns: its prompts, or its answers."""


class Job(BaseModel):
    """The job of a worker: the prompts of sessions."""

    plan: Plan
    sessions: list[Turns]


def declare(arguments: Arguments) -> None:
    arguments.add("--model-path", type=Path, required=True, help="local model directory")
    arguments.size("--len", "1k", "context tokens of a session's first turn", least=500)
    arguments.whole("--sessions", 40, f"sessions of {TURNS} turns")
    arguments.add(
        "--kv-dtype", choices=KV_DTYPES, default="auto", help="of the cache (%(default)s)"
    )
    arguments.whole("--ranks", 1, "tensor parallel ranks; as many as divide the model's heads")
    arguments.add(
        "--settings", nargs="*", choices=list(SETTINGS), default=list(SETTINGS), metavar="NAME",
        help="besides every head context-anchored (default: all)",
    )  # fmt: skip


def run(options: Options) -> Measured:
    """Ask both sides in every setting, and compare their answers."""
    model_path = options.model_path
    profile = load_profile(model_path / "head_profile.json")
    sessions = make_sessions(model_path, options.len, options.sessions, options.seed)
    everything = full_profile(model_shape(read_config(str(model_path))))
    rows = []
    with rich_progress() as progress:
        stock = ask_engine(sessions, options, "stock", everything, {}, progress)
        ours = ask_engine(sessions, options, "kvtier", everything, {}, progress)
        sure = [[Said(answer, []) for answer in turns] for turns in stock]
        rows.append(compare("every head context-anchored", "stock SGLang", ours, sure))
        if KV_DTYPES[options.kv_dtype] is not None:
            other = ask_engine(
                sessions, options, "stock", everything, {}, progress, OTHER_CHUNK_TOKENS
            )
            rows.append(compare(ITSELF, "stock SGLang", other, sure))
        for name in options.settings:
            settings, heads = dict(SETTINGS[name]), profile
            if "--head-budgets" in settings:
                weights = model_path / "token_worth.npz"
                settings["--scorer-file"] = str(weights.resolve())
                heads = everything
            ours = ask_engine(sessions, options, "kvtier", heads, settings, progress)
            theirs = ask_reference(sessions, options, heads, settings, progress)
            rows.append(compare(name, "the reference", ours, theirs))
    table = new_table("Greedy tokens, prompt by prompt", ("setting", "against", *rows[0]["counts"]),
                      left=("setting", "against"))  # fmt: skip
    for row in rows:
        table.add_row(row["setting"], row["against"], *map(str, row["counts"].values()))
    show(table)
    settings_used = {
        "model": model_path.name, "context_tokens": options.len, "turns": TURNS,
        "new_tokens": NEW_TOKENS, "sink_tokens": RULE.sink_tokens,
        "recent_tokens": RULE.recent_tokens, "ca_heads": profile.num_ca_heads,
        "ranks": options.ranks, "kv_dtype": options.kv_dtype,
    }  # fmt: skip
    bars = [
        at_most(f"{row['setting']}: prompts that differ", row["counts"]["different"], 0)
        for row in rows
        if row["setting"] != ITSELF
    ]
    return Measured({"settings": settings_used, "rows": rows}, bars)


def make_sessions(model_path: Path, length: int, count: int, seed: int) -> list[Turns]:
    """Return the prompts of sessions: a context with its first question, then other questions."""
    tasks = tasks_for(str(model_path))
    samples = make_samples(tasks.make, TASKS, count, [length], seed, HELD_OUT)
    sessions = []
    for sample in samples:
        first, *others = [list(question.prompt_ids) for question in sample.questions[:TURNS]]
        sessions.append([[*sample.context_ids, *first], *others])
    return sessions


def ask_engine(
    sessions: Sequence[Turns], options: Options, policy: str, profile: HeadProfile,
    settings: Mapping[str, str], progress: Progress, chunk_tokens: int = CHUNK_TOKENS,
) -> list[Turns]:  # fmt: skip
    """Return the engine's answers. Raises WorkerError."""
    progress(f"{policy}: sessions", 0, len(sessions))
    with tempfile.TemporaryDirectory(prefix="kvtier-equality-") as name:
        folder = Path(name)
        profile.save(folder / "head_profile.json")
        flags = {
            "--workload": "text", "--policies": policy, "--turns": str(TURNS), "--questions": "1",
            "--len": str(options.len + 512), "--chunk": str(chunk_tokens),
            "--model-path": str(options.model_path), "--kv-dtype": options.kv_dtype,
        }  # fmt: skip
        environment = dict(RULE_VARIABLES)
        if "--head-budgets" not in settings:
            flags["--head-profile"] = str(folder / "head_profile.json")
            environment["KVTIER_HEAD_PROFILE"] = flags["--head-profile"]
        plan = bench_plan({**flags, **settings})
        ranks = options.ranks if policy == "kvtier" else 1
        plan.engine_args["tp_size"] = ranks
        config = folder / "kvtier.toml"
        config.touch()  # empty, so that no file of the working directory has a say
        environment = {
            **clean_environment(), **plan.environment, **environment, "KVTIER_CONFIG": str(config),
        }  # fmt: skip
        if plan.engine_args["device"] == "cpu":
            environment |= ranks_on_a_cpu(ranks)
        job = Job(plan=plan, sessions=list(sessions))
        answers: list[Turns] = run_job("benchmarks.real.equality", job, environment)
    return answers


def ask_reference(
    sessions: Sequence[Turns], options: Options, profile: HeadProfile,
    settings: Mapping[str, str], progress: Progress,
) -> list[list[Said]]:  # fmt: skip
    """Return the reference's answers."""
    model = load_model(str(options.model_path))
    (eos,) = Tokenizer(str(options.model_path)).eos_ids
    kv_dtype = KV_DTYPES[options.kv_dtype]
    answers = []
    for done, prompts in enumerate(sessions):
        progress("reference: sessions", done, len(sessions))
        session: Watching
        if "--head-budgets" in settings:
            fitted = Reconstruction.of(TokenWorth.load(Path(settings["--scorer-file"])))
            session = WatchedAdaptive(
                model, RULE, CHUNK_TOKENS, fitted, kv_dtype=kv_dtype, ranks=options.ranks
            )
        else:
            scorer = SCORERS[settings.get("--scorer", "distinct-keys")]()
            session = WatchedSession(
                model, profile, RULE, CHUNK_TOKENS, scorer, kv_dtype=kv_dtype, in_pages=True
            )
        if "--retention" in settings:
            session.share = FixedShare(SHARE)
        answers.append([session.say(prompt, eos) for prompt in prompts])
    return answers


class Said(NamedTuple):
    """A turn's answer. leads: for each token, the distance to the second best, in nats."""

    tokens: list[int]
    leads: list[float]


class Watching(ScoredSession):
    """A reference session that remembers how sure it was. share: the part that CA heads keep of the
    tokens that locality heads would drop; None: everything."""

    share: FixedShare | None = None
    _leads: list[float]

    def keep_count(self, prompt_tokens: int, droppable: int) -> int:
        if self.share is None:
            return droppable
        return self.share.choose(Turn(prompt_tokens, droppable)).kept_tokens

    def say(self, prompt: Sequence[int], eos: int) -> Said:
        """Answer a turn with at most NEW_TOKENS tokens."""
        self._leads = []
        tokens = self.turn(prompt, NEW_TOKENS, eos).token_ids
        # The token that would follow `eos` is computed, too.
        ended = len(self._leads) - int(tokens[-1] == eos and len(tokens) < NEW_TOKENS)
        return Said(tokens, self._leads[ended - len(tokens) : ended])

    def _forward(self, token_ids: list[int]) -> Tensor:
        logits = super()._forward(token_ids)
        best, second = logits.topk(2).values.tolist()
        self._leads.append(best - second)
        return logits


class WatchedSession(Watching, CompactingSession):
    """A session whose CA heads keep equally many tokens."""


class WatchedAdaptive(Watching, AdaptiveSession):
    """A session whose heads compete."""


def compare(
    setting: str, against: str, ours: Sequence[Turns], theirs: Sequence[Sequence[Said]]
) -> dict[str, Any]:
    """Count the prompts that have the same answer, and tell the differences.

    A session ends where an answer differs: later prompts were asked about another past.
    """
    counts = dict.fromkeys(("prompts", "equal", "within rounding", "different", "not compared"), 0)
    differences = []
    for session, (my_turns, their_turns) in enumerate(zip(ours, theirs, strict=True)):
        counts["prompts"] += len(my_turns)
        for turn, (mine, said) in enumerate(zip(my_turns, their_turns, strict=True)):
            if mine == said.tokens:
                counts["equal"] += 1
                continue
            at = first_difference(mine, said.tokens)
            lead = said.leads[at] if at < len(said.leads) else None
            near = lead is not None and lead < ROUNDING
            counts["within rounding" if near else "different"] += 1
            differences.append(
                {"session": session, "turn": turn, "token": at, "lead_nats": lead,
                 "engine": mine, "reference": said.tokens}
            )  # fmt: skip
            counts["not compared"] += len(my_turns) - turn - 1
            break
    return {"setting": setting, "against": against, "counts": counts, "differences": differences}


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the index of the first token in which two different answers differ."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def answers_of(job: Job) -> list[Turns]:
    """Return the worker's answers to a job."""
    stops = Tokenizer(str(job.plan.engine_args["model_path"])).eos_ids
    engine, found = SglangEngine(job.plan.engine_args), []
    try:
        for prompts in job.sessions:
            # All sessions open alike. A prefix that the tree shares would be a node of its own,
            # which the reference does not have.
            engine.flush()
            past, answers = list[int](), Turns()
            for prompt in prompts:
                past += prompt
                answers.append(list(engine.generate(past, NEW_TOKENS, stops).output_ids))
                past += answers[-1]
            found.append(answers)
    finally:
        engine.close()
    return found


BENCHMARK = Benchmark("real.equality", __doc__, declare, run, out=RESULTS / "real-equality.json")
main = BENCHMARK.main

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].endswith(".json"):
        die_with_parent()
        answered = answers_of(Job.model_validate_json(Path(sys.argv[1]).read_text()))
        Path(sys.argv[2]).write_text(json.dumps(answered))
    else:
        sys.exit(main())
