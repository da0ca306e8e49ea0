"""The documents that parent and worker exchange: what goes into a run and what comes out.

The parent writes one `Plan` per policy; a worker process reads it, drives an engine and writes one
`RunResult`. Everything ends in one `Document`, which is what `--json` writes. All of them are
immutable and own their data; nothing here refers to a live engine.

Units are in the names. `ttft` is the time to the first token, `tpot` the time per output token
after the first one, (latency - ttft) / (n - 1), both as in `sglang.benchmark.serving`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvtier.environment import Environment
from kvtier.heads.profile import HeadProfile
from kvtier.synthetic.recall import ANSWER_TOKENS, PROMPT_TOKENS


class Frozen(BaseModel):
    """Base of all documents: immutable, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


ScriptName = Literal["recall", "text"]


class Workload(Frozen):
    """The sessions that are held with the engine; equal workloads are equal token for token.

    questions: questions per turn; the first continues the session, the others branch off after it
               and only measure recall
    script:    recall, the demo model's language, or text, English in the model's own tokens
    prompt_tokens, answer_tokens: of a turn, at most
    scores_nll: whether right answers are scored after the last turn
    """

    context_tokens: int = Field(ge=1)
    turns: int = Field(ge=1)
    sessions: int = Field(ge=1)
    questions: int = Field(ge=1)
    seed: int
    script: ScriptName = "recall"
    prompt_tokens: int = Field(PROMPT_TOKENS, ge=1)
    answer_tokens: int = Field(ANSWER_TOKENS, ge=1)
    scores_nll: bool = True

    @property
    def exchange_tokens(self) -> int:
        """A question and its answer, at most."""
        return self.prompt_tokens + self.answer_tokens


class Replay(Frozen):
    """A trace on this machine: its first requests, scaled.

    trace:        the file; block_tokens: what a block of 512 tokens becomes, lengths in proportion
    speed:        how many times as fast requests arrive
    spread_s:     agents' sessions begin up to so much later, as is drawn from the seed
    longest_tokens: of an input with its answer, scaled, as the means are
    conversations: requests that continue another are one with it
    slo_ttft_ms, slo_tpot_ms: a request that meets both counts as goodput
    """

    kind: Literal["trace"] = "trace"
    trace: str
    requests: int = Field(ge=1)
    block_tokens: int = Field(ge=1)
    speed: float = Field(gt=0)
    spread_s: float = 0.0
    seed: int
    script: ScriptName = "recall"
    duration_s: float
    mean_input_tokens: float
    mean_output_tokens: float
    longest_tokens: int
    conversations: int
    slo_ttft_ms: float
    slo_tpot_ms: float


class PoolSizes(Frozen):
    """Slots the engine is started with."""

    budget_bytes: int
    max_total_tokens: int
    sessions: float = Field(description="Sessions of this workload the budget holds.")


class Plan(Frozen):
    """Everything a worker needs to run one policy."""

    policy: str
    workload: Workload | Replay
    pools: PoolSizes
    engine_args: dict[str, Any] = Field(description="Keyword arguments of sglang.Engine.")
    environment: dict[str, str] = Field(description="KVTIER_* variables of the worker.")
    head_profile: HeadProfile | None = Field(None, description="None: nothing is ever dropped.")
    ca_share: float = Field(description="CA heads / all KV heads; 1 where nothing is dropped.")
    heads_compete: bool = Field(False, description="Whether budgets are adaptive.")


class TierReading(Frozen):
    """The traffic to and from the tier since the engine started.

    pending:         blobs and questions under way
    stored_bytes:    exact KV that was put
    restored_tokens: that came back instead of being computed
    refreshed_turns, refresh_s, refresh_wait_s: turns that chose their entries anew, how long that
                     took inside their prefill, and how long they waited for the exact KV
    refresh_moved_bytes: for all refreshes, from the tier
    missed:          refreshes that did not happen because the tier had not answered in time
    spill_s:         how long copying KV out held up the engine
    """

    pending: int = 0
    stored_bytes: int = 0
    restored_tokens: int = 0
    refreshed_turns: int = 0
    refresh_moved_bytes: int = 0
    refresh_s: float = 0.0
    refresh_wait_s: float = 0.0
    missed: int = 0
    spill_s: float = 0.0


class Occupancy(Frozen):
    """The state of the KV pool, as the engine reports it.

    evicted_tokens:  of cached context that made room for something else, so far
    tier:            None without one.
    """

    kv_used_bytes: int
    kv_peak_bytes: int = Field(description="Highest kv_used_bytes since the previous reading.")
    kv_capacity_bytes: int
    evicted_tokens: int = 0
    tier: TierReading | None = None


class RequestRecord(Frozen):
    """One request of a run. question 0 is the session's own line; the others are branches.

    history_tokens: of the prompt, what was said before this question
    recall: how much of the right answer was given (RunResult.recall_means says a share of what),
            None where nothing was to be known
    nll:    of the right answer, see RunResult
    """

    session: int
    turn: int
    question: int
    prompt_tokens: int
    history_tokens: int
    cached_tokens: int
    output_ids: tuple[int, ...]
    ttft_ms: float
    latency_ms: float
    recall: float | None
    nll: float | None = None
    occupancy: Occupancy | None = None


class TurnResult(Frozen):
    """One turn over all sessions: medians of the main-line requests, recall over all questions.

    turn counts from 1. kv_device_bytes is the pool occupancy measured after the turn.
    resident_sessions: sessions whose history was still cached when this turn began (at least 90%
    of it); None for the first turn, which has no history.
    nll: see RunResult; None where no question of the turn was scored.
    """

    turn: int
    prompt_tokens: int
    cached_tokens: int
    ttft_ms: float
    p99_ttft_ms: float
    tpot_ms: float
    kv_device_bytes: int
    kv_peak_bytes: int
    recall: float | None
    scored_questions: int
    nll: float | None = None
    nll_questions: int = 0
    resident_sessions: int | None = None


class Summary(Frozen):
    """Latencies over the follow-up turns (2 … n; the only turn where there is just one)."""

    median_ttft_ms: float
    p99_ttft_ms: float
    median_tpot_ms: float
    kv_device_bytes: int = Field(description="Median over the turns of the measured occupancy.")
    kv_peak_bytes: int
    recall: float | None
    nll: float | None = None
    resident_sessions: int | None = Field(
        None, description="Sessions found resident after the last turn, most recent first."
    )


class EngineRun(Frozen):
    """The result of every run, whatever its workload. wall_s: of the workload, without loading."""

    policy: str
    ca_share: float
    heads_compete: bool = False
    pools: PoolSizes
    kv_capacity_bytes: int
    load_s: float
    wall_s: float
    device: str
    tier: TierReading | None = None


class RunResult(EngineRun):
    """One policy, measured.

    recall_means: what recall is a share of
    nll, in turns and requests: negative log-likelihood of the right answer, nats per token, each
    token given the right ones before it, by the policy's own cache as the turns left it. It is
    asked
    after the last turn, so that no time and no memory above contains it. The first turn's own
    question has none, because it is answered before anything is dropped; nor has one where a
    session's history was no longer cached.
    """

    recall_means: str
    turns: tuple[TurnResult, ...]
    summary: Summary
    requests: tuple[RequestRecord, ...]


class RunFailure(Frozen):
    """A policy whose worker did not finish. exit_code is negative for a signal."""

    policy: str
    exit_code: int
    log_tail: tuple[str, ...]


class Ratios(Frozen):
    """`policy` against `baseline`, in the direction in which bigger is better.

    Bytes, times and NLL are baseline / policy, recall and resident sessions policy / baseline.
    None where the baseline has nothing to compare.
    """

    baseline: str
    policy: str
    kv_device_bytes: float | None
    kv_peak_bytes: float | None
    median_ttft_ms: float | None
    first_ttft_ms: float | None
    median_tpot_ms: float | None
    recall: float | None
    nll: float | None = None
    resident_sessions: float | None = None


class DocumentBase(Frozen):
    """The part that all outcomes have, whatever their workload.

    notes: what a reader has to know before reading the numbers, such as that no head profile was
           there
    """

    schema_version: Literal[1] = 1
    started_at: str
    command: tuple[str, ...]
    environment: Environment
    model: dict[str, Any]
    settings: dict[str, Any]
    failures: tuple[RunFailure, ...] = ()
    notes: tuple[str, ...] = ()


class Document(DocumentBase):
    """The whole outcome. ratios is None where there is no pair to compare."""

    workload: Workload
    runs: tuple[RunResult, ...]
    ratios: Ratios | None
    comparisons: tuple[Ratios, ...] = ()
