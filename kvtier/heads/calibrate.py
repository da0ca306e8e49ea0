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
from kvtier.heads.methods import HeadMethod, Selection, Target, make_method
from kvtier.heads.model.config import model_name, model_shape, read_config, weights_revision
from kvtier.heads.model.loading import load_model
from kvtier.heads.model.support import check_supported
from kvtier.heads.probes.context import HeadProbe, ProbeBatch
from kvtier.heads.profile import HeadProfile
from kvtier.heads.progress import Progress, no_progress
from kvtier.heads.reference.session import DEFAULT_RULE
from kvtier.heads.samples.plan import SamplePlan, synthetic_plan, users_plan
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
    check_model(model_path)
    if samples_file is not None:
        plan = users_plan(model_path, samples_file, rule)
    else:
        plan = synthetic_plan(model_path, lengths, samples, seed, rule)
    progress("loading the model", 0, 1)
    probe = HeadProbe(load_model(model_path), rule)
    progress("loading the model", 1, 1)

    selection = _selected(finder, probe, plan, target, progress)
    profile = HeadProfile(
        model=model_name(model_path),
        revision=weights_revision(model_path),
        shape=probe.shape,
        method=method,
        ca_heads=selection.ca_heads,
        scores=selection.scores,
    )
    # One group's KV is held at a time.
    found = tuple(
        verify(prepare(probe, group, progress), profile, seed, progress) for group in plan.held_out
    )
    costs = tuple(cost for verification in found for cost in verification.costs())
    how = {
        **selection.parameters,
        "share": target.share,
        "budget": target.budget,
        **plan.description,
        "seed": seed,
        "sink_tokens": rule.sink_tokens,
        "recent_tokens": rule.recent_tokens,
        "compensation": rule.compensation,
        "control": [verification.control() for verification in found],
    }
    profile = profile.model_copy(update={"costs": costs, "parameters": how})
    profile.save(out)
    return Calibrated(profile, found)


def _selected(
    method: HeadMethod, probe: HeadProbe, plan: SamplePlan, target: Target, progress: Progress
) -> Selection:
    """Return the heads that the method chooses; the samples' KV is freed on return."""
    is_judged = target.budget is not None
    reads_one = method.data_free and not is_judged
    batches = prepare(probe, plan.calibration[:1] if reads_one else plan.calibration, progress)
    judges = prepare(probe, plan.judging, progress) if is_judged and plan.judging else batches
    return method.select(method.score(batches, progress), judges, target, progress)


def prepare(
    probe: HeadProbe, samples: Sequence[CalibrationSample], progress: Progress
) -> list[ProbeBatch]:
    """Prefill every sample's context."""
    batches = []
    for done, sample in enumerate(samples):
        progress("prefilling contexts", done, len(samples))
        batches.append(probe.prepare(sample))
    progress("prefilling contexts", len(samples), len(samples))
    return batches


def check_model(model_path: str) -> None:
    """Raise UnsupportedModelError for what cannot be calibrated."""
    config = read_config(model_path)
    check_supported(config)
    model_shape(config)
