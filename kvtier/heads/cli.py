"""`kvtier calibrate heads`: the command-line face of `kvtier.heads.calibrate`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.errors import UsageError
from kvtier.heads.base import METHODS, Target
from kvtier.sizes import parse_size

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_calibrate_parser(subparsers: Subparsers) -> None:
    """Add `calibrate heads`; parsed arguments carry the handler as `handler`."""
    parser = subparsers.add_parser("calibrate", help="make what kvtier needs to know of a model")
    kinds = parser.add_subparsers(dest="calibrate", required=True, metavar="WHAT")
    heads = kinds.add_parser(
        "heads",
        help="find the KV heads that need the whole context, and measure what keeping them costs",
    )
    heads.add_argument("--model-path", required=True, help="local model directory")
    heads.add_argument(
        "--method", default="sensitivity", metavar="NAME",
        help=f"{' or '.join(sorted(METHODS))} (default: %(default)s)",
    )  # fmt: skip
    heads.add_argument("--share", type=float, help="share of KV heads to keep, such as 0.25")
    heads.add_argument("--budget", type=float, help="largest fall of recall allowed, such as 0.02")
    heads.add_argument("--out", type=Path, required=True, help="profile to write (JSON)")
    heads.add_argument("--picture", type=Path, help="picture to write (PNG)")
    heads.add_argument(
        "--len", default="4k", help="context lengths, such as 4k,32k (default: %(default)s)"
    )
    heads.add_argument(
        "--samples", type=int, default=4, help="contexts per length (default: %(default)s)"
    )
    heads.add_argument("--seed", type=int, default=0)
    heads.add_argument("-q", "--quiet", action="store_true", help="no progress and no summary")
    heads.set_defaults(handler=run_calibrate_heads)


def run_calibrate_heads(options: argparse.Namespace) -> int:
    """Handler of `kvtier calibrate heads`. Raises KvtierError; returns the exit code 0."""
    target = Target(share=options.share, budget=options.budget)
    lengths = [parse_size(text, "--len") for text in options.len.split(",")]
    if options.picture is not None and not options.picture.parent.is_dir():
        raise UsageError("--picture", "a file in an existing directory", str(options.picture))
    if options.seed < 0:
        raise UsageError("--seed", "at least 0", options.seed)

    from contextlib import nullcontext

    from kvtier.heads.base import no_progress
    from kvtier.heads.calibrate import calibrate_heads, rich_progress, summary

    with nullcontext(no_progress) if options.quiet else rich_progress() as progress:
        result = calibrate_heads(
            options.model_path, options.method, options.out,
            target=target, lengths=lengths, samples=options.samples, seed=options.seed,
            progress=progress,
        )  # fmt: skip
    if options.picture is not None:
        from kvtier.heads.picture import draw_profile

        draw_profile(result.profile, options.picture)
    if not options.quiet:
        print("\n".join(summary(result)))
    return 0
