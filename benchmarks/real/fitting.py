"""What is known of a model's tokens and heads before any context is served: fitted on contexts of
its own, of the other half of the texts, and kept beside the records."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvtier.heads.model.config import shape_of
from kvtier.heads.probes.reconstruction import attention_drawn, repeat_request
from kvtier.heads.profile import full_profile
from kvtier.heads.progress import Progress
from kvtier.heads.reference.compaction import rotation_of
from kvtier.heads.reference.session import ReferenceSession
from kvtier.heads.samples.synthetic import CALIBRATION, Tasks, make_samples
from kvtier.retention.head_shares import HeadShares, measured_shares
from kvtier.retention.token_worth import Fit, TokenWorth
from kvtier.synthetic.frame import frame_of
from kvtier.synthetic.tokenizer import Tokenizer


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
    tokenizer = Tokenizer(str(model_path))
    request = repeat_request(tokenizer, frame_of(tokenizer))
    shape = shape_of(model)
    fit, shares = Fit(shape.num_layers), []
    # Every kind of text: no question of any task is looked at.
    kinds = tasks.measuring
    samples = make_samples(tasks.make, kinds, contexts, [length], seed, CALIBRATION)
    for index, sample in enumerate(samples):
        progress(f"fitting, {sample.task}", index, contexts)
        session = ReferenceSession(model, full_profile(shape))
        session.turn(sample.context_ids, 0)
        kv = [session.exact_kv(layer) for layer in range(shape.num_layers)]
        drawn = attention_drawn(model, kv, sample.context_ids, request)
        positions = torch.arange(len(sample.context_ids))
        for layer, (k, v) in enumerate(kv):
            fit.add(layer, k, v, rotation_of(model, k, positions), drawn[layer])
        shares.append(measured_shares(drawn))
    progress("fitting", contexts, contexts)
    print(f"fitted on {contexts} contexts of {length} tokens", file=sys.stderr)
    return Fitted(fit.solve(), HeadShares.mean_of(shares))


__all__ = ["Fitted", "fitted"]
