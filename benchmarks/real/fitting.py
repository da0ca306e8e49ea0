"""What is known of a model's tokens and heads before any context is served: fitted on contexts of
its own, of the other half of the texts, and kept beside the records."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from kvtier.heads.model.config import shape_of
from kvtier.heads.progress import Progress
from kvtier.heads.samples.synthetic import CALIBRATION, Tasks, make_samples
from kvtier.heads.tokens import add, repetitions
from kvtier.retention.head_shares import HeadShares, measured_shares
from kvtier.retention.token_worth import Fit, TokenWorth


@dataclass(frozen=True, eq=False)
class Fitted:
    worth: TokenWorth
    shares: HeadShares


def fitted(
    file: Path, model: Any, model_path: Path, tasks: Tasks, contexts: int, length: int, seed: int,
    progress: Progress,
) -> Fitted:  # fmt: skip
    """Read `file`, or fit and write it."""
    if not file.exists():
        found = _fit(model, model_path, tasks, contexts, length, seed, progress)
        save_file({"worth": found.worth.weights, "shares": found.shares.shares}, str(file))
    tensors = load_file(str(file))
    return Fitted(TokenWorth(tensors["worth"]), HeadShares(tensors["shares"]))


def _fit(
    model: Any, model_path: Path, tasks: Tasks, contexts: int, length: int, seed: int,
    progress: Progress,
) -> Fitted:  # fmt: skip
    """As `kvtier calibrate tokens` does, and what each head holds of the best entries."""
    samples = make_samples(tasks.make, tasks.measuring, contexts, [length], seed, CALIBRATION)
    fit, shares = Fit(shape_of(model).num_layers), []
    for repeated in repetitions(model, str(model_path), samples, progress):
        add(fit, model, repeated)
        shares.append(measured_shares(repeated.drawn))
    print(f"fitted on {contexts} contexts of {length} tokens", file=sys.stderr)
    return Fitted(fit.solve(), HeadShares.mean_of(shares))


__all__ = ["Fitted", "fitted"]
