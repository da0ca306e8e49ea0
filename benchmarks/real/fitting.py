"""The outcome of `kvtier calibrate --scorer reconstruction` on a model, kept beside the records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvtier.calibration.documents import CurveDocument, load_curve
from kvtier.calibration.measuring import calibrate_curve
from kvtier.config import load_settings
from kvtier.heads.model.config import model_shape, read_config
from kvtier.heads.profile import full_profile
from kvtier.heads.progress import Progress
from kvtier.heads.tokens import fit_tokens
from kvtier.retention.locality import LocalityRule
from kvtier.retention.token_worth import TokenWorth


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


__all__ = ["Calibrated", "calibrated"]
