"""Calibrating a model: its head profile, its curve, both in the store.

    samples ──> heads (kvtier.heads.calibrate) ──> profile ──┐
            ──> measure kept shares under that profile ──────┴─> fit ──> curve ──> store

Every server of the model picks both up; a curve without a restart. A curve learns how much a text
of a given NLL can lose, so its contexts go from filler that hides little to text where every word
counts. The recall language does so by how many facts a context holds; other models get the real
text of `kvtier.heads.samples`, or the user's own, which is always the better sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kvtier.calibration.curves import Measurement
from kvtier.calibration.documents import CurveDocument, document_of_fit
from kvtier.calibration.kept_shares import ANSWER_FLOOR_NATS, Budgets, measure_curve
from kvtier.calibration.keys import policy_digest
from kvtier.config import Settings
from kvtier.errors import UsageError
from kvtier.heads.model.config import model_name, model_shape, read_config, weights_revision
from kvtier.heads.model.loading import load_model
from kvtier.heads.profile import HeadProfile
from kvtier.heads.progress import Progress, no_progress
from kvtier.heads.samples.plan import check_lengths, users_plan
from kvtier.heads.samples.questions import CalibrationSample
from kvtier.heads.samples.synthetic import make_samples, session_sample, speaks_recall, tasks_for
from kvtier.retention.rules import locality_rule, scorer_of
from kvtier.synthetic.recall import FACT_TOKENS, MAX_FACTS, make_session
from kvtier.tier.blobs.payload import DTYPE_BYTES

# Facts fill at most this share of a context: the language needs filler between its facts.
DENSEST = 0.7
FEWEST_FACTS = 4
QUESTIONS = 64
STREAM = 2


def curve_samples(
    model_path: str,
    lengths: Sequence[int],
    count: int,
    seed: int,
    tasks: Sequence[str] | None = None,
) -> list[CalibrationSample]:
    """`count` contexts per length; equal arguments give equal samples. tasks: of real text; None
    for all.

    Raises UsageError for a count below 1 and SizeError for contexts that hold no fact.
    """
    if not speaks_recall(model_path):
        known = tasks_for(model_path)
        return make_samples(known.make, tasks or known.measuring, count, lengths, seed, STREAM)
    if count < 1:
        raise UsageError("--samples", "at least 1", count)
    samples = []
    for length in lengths:
        most = min(MAX_FACTS, int(DENSEST * length / FACT_TOKENS))
        for index in range(count):
            rng = np.random.default_rng([seed, STREAM, length, index])
            # Even in the share that facts fill, jittered, so that no density is favoured.
            facts = max(FEWEST_FACTS, round((index + rng.random()) / count * most))
            session = make_session(rng, length, QUESTIONS, facts, invented_share=0.0)
            samples.append(session_sample(session, f"{facts} facts"))
    return samples


DEFAULT_CONTEXTS = 16


@dataclass(frozen=True)
class CalibratedCurve:
    """A fitted curve and the measurements behind it."""

    document: CurveDocument
    measurements: tuple[Measurement, ...]


def calibrate_curve(
    model_path: str,
    profile: HeadProfile,
    settings: Settings,
    *,
    lengths: Sequence[int],
    tasks: Sequence[str] | None = None,
    contexts: int = DEFAULT_CONTEXTS,
    seed: int = 0,
    samples_file: Path | None = None,
    dtype: str | None = None,
    progress: Progress = no_progress,
) -> CalibratedCurve:
    """Measure and fit the curve of a local model under a head profile.

    profile:       with every head CA where the settings' scorer is `comparable`: then heads compete
    tasks:         of contexts of real text; None for all. Ignored with samples_file
    contexts:      per length; ignored with samples_file, the user's own
    dtype:         of the KV cache that will serve, by PyTorch's or SGLang's name; what contexts
                   hold is rounded to it. None: the dtype the model runs in here

    Raises UsageError, naming the argument, before anything heavy starts, and
    HeadProfileMismatchError when the profile is another model's.
    """
    rule, scorer = locality_rule(settings), scorer_of(settings)
    dtype = None if dtype is None else _torch_name(dtype)
    revision = weights_revision(model_path)
    profile.check_fits(model_shape(read_config(model_path)), revision)
    if samples_file is not None:
        samples = list(users_plan(model_path, samples_file, rule).calibration)
    else:
        check_lengths(model_path, lengths, rule)
        samples = curve_samples(model_path, lengths, contexts, seed, tasks)
    progress("loading the model", 0, 1)
    model = load_model(model_path)
    progress("loading the model", 1, 1)
    kv_dtype = None if dtype is None else getattr(torch, dtype)
    anchored = None if scorer.comparable else profile
    prepare = Budgets(model, rule, scorer, anchored, settings.nll_stride, kv_dtype)
    measurements = measure_curve(prepare, samples, progress)
    document = document_of_fit(
        measurements,
        model=model_name(model_path),
        revision=revision,
        policy=policy_digest(profile, rule, scorer),
        dtype=dtype or str(model.dtype).removeprefix("torch."),
        answer_floor_nats=ANSWER_FLOOR_NATS,
        parameters={"lengths": list(lengths), "contexts_per_length": contexts, "seed": seed},
    )
    return CalibratedCurve(document, tuple(measurements))


def _torch_name(dtype: str) -> str:
    """Raises UsageError for what no KV cache is kept in."""
    name = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(dtype, dtype)
    if name not in DTYPE_BYTES:
        raise UsageError("--dtype", f"one of {', '.join(DTYPE_BYTES)}", dtype)
    return name
