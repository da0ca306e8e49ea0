"""Calibrate a model's heads: samples, scores, selection, verification, profile file.

    calibration samples ── prefill ──> scores ──> selection ──┐
    held-out samples ───── prefill ──> all, none, random ─────┴──> what the selection costs

A budget is judged on samples of its own, between the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import UsageError
from kvtier.heads.methods import Target, make_method
from kvtier.heads.model.config import model_name, model_shape, read_config, weights_revision
from kvtier.heads.model.loading import load_model
from kvtier.heads.model.support import check_supported
from kvtier.heads.probes.context import HeadProbe, ProbeBatch
from kvtier.heads.profile import HeadProfile
from kvtier.heads.progress import Progress, each, no_progress
from kvtier.heads.reference.session import DEFAULT_RULE
from kvtier.heads.samples.plan import synthetic_plan, users_plan
from kvtier.heads.samples.questions import CalibrationSample
from kvtier.heads.verify import Verification, verify
from kvtier.retention.locality import LocalityRule

DEFAULT_LENGTHS = (4096,)
DEFAULT_SAMPLES = 4


@dataclass(frozen=True)
class Calibrated:
    """A profile and what was measured of it, per group of held-out samples."""

    profile: HeadProfile
    verifications: tuple[Verification, ...]


def calibrate_heads(
    model_path: str,
    method: str,
    out: Path,
    *,
    target: Target,
    parameters: Mapping[str, Any] | None = None,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    samples: int = DEFAULT_SAMPLES,
    seed: int = 0,
    rule: LocalityRule = DEFAULT_RULE,
    samples_file: Path | None = None,
    progress: Progress = no_progress,
) -> Calibrated:
    """Find the CA heads of a local model, measure what they cost, and write the profile to `out`.

    parameters:    keyword arguments of the method's class
    lengths:       context lengths in tokens, `samples` contexts each; the cost is measured at each
    rule:          what a locality head keeps; the costs hold for this rule only
    samples_file:  the user's own samples (`kvtier.heads.samples.users`) instead of lengths, samples

    Raises UsageError, naming the argument, before anything heavy starts.
    """
    finder = make_method(method, **(parameters or {}))
    finder.check_target(target)
    if not out.parent.is_dir():
        raise UsageError("--out", "a file in an existing directory", str(out))
    config = read_config(model_path)
    check_supported(config)
    model_shape(config)
    if samples_file is not None:
        plan = users_plan(model_path, samples_file, rule)
    else:
        plan = synthetic_plan(model_path, lengths, samples, seed, rule)
    progress("loading the model", 0, 1)
    probe = HeadProbe(load_model(model_path), rule)
    progress("loading the model", 1, 1)

    judged = target.budget is not None
    chosen_on = plan.calibration[:1] if finder.data_free and not judged else plan.calibration
    batches = prepare(probe, chosen_on, progress)
    scores = finder.score(batches, progress)
    if judged and plan.judging:
        batches = prepare(probe, plan.judging, progress)
    ca_heads = finder.select(scores, batches, target, progress)
    # One group's KV is held at a time.
    del batches
    profile = HeadProfile(
        model=model_name(model_path),
        revision=weights_revision(model_path),
        shape=probe.shape,
        method=method,
        ca_heads=ca_heads,
        scores=scores.mean,
    )
    found = tuple(
        verify(prepare(probe, group, progress), profile, seed, progress) for group in plan.held_out
    )
    costs = tuple(cost for verification in found for cost in verification.costs())
    how = {
        **vars(finder),
        "share": target.share,
        "budget": target.budget,
        **plan.description,
        "seed": seed,
        "sink_tokens": rule.sink_tokens,
        "recent_tokens": rule.recent_tokens,
        "compensation": rule.compensation,
    }
    profile = profile.model_copy(update={"costs": costs, "parameters": how})
    profile.save(out)
    return Calibrated(profile, found)


def prepare(
    probe: HeadProbe, samples: Sequence[CalibrationSample], progress: Progress
) -> list[ProbeBatch]:
    """Prefill every sample's context."""
    return [probe.prepare(sample) for sample in each(samples, "prefilling contexts", progress)]
