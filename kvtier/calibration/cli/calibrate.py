"""`kvtier calibrate` (heads, curve, store: everything) and `kvtier calibrate curve`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.config import Settings, load_settings
from kvtier.errors import StoreError, UsageError
from kvtier.heads.cli import MODEL_HELP, add_heads_parser, add_tokens_parser
from kvtier.heads.methods import DEFAULT_METHOD, Target
from kvtier.heads.model.config import located
from kvtier.heads.parallel.cli import add_permute_parser
from kvtier.heads.progress import no_progress
from kvtier.sizes import parse_size

if TYPE_CHECKING:
    from kvtier.calibration.curves import Measurement
    from kvtier.calibration.measuring.calibrate import CalibratedCurve
    from kvtier.heads.profile import HeadProfile
    from kvtier.heads.progress import Progress

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DEFAULT_LENGTHS, DEFAULT_CONTEXTS, DEFAULT_SHARE = "4k", 16, 0.25
# What a curve is explained by.
SHOWN_QUALITY = 0.95
PROFILE_FILE, PROFILE_PICTURE, CURVE_FILE, CURVE_PICTURE, WORTH_FILE = (
    "head_profile.json", "head_profile.png", "curve.json", "curve.png", "token_worth.npz",
)  # fmt: skip


def add_calibrate_parser(subparsers: Subparsers) -> None:
    """Add `calibrate` and its kinds; parsed arguments carry the handler as `handler`."""
    parser = subparsers.add_parser(
        "calibrate",
        help="find a model's head profile, fit its curve, and store both for every server",
    )
    _add_options(parser, required=False)
    parser.add_argument("--share", type=float, help=f"share of KV heads ({DEFAULT_SHARE})")
    parser.add_argument(
        "--budget",
        type=float,
        help="largest share that may be lost of what the context is worth, instead",
    )
    parser.set_defaults(handler=run_calibrate)
    kinds = parser.add_subparsers(dest="calibrate", metavar="heads | tokens | curve | permute")
    add_heads_parser(kinds)
    add_tokens_parser(kinds)
    add_permute_parser(kinds)
    curve = kinds.add_parser("curve", help="fit and store the curve of a model and head profile")
    _add_options(curve, required=True)
    curve.add_argument("--head-profile", type=Path, help="file; default: the stored profile")
    curve.set_defaults(handler=run_calibrate_curve)


def _add_options(parser: argparse.ArgumentParser, *, required: bool) -> None:
    add = parser.add_argument
    add("--model-path", type=located, required=required, help=MODEL_HELP)
    add("--out", type=Path, default=Path("calibration"), metavar="DIRECTORY",
        help="where documents and pictures are written as well (default: %(default)s)")  # fmt: skip
    add("--len", default=DEFAULT_LENGTHS, help="context lengths (default: %(default)s)")
    add("--contexts", type=int, default=DEFAULT_CONTEXTS,
        help="contexts per length the curve is fitted on (default: %(default)s)")  # fmt: skip
    add("--samples-file", type=Path, metavar="FILE.jsonl", help="your own samples instead")
    add(
        "--scorer",
        metavar="NAME",
        help="which tokens stay (default: the settings'); with "
        "reconstruction heads compete for entries, and no head profile is made",
    )
    add("--scorer-file", type=Path, metavar="FILE",
        help="what `kvtier calibrate tokens` fitted (reconstruction)")  # fmt: skip
    add("--dtype", help="of the KV cache that will serve, as fp8_e4m3 (default: what the model "
        "runs in here)")  # fmt: skip
    add("--seed", type=int, default=0)
    add("--no-store", action="store_true", help="write the files only")
    add("-q", "--quiet", action="store_true", help="no progress and no summary")


def run_calibrate(options: argparse.Namespace) -> int:
    """Handler of `kvtier calibrate`. Raises KvtierError; returns the exit code 0."""
    if options.model_path is None:
        raise UsageError("--model-path", "a local model directory", None)
    settings, lengths = _checked(options)
    if _heads_compete(settings):
        return _calibrate_tokens_and_curve(options, settings, lengths)
    share = options.share
    if share is None and options.budget is None:
        share = DEFAULT_SHARE
    target = Target(share=share, budget=options.budget)
    from kvtier.heads.calibrate import calibrate_heads
    from kvtier.heads.picture import draw_profile
    from kvtier.heads.report import summary
    from kvtier.retention.rules import locality_rule

    with _progress(options) as progress:
        found = calibrate_heads(
            options.model_path, DEFAULT_METHOD, options.out / PROFILE_FILE, target=target,
            lengths=lengths, seed=options.seed, rule=locality_rule(settings),
            samples_file=options.samples_file, progress=progress,
        )  # fmt: skip
        draw_profile(found.profile, options.out / PROFILE_PICTURE)
        curve = _curve(options, settings, found.profile, lengths, progress)
    if not options.quiet:
        print("\n".join(summary(found)))
    return _finish(options, settings, found.profile, curve)


def _calibrate_tokens_and_curve(
    options: argparse.Namespace, settings: Settings, lengths: list[int]
) -> int:
    """Where heads compete: what tokens are worth, unless a file says it, and the curve."""
    for name in ("share", "budget"):
        if getattr(options, name) is not None:
            expected = f"none with scorer {settings.scorer.name}, by which heads compete"
            raise UsageError(f"--{name}", expected, getattr(options, name))
    from kvtier.heads.tokens import fit_tokens, summary

    said: list[str] = []
    with _progress(options) as progress:
        if settings.scorer.file is None:
            file = options.out / WORTH_FILE
            fit = fit_tokens(options.model_path, seed=options.seed, progress=progress)
            fit.worth.save(file)
            said = summary(fit, file)
            settings = load_settings(scorer=options.scorer, scorer_file=file)
        profile = _profile(options, settings)
        curve = _curve(options, settings, profile, lengths, progress)
    if not options.quiet:
        print("\n".join(said))
    return _finish(options, settings, None, curve)


def run_calibrate_curve(options: argparse.Namespace) -> int:
    """Handler of `kvtier calibrate curve`. Raises KvtierError; returns the exit code 0."""
    settings, lengths = _checked(options)
    profile = _profile(options, settings)
    with _progress(options) as progress:
        curve = _curve(options, settings, profile, lengths, progress)
    return _finish(options, settings, None, curve)


def _checked(options: argparse.Namespace) -> tuple[Settings, list[int]]:
    """Settings and lengths; whatever can fail early fails here, the store included."""
    settings = load_settings(scorer=options.scorer, scorer_file=options.scorer_file)
    if options.contexts < 2:
        raise UsageError("--contexts", "at least 2", options.contexts)
    if options.seed < 0:
        raise UsageError("--seed", "at least 0", options.seed)
    lengths = [parse_size(text, "--len") for text in options.len.split(",")]
    from kvtier.retention.rules import scorer_of

    if not (_heads_compete(settings) and settings.scorer.file is None):
        scorer_of(settings)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError("--out", "a directory that can be made", str(options.out)) from error
    if not options.no_store:
        from kvtier.calibration.store.opening import open_store

        with open_store(settings) as store:
            store.list()
    return settings, lengths


def _heads_compete(settings: Settings) -> bool:
    from kvtier.retention.scorers import SCORERS

    scorer = SCORERS.get(settings.scorer.name)
    return scorer is not None and scorer.comparable


def _profile(options: argparse.Namespace, settings: Settings) -> HeadProfile:
    from kvtier.calibration.documents import ProfileDocument
    from kvtier.calibration.documents.keys import profile_key
    from kvtier.calibration.store.opening import open_store
    from kvtier.heads.model.config import model_name, model_shape, read_config, weights_revision
    from kvtier.heads.profile import full_profile, load_profile

    if _heads_compete(settings):
        return full_profile(model_shape(read_config(options.model_path)))
    file = options.head_profile or settings.head_profile
    if file is not None:
        return load_profile(file)
    key = profile_key(model_name(options.model_path), weights_revision(options.model_path))
    with open_store(settings) as store:
        document = store.get(key)
    if not isinstance(document, ProfileDocument):
        raise UsageError("--head-profile", f"a file, or a stored profile under {key}", None)
    return document.profile


def _progress(options: argparse.Namespace) -> nullcontext[Progress]:
    from kvtier.heads.progress import rich_progress

    # Both are context managers of a Progress; the live bar is a generator's.
    return nullcontext(no_progress) if options.quiet else rich_progress()  # type: ignore[return-value]


def _curve(
    options: argparse.Namespace,
    settings: Settings,
    profile: HeadProfile,
    lengths: list[int],
    progress: Progress,
) -> CalibratedCurve:
    from kvtier.calibration.measuring.calibrate import calibrate_curve
    from kvtier.calibration.picture import draw_curve

    curve = calibrate_curve(
        options.model_path, profile, settings, lengths=lengths, contexts=options.contexts,
        seed=options.seed, samples_file=options.samples_file, dtype=options.dtype,
        progress=progress,
    )  # fmt: skip
    (options.out / CURVE_FILE).write_text(curve.document.to_json() + "\n")
    draw_curve(
        curve.document.curve, curve.measurements, options.out / CURVE_PICTURE, curve.document.model
    )
    return curve


def _finish(
    options: argparse.Namespace,
    settings: Settings,
    profile: HeadProfile | None,
    curve: CalibratedCurve,
) -> int:
    """Store what was found, and say so. The files are written by now, so nothing is lost."""
    from kvtier.calibration.measuring.calibrate import publish
    from kvtier.calibration.store.opening import open_store

    if not options.quiet:
        print("\n".join(describe_curve(curve)))
        print(f"files: {options.out}")
    if options.no_store:
        return 0
    try:
        with open_store(settings) as store:
            keys = publish(store, profile, curve.document)
    except StoreError as error:
        raise type(error)(f"{error}; the result is in {options.out}, nothing is lost") from error
    if not options.quiet:
        print("\n".join(f"stored: {key}" for key in keys))
    return 0


def describe_curve(curve: CalibratedCurve) -> list[str]:
    """How well the curve explains what was measured, and what it asks for."""
    document = curve.document
    held_out = document.held_out_rmse
    error = "not measured" if held_out is None else f"{held_out:.3f}"
    low, high = document.nll_min, document.nll_max
    shares = [
        f"{document.retention(SHOWN_QUALITY, nll):.0%}" for nll in (low, (low + high) / 2, high)
    ]
    return [
        f"curve: {document.measurements} measurements of {document.contexts} contexts, "
        f"RMSE {document.rmse:.3f}, held out {error}, R2 {document.r2:.3f}",
        f"share kept at quality {SHOWN_QUALITY}: {shares[0]} at NLL {low:.2f} nats, "
        f"{shares[1]} halfway, {shares[2]} at {high:.2f}",
        *_unseen(curve.measurements),
    ]


def _unseen(measurements: Sequence[Measurement]) -> list[str]:
    """Whether the target holds where the curve was fitted to all other tasks."""
    from kvtier.calibration.unseen_tasks import unseen_tasks

    found = unseen_tasks(measurements, SHOWN_QUALITY)
    if not found:
        return []
    share = sum(task.share for task in found) / len(found)
    quality = sum(task.quality for task in found) / len(found)
    worst = min(found, key=lambda task: task.quality)
    return [
        f"tasks left out of the curve's fit, quality {SHOWN_QUALITY}: {share:.0%} kept, quality "
        f"{quality:.3f}; the worst is {worst.task}, {worst.share:.0%} and {worst.quality:.3f}"
    ]
