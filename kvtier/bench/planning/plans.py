"""The plans of a bench, made from its options: which model, which words, which head profile, how
many slots.

No engine, and no torch but for a scorer's arithmetic; a text's tokenizer is loaded to measure it,
unless it is a dry run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvtier.bench import workload as work
from kvtier.bench.options import Options
from kvtier.bench.planning.model import Model, find_model, script_name
from kvtier.bench.planning.pools import check_longest, pool_sizes, session_shape
from kvtier.bench.planning.profiles import ADAPTIVE, calibrated, find_curve, find_profile
from kvtier.bench.policies import Policy
from kvtier.bench.schema import Plan, PoolSizes, Replay, Workload
from kvtier.config import Settings
from kvtier.errors import SizeError
from kvtier.heads.profile import HeadProfile
from kvtier.pool_sizing import SessionShape, entry_votes, slot_bytes
from kvtier.sizes import format_size
from kvtier.synthetic.script import Lengths

MAX_RUNNING_REQUESTS = 8
# The lengths of a text's turns that a dry run assumes, because it does not load the tokenizer.
ASSUMED_TEXT = Lengths(prompt=64, answer=16)


@dataclass(frozen=True)
class PolicyPlan:
    """A policy with its arithmetic; `plan` is what the worker gets.

    settings: the bench's, with the model's calibration; policies may change some
    """

    policy: Policy
    settings: Settings
    profile: HeadProfile
    profile_note: str
    slot_bytes: int
    session: SessionShape
    plan: Plan

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes that a reader has to know before this policy's numbers."""
        if not self.policy.needs_profile or self.profile.ca_share < 1:
            return ()
        if self.profile_note == ADAPTIVE:
            return ()
        return (
            f"{self.policy.name} drops no KV of any head (head profile: {self.profile_note}). "
            "Where its numbers differ from full KV's, that is no saving by heads.",
        )

    @property
    def session_bytes(self) -> int:
        """Predicted device bytes of one resting session."""
        return self.slot_bytes * self.session.resting_tokens

    @property
    def prefill_bytes(self) -> int:
        """Predicted device bytes of one session while its context is prefilled."""
        return self.slot_bytes * self.session.total_tokens


def make_plans(options: Options) -> tuple[Model, list[PolicyPlan]]:
    """The model and one plan per policy. Raises UsageError or HeadProfileError."""
    model = find_model(options)
    options = replace(
        options, workload=find_workload(options, model), settings=calibrated(options, model)
    )
    check_length(options, model)
    given, note = find_profile(options, model)
    return model, [_plan(options, model, policy, given, note) for policy in options.policies]


def find_workload(options: Options, model: Model) -> Workload | Replay:
    """The workload in the words that fit the model, with the lengths of its turns.

    Raises UsageError for a model whose tokenizer cannot write it, SizeError for a context that is
    too short for it.
    """
    asked = options.workload
    name = script_name(options, model)
    if isinstance(asked, Replay):
        return asked.model_copy(update={"script": name})
    if name == "text" and options.dry_run:
        lengths = ASSUMED_TEXT
    else:
        script = work.open_script(name, str(model.path))
        lengths = script.lengths
        script.check_context(asked.context_tokens)
    return asked.model_copy(
        update={
            "script": name,
            "prompt_tokens": lengths.prompt,
            "answer_tokens": lengths.answer,
            # Scoring would evict sessions under a budget.
            "scores_nll": options.budget is None,
        }
    )


def check_length(options: Options, model: Model) -> None:
    """Raise SizeError unless context, turns and answers fit the model's positions."""
    asked = options.workload
    if isinstance(asked, Replay):
        if asked.longest_tokens > model.max_positions:
            wanted = f"a scale at which {asked.longest_tokens} tokens of the longest request fit "
            wanted += f"the model's {model.max_positions} positions"
            raise SizeError("--block-tokens", wanted, asked.block_tokens)
        return
    needed = work.longest_prompt(asked)
    if needed > model.max_positions:
        room = model.max_positions - (needed - asked.context_tokens)
        raise SizeError(
            "--len",
            f"at most {max(room, 0)} tokens, so that context and turns fit the model's "
            f"{model.max_positions} positions",
            format_size(asked.context_tokens),
        )


def _plan(
    options: Options, model: Model, policy: Policy, given: HeadProfile | None, note: str
) -> PolicyPlan:
    profile = policy.profile(model.shape, given)
    width = None
    if policy.compacts and options.settings.compacts:
        # Scorers need torch, which other plans do without.
        from kvtier.retention.rules import state_width

        width = state_width(options.settings)
    competes = policy.compacts and options.settings.competes
    votes = None
    if policy.splits_heads and (width is not None or profile.ca_share < 1):
        votes = entry_votes(options.settings, model.shape, profile.ca_share)
    per_slot = slot_bytes(model.shape, model.kv_bytes(policy), state_width=width, votes=votes)
    session = session_shape(options, policy, profile, model)
    token_bytes = slot_bytes(model.shape, model.kv_bytes())
    pools = pool_sizes(options.budget, policy, per_slot, session, token_bytes)
    check_longest(options, policy, pools)
    plan = Plan(
        policy=policy.name,
        workload=options.workload,
        pools=pools,
        engine_args=engine_args(options, model, policy, pools),
        environment=worker_environment(options, model, policy),
        head_profile=profile if policy.splits_heads and not competes else None,
        ca_share=profile.ca_share,
        heads_compete=competes,
    )
    return PolicyPlan(
        policy=policy,
        settings=options.settings,
        profile=profile,
        profile_note=note if policy.needs_profile else "",
        slot_bytes=per_slot,
        session=session,
        plan=plan,
    )


def engine_args(options: Options, model: Model, policy: Policy, pools: PoolSizes) -> dict[str, Any]:
    """Keyword arguments of sglang.Engine; equal for all policies but for the backends."""
    args: dict[str, Any] = {
        "model_path": str(model.path.resolve()),
        "device": model.device,
        "dtype": model.dtype,
        "chunked_prefill_size": options.chunk_tokens,
        "max_total_tokens": pools.max_total_tokens,
        "max_running_requests": MAX_RUNNING_REQUESTS,
        "random_seed": options.workload.seed,
        "grammar_backend": "none",
        "skip_server_warmup": True,
        # At this level SGLang logs every chunk of a prefill that it computes (progress.py).
        "log_level": "info",
    }
    if model.device == "cpu":
        args |= {"disable_cuda_graph": True, "attention_backend": "torch_native"}
        # Launching a pass on a CPU returns when the pass has ended. SGLang's overlapping would then
        # send every token only after the next pass, which under traffic is another prompt's.
        args["disable_overlap_schedule"] = True
    kv_dtype = policy.kv_dtype or model.kv_dtype
    if kv_dtype != model.dtype:
        args["kv_cache_dtype"] = kv_dtype
    if policy.kvtier_attention:
        args["attention_backend"] = "kvtier"
    if policy.splits_heads:
        args["radix_cache_backend"] = "kvtier"
    return args


def worker_environment(options: Options, model: Model, policy: Policy) -> dict[str, str]:
    """The worker's KVTIER_* variables; the head profile is added where its file is written. Beside
    a policy that is named for its tier, others have none."""
    settings = options.settings
    if not policy.compacts:
        settings = settings.keeping_everything()
    elif not policy.has_tier and any(one.has_tier for one in options.policies):
        settings = settings.model_copy(
            update={"tier": settings.tier.model_copy(update={"address": None})}
        )
    settings = settings.model_copy(
        update={
            "head_profile": None,
            "curve": find_curve(settings, model),
            "force_cpu": options.settings.force_cpu or options.device == "cpu",
        }
    )
    return settings.to_env()
