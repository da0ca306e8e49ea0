"""What tokens are worth on a model, fitted once as `kvtier calibrate tokens` does, and kept beside
the records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtier.heads.model.config import shape_of
from kvtier.heads.progress import Progress
from kvtier.heads.samples.synthetic import CALIBRATION, Tasks, make_samples
from kvtier.heads.tokens import add, repetitions
from kvtier.retention.token_worth import Fit, TokenWorth


def fitted(
    file: Path, model: Any, model_path: Path, tasks: Tasks, contexts: int, length: int, seed: int,
    progress: Progress,
) -> TokenWorth:  # fmt: skip
    """Read `file`, or fit and write it."""
    if not file.exists():
        samples = make_samples(tasks.make, tasks.measuring, contexts, [length], seed, CALIBRATION)
        fit = Fit(shape_of(model).num_layers)
        for repeated in repetitions(model, str(model_path), samples, progress):
            add(fit, model, repeated)
        fit.solve().save(file)
    return TokenWorth.load(file)


__all__ = ["fitted"]
