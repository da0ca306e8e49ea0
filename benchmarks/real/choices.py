"""The heads that the default method chooses on a model, and what its tokens are worth, with a
curve: each is found once and kept beside the records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.real.records import Records
from kvtier.calibration.documents import CurveDocument, load_curve
from kvtier.calibration.measuring import calibrate_curve
from kvtier.config import load_settings
from kvtier.heads.calibrate import prepare
from kvtier.heads.methods import DEFAULT_METHOD, make_method
from kvtier.heads.model.config import model_name, model_shape, read_config, weights_revision
from kvtier.heads.probes.context import HeadProbe
from kvtier.heads.profile import Head, full_profile
from kvtier.heads.progress import Progress
from kvtier.heads.samples.synthetic import CALIBRATION, Tasks, make_samples
from kvtier.heads.tokens import fit_tokens
from kvtier.retention.locality import LocalityRule
from kvtier.retention.token_worth import TokenWorth


@dataclass(frozen=True)
class Setup:
    """A model, its tasks, and the contexts on which heads are chosen."""

    model_path: Path
    tasks: Tasks
    length: int
    contexts: int
    seed: int

    def described(self) -> dict[str, Any]:
        """Return the settings that records are kept under; reads all weights for their digest."""
        return {
            "model": model_name(str(self.model_path)),
            "revision": weights_revision(str(self.model_path)),
            "tasks": list(self.tasks.measuring),
            "chosen_on": {
                "tasks": list(self.tasks.choosing),
                "context_tokens": self.length,
                "contexts": self.contexts,
            },
            "seed": self.seed,
        }


def chosen_heads(
    setup: Setup, records: Records, probe: HeadProbe, progress: Progress
) -> tuple[Head, ...]:
    """Return every head, best first, as the default method ranks them now or did in a run
    before."""
    file = records.directory / f"choice-{DEFAULT_METHOD}.json"
    if not file.exists():
        method = make_method(DEFAULT_METHOD, seed=setup.seed)
        samples = make_samples(
            setup.tasks.make, setup.tasks.choosing, setup.contexts, [setup.length], setup.seed,
            CALIBRATION,
        )  # fmt: skip
        batches = prepare(probe, samples, progress)
        order = method.ranking(method.score(batches, progress), probe.shape)
        file.write_text(json.dumps({"order": order}) + "\n")
    document = json.loads(file.read_text())
    return tuple((layer, head) for layer, head in document["order"])


class Calibrated(NamedTuple):
    """The worth of tokens on a model, and the curve of the cost of keeping a share of them."""

    worth: TokenWorth
    curve: CurveDocument


def calibrated(
    folder: Path, model_path: str, *, tasks: Sequence[str], contexts: int,
    fit_lengths: Sequence[int], curve_lengths: Sequence[int], rule: LocalityRule, seed: int,
    progress: Progress,
) -> Calibrated:  # fmt: skip
    """Read the calibration in `folder`, or calibrate on these tasks. contexts: their number per
    length of the curve."""
    worth, curve = folder / "token_worth.npz", folder / "curve.json"
    if not worth.exists():
        fit = fit_tokens(model_path, tasks=tasks, lengths=fit_lengths, seed=seed, progress=progress)
        fit.worth.save(worth)
    if not curve.exists():
        settings = load_settings(
            scorer="reconstruction", scorer_file=worth, locality_sink_tokens=rule.sink_tokens,
            locality_recent_tokens=rule.recent_tokens,
        )  # fmt: skip
        profile = full_profile(model_shape(read_config(model_path)))
        found = calibrate_curve(
            model_path, profile, settings, tasks=tasks, lengths=curve_lengths, contexts=contexts,
            seed=seed, progress=progress,
        )  # fmt: skip
        curve.write_text(found.document.to_json() + "\n")
    return Calibrated(TokenWorth.load(worth), load_curve(curve))
