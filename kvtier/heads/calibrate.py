"""Calibrate a model's heads: samples, scores, selection, verification, profile file.

Several methods run on the same samples, whose contexts are prefilled once:

    calibration samples ── prefill ──> method 1, method 2, … ──> one selection each
    held-out samples ───── prefill ──> full, random, no heads, selection 1, selection 2, …
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.errors import UsageError
from kvtier.heads.entries import Entry, make_entry
from kvtier.heads.methods import HeadScores, Selection, Target
from kvtier.heads.methods.ranking import heads_by_layer
from kvtier.heads.model.config import (
    model_name,
    model_shape,
    read_config,
    weights_revision,
)
from kvtier.heads.model.loading import load_model
from kvtier.heads.model.support import check_supported
from kvtier.heads.probes.context import HeadProbe, ProbeBatch
from kvtier.heads.profile import Head, HeadProfile
from kvtier.heads.progress import Progress, no_progress
from kvtier.heads.reference.session import DEFAULT_RULE
from kvtier.heads.samples.plan import SamplePlan, synthetic_plan, users_plan
from kvtier.heads.samples.questions import CalibrationSample
from kvtier.heads.verify import Verification, verify_all
from kvtier.retention.locality import LocalityRule

DEFAULT_LENGTHS = (4096,)
DEFAULT_SAMPLES = 4
CURVE_SHARES = (0.75, 0.5, 0.33, 0.25, 0.15, 0.1)


@dataclass(frozen=True)
class Calibrated:
    """A profile and what was measured of it, per group of held-out samples.

    label:    the method as it was asked for
    seconds:  scoring and selecting, without prefilling the samples
    """

    profile: HeadProfile
    verifications: tuple[Verification, ...]
    label: str
    seconds: float


class Choice(NamedTuple):
    """A selection and the seconds it took."""

    selection: Selection
    seconds: float


class CurvePoint(NamedTuple):
    """So many CA heads, and what was measured of them, per group of held-out samples."""

    num_heads: int
    verifications: tuple[Verification, ...]


@dataclass(frozen=True)
class CalibrationRun:
    """Methods run on the same samples, and what they shared.

    prefill_seconds:  all contexts, calibration and held out
    description:      samples, seed and rule, as the profiles' parameters carry them
    curve:            what other shares of the first method would cost, most heads first; one
                      measurement per group of held-out samples each; empty when not asked for
    """

    results: tuple[Calibrated, ...]
    prefill_seconds: float
    description: dict[str, Any]
    curve: tuple[CurvePoint, ...]


def calibrate_heads(
    model_path: str,
    method: str,
    out: Path,
    *,
    target: Target,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    samples: int = DEFAULT_SAMPLES,
    seed: int = 0,
    rule: LocalityRule = DEFAULT_RULE,
    samples_file: Path | None = None,
    progress: Progress = no_progress,
) -> Calibrated:
    """Find the CA heads of a local model, measure what they cost, and write the profile to `out`.

    lengths:       context lengths in tokens, `samples` contexts each; the cost is measured at each
    rule:          what a locality head keeps; the costs hold for this rule only
    samples_file:  the user's own samples (`kvtier.heads.samples.users`) instead of lengths, samples

    Raises UsageError, naming the argument, before anything heavy starts.
    """
    run = run_methods(
        model_path, [make_entry(method, target)], out,
        lengths=lengths, samples=samples, seed=seed, rule=rule, samples_file=samples_file,
        progress=progress,
    )  # fmt: skip
    return run.results[0]


def run_methods(
    model_path: str,
    entries: Sequence[Entry],
    out: Path | None = None,
    *,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    samples: int = DEFAULT_SAMPLES,
    seed: int = 0,
    rule: LocalityRule = DEFAULT_RULE,
    samples_file: Path | None = None,
    curve: bool = False,
    progress: Progress = no_progress,
) -> CalibrationRun:
    """Run every entry on the same samples; the first one's profile goes to `out`, if given.

    curve:  measure CURVE_SHARES of the first entry's heads as well

    Other arguments and errors as in `calibrate_heads`.
    """
    if out is not None and not out.parent.is_dir():
        raise UsageError("--out", "a file in an existing directory", str(out))
    check_model(model_path, entries)
    if samples_file is not None:
        plan = users_plan(model_path, samples_file, rule)
    else:
        plan = synthetic_plan(model_path, lengths, samples, seed, rule)
    progress("loading the model", 0, 1)
    probe = HeadProbe(load_model(model_path), rule)
    progress("loading the model", 1, 1)

    clock = _Clock()
    chosen = choose_all(entries, probe, plan, progress, clock)
    profiles = _profiles(model_path, probe, entries, [choice.selection for choice in chosen])
    points = curve_profiles(profiles[0], chosen[0].selection.order) if curve else []
    measured = measure_all(probe, plan, [*profiles, *points], seed, progress, clock)
    shares = tuple(
        CurvePoint(point.num_ca_heads, found)
        for point, found in zip(points, measured[len(profiles) :], strict=True)
    )
    description = {
        **plan.description,
        "seed": seed,
        "sink_tokens": rule.sink_tokens,
        "recent_tokens": rule.recent_tokens,
        "compensation": rule.compensation,
    }
    results = tuple(
        _finished(entry, choice, profile, found, description)
        for entry, choice, profile, found in zip(
            entries, chosen, profiles, measured[: len(profiles)], strict=True
        )
    )
    if out is not None:
        results[0].profile.save(out)
    return CalibrationRun(results, clock.seconds, description, shares)


def curve_profiles(profile: HeadProfile, order: Sequence[Head]) -> list[HeadProfile]:
    """Profiles with CURVE_SHARES of the heads, the first of an order; most heads first."""
    counts = sorted({max(1, round(share * len(order))) for share in CURVE_SHARES}, reverse=True)
    layers = profile.shape.num_layers
    return [
        profile.model_copy(update={"ca_heads": heads_by_layer(order[:count], layers)})
        for count in counts
    ]


class _Clock:
    """Adds up the time spent inside it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._since


def _profiles(
    model_path: str, probe: HeadProbe, entries: Sequence[Entry], chosen: Sequence[Selection]
) -> list[HeadProfile]:
    """The profiles as far as they are known before they are measured."""
    model, revision = model_name(model_path), weights_revision(model_path)
    return [
        HeadProfile(
            model=model,
            revision=revision,
            shape=probe.shape,
            method=entry.method.name,
            ca_heads=selection.ca_heads,
            scores=selection.scores,
        )
        for entry, selection in zip(entries, chosen, strict=True)
    ]


def _finished(
    entry: Entry, choice: Choice, profile: HeadProfile, found: tuple[Verification, ...],
    description: dict[str, Any],
) -> Calibrated:  # fmt: skip
    """The profile with its measured costs and everything that led to it."""
    parameters = {
        **choice.selection.parameters,
        "share": entry.target.share,
        "budget": entry.target.budget,
        **description,
        "control": [verification.control() for verification in found],
    }
    costs = tuple(cost for verification in found for cost in verification.costs())
    profile = profile.model_copy(update={"costs": costs, "parameters": parameters})
    return Calibrated(profile, found, entry.label, choice.seconds)


def choose_all(
    entries: Sequence[Entry], probe: HeadProbe, plan: SamplePlan, progress: Progress, clock: _Clock
) -> list[Choice]:
    """What each entry chooses; the samples' KV is freed on return.

    Entries of one method share their scores, whose seconds count for each of them.
    """
    samples, judging = plan.calibration, plan.judging
    budgets = any(entry.target.budget is not None for entry in entries)
    read = budgets or any(not entry.method.data_free for entry in entries)
    with clock:
        batches = prepare(probe, samples if read else samples[:1], progress)
        judges = prepare(probe, judging, progress) if budgets and judging else batches
    found: dict[str, tuple[HeadScores, float]] = {}
    chosen = []
    for entry in entries:
        method, own = entry.method, _Clock()
        if method.name not in found:
            scoring = _Clock()
            with scoring:
                scores = method.score(batches, progress)
            found[method.name] = scores, scoring.seconds
        scores, seconds = found[method.name]
        judged_on = batches if entry.target.budget is None else judges
        with own:
            selection = method.select(scores, judged_on, entry.target, progress)
        chosen.append(Choice(selection, seconds + own.seconds))
        # No method profits from what the one before it has already computed.
        for batch in (*batches, *judges):
            batch.forget()
    return chosen


def measure_all(
    probe: HeadProbe, plan: SamplePlan, profiles: Sequence[HeadProfile], seed: int,
    progress: Progress, clock: _Clock,
) -> list[tuple[Verification, ...]]:  # fmt: skip
    """What every profile costs on each held-out group; one group's KV is held at a time."""
    groups = []
    for samples in plan.held_out:
        with clock:
            batches = prepare(probe, samples, progress)
        groups.append(verify_all(batches, profiles, seed, progress=progress))
        del batches
    return list(zip(*groups, strict=True))


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


def check_model(model_path: str, entries: Sequence[Entry] = ()) -> None:
    """Raise UnsupportedModelError for what cannot be calibrated, or what a method raises."""
    config = read_config(model_path)
    check_supported(config)
    shape = model_shape(config)
    for entry in entries:
        entry.method.check_shape(shape)
