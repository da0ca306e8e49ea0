"""`kvtier calibrate permute`: the command-line face of balance.py and checkpoint.py."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.heads.parallel.balance import Balance, balance, even_orders, reordered
from kvtier.heads.profile import load_profile

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

PROFILE_FILE = "head_profile.json"


def add_permute_parser(kinds: Subparsers) -> None:
    """Add the kind `permute` of `kvtier calibrate`; parsed arguments carry `handler`."""
    permute = kinds.add_parser(
        "permute",
        help="write a model with its KV heads in another order, so that tensor parallel ranks "
        "hold equally many context-anchored ones",
    )
    add = permute.add_argument
    add("--model-path", type=Path, required=True, help="local model directory with safetensors")
    add("--head-profile", type=Path, required=True, help="profile of that model")
    add("--tp", type=int, required=True, help="tensor parallel ranks that will serve")
    add("--out", type=Path, required=True, help="folder to write: the model, and its profile")
    add("-q", "--quiet", action="store_true", help="no summary")
    permute.set_defaults(handler=run_permute)


def run_permute(options: argparse.Namespace) -> int:
    """Handler of `kvtier calibrate permute`. Raises KvtierError; returns the exit code 0."""
    from kvtier.heads.model.config import model_name, model_shape, read_config, weights_revision
    from kvtier.heads.parallel.checkpoint import permute_checkpoint

    profile = load_profile(options.head_profile)
    path = str(options.model_path)
    profile.check_fits(model_shape(read_config(path)), weights_revision(path))
    orders = even_orders(profile, options.tp)
    permute_checkpoint(options.model_path, orders, options.out)
    made = str(options.out)
    update = {"model": model_name(made), "revision": weights_revision(made)}
    new = reordered(profile, orders).model_copy(update=update)
    new.save(options.out / PROFILE_FILE)
    if not options.quiet:
        print("\n".join(summary(balance(profile, options.tp), balance(new, options.tp))))
        print(f"{options.out} holds the model and {PROFILE_FILE}; it computes the same")
    return 0


def summary(before: Balance, after: Balance) -> list[str]:
    """What the order changed, for people."""
    return [
        f"CA heads of each rank: {before.listed}, now {after.listed}",
        f"each layer's fullest rank holds {before.slowest:.2f} times the mean, "
        f"now {after.slowest:.2f} times",
    ]


__all__ = ["add_permute_parser", "run_permute", "summary"]
