"""From options to plans: which model, which head profile, how many slots. No torch, no engine.

Memory arithmetic, in slots per class (bytes of a slot are summed over the layers):

    stock, full     budget // bytes per token                     one pool
    kvtier, window  kvtier.pool_sizing.plan_pools(budget)     CA slots + locality slots

Without a budget each policy gets what one session needs, so nothing is ever evicted.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtier.bench import workload as work
from kvtier.bench.options import Budget, Options
from kvtier.bench.policies import Policy
from kvtier.bench.schema import Plan, PoolSizes
from kvtier.config import Settings
from kvtier.errors import BudgetError, HeadProfileError, SizeError, UsageError
from kvtier.heads.model_config import (
    check_splittable,
    context_length,
    model_shape,
    read_config,
    weights_revision,
)
from kvtier.heads.profile import HeadProfile, ModelShape, load_profile
from kvtier.pool_sizing import (
    SessionShape,
    SlotBytes,
    locality_slots_for,
    plan_pools,
    session_bytes,
    slot_bytes,
)
from kvtier.sizes import format_size
from kvtier.synthetic.recall import DEFAULT_LANGUAGE, PROMPT_TOKENS

DEMO_MODEL = Path("models/kvtier-demo")
PROFILE_FILE, CURVE_FILE = "head_profile.json", "curve.json"
# The engine keeps a few tokens of its pool free for itself.
ADMISSION_TOKENS = 64
# Room beyond one session where no budget is set: nothing may be evicted while it is measured.
SLACK_TOKENS = 1024
MAX_RUNNING_REQUESTS = 8
# What a dry run assumes for a model that has not been calibrated yet.
ASSUMED_CA_SHARE = 0.25
# Of an NVIDIA driver; a container may show the second only.
_NVIDIA_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl")
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Model:
    """What the bench knows of the model, from files alone."""

    path: Path
    shape: ModelShape
    max_positions: int
    device: str
    dtype: str

    @property
    def dtype_bytes(self) -> int:
        return _DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class PolicyPlan:
    """A policy with its arithmetic; `plan` is what the worker gets."""

    policy: Policy
    profile: HeadProfile
    profile_note: str
    slots: SlotBytes
    session: SessionShape
    plan: Plan

    @property
    def session_bytes(self) -> int:
        """Predicted device bytes of one resting session."""
        return session_bytes(self.slots, self.session)

    @property
    def prefill_bytes(self) -> int:
        """Predicted device bytes of one session while its context is prefilled."""
        locality = max(self.session.prefill_tokens, self.session.locality_slots)
        return self.slots.ca * self.session.total_tokens + self.slots.locality * locality


def make_plans(options: Options) -> tuple[Model, list[PolicyPlan]]:
    """The model and one plan per policy. Raises UsageError or HeadProfileError."""
    model = find_model(options)
    check_length(options, model)
    given, note = find_profile(options, model)
    return model, [_plan(options, model, policy, given, note) for policy in options.policies]


def find_model(options: Options) -> Model:
    """The model directory, checked for everything that can be told from its files."""
    path = options.model_path or _demo_model()
    config = read_config(str(path))
    check_splittable(config)
    has_weights = any(path.glob("*.safetensors")) or any(path.glob("*.bin"))
    if not options.dry_run and not has_weights:
        raise UsageError("--model-path", "a directory with model weights", str(path))
    vocab_size = int(config.get("vocab_size") or 0)
    if vocab_size < DEFAULT_LANGUAGE.vocab_size:
        wanted = f"a model with a vocabulary of at least {DEFAULT_LANGUAGE.vocab_size} tokens"
        raise UsageError("--model-path", wanted, vocab_size)
    device = options.device or ("cuda" if _has_cuda() else "cpu")
    dtype = options.dtype or _default_dtype(device, config)
    return Model(path, model_shape(config), context_length(config), device, dtype)


def _demo_model() -> Path:
    beside_package = Path(__file__).resolve().parents[2] / DEMO_MODEL
    for path in (DEMO_MODEL, beside_package):
        if (path / "config.json").is_file():
            return path
    expected = f"a model directory; the demo model ({DEMO_MODEL}) is part of a source checkout"
    raise UsageError("--model-path", expected, str(beside_package))


def _has_cuda() -> bool:
    """Whether an NVIDIA driver is there and not hidden, without importing torch."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(Path(one).exists() for one in _NVIDIA_FILES)


def _default_dtype(device: str, config: dict[str, Any]) -> str:
    """float32 on CPU, where it is exact and no slower; on CUDA the model's own 16 bits."""
    if device == "cpu":
        return "float32"
    own = config.get("torch_dtype") or config.get("dtype")
    return "float16" if own == "float16" else "bfloat16"


def check_length(options: Options, model: Model) -> None:
    """Raise SizeError unless context, turns and answers fit the model's positions."""
    needed = work.longest_prompt(options.workload)
    if needed > model.max_positions:
        room = model.max_positions - (needed - options.workload.context_tokens)
        raise SizeError(
            "--len",
            f"at most {max(room, 0)} tokens, so that context and turns fit the model's "
            f"{model.max_positions} positions",
            format_size(options.workload.context_tokens),
        )


def find_profile(options: Options, model: Model) -> tuple[HeadProfile | None, str]:
    """The user's head profile and where it is from; None where no policy needs one."""
    if not any(policy.needs_profile for policy in options.policies):
        return None, ""
    path = options.settings.head_profile or model.path / PROFILE_FILE
    if options.settings.head_profile is None and not path.is_file():
        if options.dry_run:
            return _assumed_profile(model), f"assumed: {ASSUMED_CA_SHARE:.0%} CA heads"
        raise HeadProfileError(
            f"--head-profile: expected a head profile file, and {path} does not exist; "
            "make one with `kvtier calibrate heads`"
        )
    profile = load_profile(path)
    revision = None if profile.revision is None else weights_revision(str(model.path))
    profile.check_fits(model.shape, revision)
    return profile, str(path)


def _assumed_profile(model: Model) -> HeadProfile:
    """The assumed share of CA heads, spread evenly over the layers."""
    shape = model.shape
    total = shape.num_layers * shape.num_kv_heads
    chosen = {int((i + 0.5) / ASSUMED_CA_SHARE) for i in range(round(total * ASSUMED_CA_SHARE))}
    layers = tuple(
        tuple(h for h in range(shape.num_kv_heads) if layer * shape.num_kv_heads + h in chosen)
        for layer in range(shape.num_layers)
    )
    return HeadProfile(model=str(model.path), shape=shape, method="assumed", ca_heads=layers)


def _plan(
    options: Options, model: Model, policy: Policy, given: HeadProfile | None, note: str
) -> PolicyPlan:
    profile = policy.profile(model.shape, given)
    width = None
    if policy.compacts and options.settings.compacts:
        # Scorers need torch, which other plans do without.
        from kvtier.retention.rules import state_width

        width = state_width(options.settings)
    slots = slot_bytes(profile, model.dtype_bytes, state_width=width)
    session = session_shape(options, policy)
    pools = pool_sizes(options.budget, policy, slots, session)
    plan = Plan(
        policy=policy.name,
        workload=options.workload,
        pools=pools,
        engine_args=engine_args(options, model, policy, pools),
        environment=worker_environment(options, model, policy, session, pools),
        head_profile=profile if policy.splits_heads else None,
        ca_share=profile.ca_share,
    )
    return PolicyPlan(policy, profile, note if policy.needs_profile else "", slots, session, plan)


def session_shape(options: Options, policy: Policy) -> SessionShape:
    """What one session of the workload asks of the pools under a policy."""
    settings, context = options.settings, options.workload.context_tokens
    kept = settings.locality.kept_tokens
    total = context + work.turn_tokens(options.workload) + ADMISSION_TOKENS
    if not policy.splits_heads:
        return SessionShape(context, total - context, kept_tokens=context, prefill_tokens=0)
    held = context if settings.prefill == "exact" else min(context, options.chunk_tokens + kept)
    prefill = held + PROMPT_TOKENS
    return SessionShape(
        context,
        total - context,
        kept_tokens=kept + 1,
        prefill_tokens=prefill,
        retention=settings.expected_retention if policy.compacts else 1.0,
    )


def pool_sizes(
    budget: Budget | None, policy: Policy, slots: SlotBytes, session: SessionShape
) -> PoolSizes:
    """Slots for a policy. Raises BudgetError naming the budget's flag when no session fits."""
    if budget is None:
        return _room_for_one(policy, slots, session)
    if budget.num_bytes is not None:
        num_bytes = budget.num_bytes
    else:
        assert budget.full_sessions is not None, "a budget is either bytes or sessions"
        num_bytes = int(budget.full_sessions * slots.full * session.total_tokens)
    try:
        return _cut(num_bytes, policy, slots, session)
    except BudgetError as error:
        raise BudgetError(
            budget.argument, f"{error.expected} under policy {policy.name}", error.got
        ) from error


def _room_for_one(policy: Policy, slots: SlotBytes, session: SessionShape) -> PoolSizes:
    """What one session needs from its prefill to its last turn, and some slack."""
    roomy = replace(session, turn_tokens=session.turn_tokens + SLACK_TOKENS)
    tokens = roomy.total_tokens
    locality = locality_slots_for(tokens, roomy) if policy.splits_heads else None
    split_bytes = tokens * slots.ca + (locality or 0) * slots.locality
    return PoolSizes(
        budget_bytes=tokens * slots.full if locality is None else split_bytes,
        max_total_tokens=tokens,
        locality_slots=locality,
        sessions=1.0,
    )


def _cut(budget_bytes: int, policy: Policy, slots: SlotBytes, session: SessionShape) -> PoolSizes:
    if policy.splits_heads:
        pools = plan_pools(budget_bytes, slots, session)
        return PoolSizes(
            budget_bytes=budget_bytes,
            max_total_tokens=pools.ca_slots,
            locality_slots=pools.locality_slots,
            sessions=pools.sessions,
        )
    tokens = budget_bytes // slots.full
    if tokens < session.total_tokens:
        needed = session.total_tokens * slots.full
        raise BudgetError("KV budget", f"at least {needed} bytes for one session", budget_bytes)
    return PoolSizes(
        budget_bytes=budget_bytes,
        max_total_tokens=tokens,
        sessions=tokens / session.total_tokens,
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
        # Says of every chunk of a prefill that it is computed (prefill_log.py).
        "log_level": "info",
    }
    if model.device == "cpu":
        args |= {"disable_cuda_graph": True, "attention_backend": "torch_native"}
    if policy.kvtier_attention:
        args["attention_backend"] = "kvtier"
    if policy.splits_heads:
        args["radix_cache_backend"] = "kvtier"
    return args


def worker_environment(
    options: Options, model: Model, policy: Policy, session: SessionShape, pools: PoolSizes
) -> dict[str, str]:
    """The worker's KVTIER_* variables; the head profile is added where its file is written."""
    settings = options.settings
    if not policy.compacts:
        settings = settings.keeping_everything()
    expected = {"tokens": session.context_tokens, "turn_tokens": session.turn_tokens}
    settings = settings.model_copy(
        update={
            "head_profile": None,
            "curve": find_curve(settings, model),
            "locality": settings.locality.model_copy(update={"slots": pools.locality_slots}),
            "session": settings.session.model_copy(update=expected),
            "force_cpu": options.settings.force_cpu or options.device == "cpu",
        }
    )
    return settings.to_env()


def find_curve(settings: Settings, model: Model) -> Path | None:
    """The curve file for a quality target: the user's, or the model's; None leaves the store's."""
    if settings.quality is None or settings.curve is not None:
        return settings.curve
    path = model.path / CURVE_FILE
    return path.resolve() if path.is_file() else None
