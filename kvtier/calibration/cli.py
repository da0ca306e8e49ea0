"""`kvtier calibrate`, which finds all that a server of a model wants, and its kinds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from kvtier.calibration.curves import Measurement, unseen_tasks
from kvtier.calibration.defaults import WORTH_FILE, calibration_folder
from kvtier.calibration.documents import CurveDocument, Document, ProfileDocument, WorthDocument
from kvtier.calibration.keys import Key
from kvtier.calibration.picture import draw_curve
from kvtier.calibration.store.directory import open_store
from kvtier.config import Settings, load_settings
from kvtier.errors import CalibrationDocumentError, StoreError, UsageError
from kvtier.heads.cli import MODEL_HELP, add_heads_parser, add_tokens_parser
from kvtier.heads.methods import DEFAULT_METHOD, Target
from kvtier.heads.model.config import (
    located,
    model_name,
    model_shape,
    read_config,
    weights_revision,
)
from kvtier.heads.model.support import check_supported, windows_of
from kvtier.heads.profile import HeadProfile, full_profile, load_profile
from kvtier.heads.progress import Progress, shown_progress
from kvtier.sizes import parse_size

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


DEFAULT_LENGTHS, DEFAULT_CONTEXTS, DEFAULT_SHARE = "4k", 16, 0.25
# A curve is explained by the shares at this quality.
SHOWN_QUALITY = 0.95
PROFILE_FILE, PROFILE_PICTURE, CURVE_FILE, CURVE_PICTURE = (
    "head_profile.json", "head_profile.png", "curve.json", "curve.png",
)  # fmt: skip
# The parts that a run finds, in this order; servers use the first as soon as it is there.
PARTS = ("tokens", "curve", "heads")


def add_calibrate_parser(subparsers: Subparsers) -> None:
    """Add `calibrate` and its kinds; parsed arguments carry the handler as `handler`."""
    parser = subparsers.add_parser(
        "calibrate",
        help="find what a model's tokens are worth, its curve and its heads, for every server",
    )
    _add_options(parser, required=False)
    parser.add_argument(
        "--parts",
        help="what is found, in this order; a server with no other flag wants tokens alone "
        f"(default: {','.join(PARTS)}, or tokens where some layers have a window)",
    )  # fmt: skip
    parser.add_argument("--share", type=float, help=f"share of KV heads ({DEFAULT_SHARE})")
    parser.add_argument(
        "--budget",
        type=float,
        help="largest share that may be lost of what the context is worth, instead",
    )
    parser.set_defaults(handler=run_calibrate)
    kinds = parser.add_subparsers(dest="calibrate", metavar="heads | tokens | curve")
    add_heads_parser(kinds)
    add_tokens_parser(kinds)
    curve = kinds.add_parser("curve", help="fit and store the curve of a model and head profile")
    _add_options(curve, required=True)
    curve.add_argument("--head-profile", type=Path, help="file; default: the stored profile")
    curve.set_defaults(handler=run_calibrate_curve)


def _add_options(parser: argparse.ArgumentParser, *, required: bool) -> None:
    add = parser.add_argument
    add("--model-path", required=required, help=MODEL_HELP)
    add("--out", type=Path, metavar="DIRECTORY",
        help="where files and pictures go (default: the model's folder in KVTIER_DATA_DIR, where "
        "servers look for them)")  # fmt: skip
    add("--len", default=DEFAULT_LENGTHS,
        help="context lengths of curve and heads (default: %(default)s)")  # fmt: skip
    add("--contexts", type=int, default=DEFAULT_CONTEXTS,
        help="contexts per length the curve is fitted on (default: %(default)s)")  # fmt: skip
    add("--samples-file", type=Path, metavar="FILE.jsonl", help="your own samples instead")
    add(
        "--scorer",
        metavar="NAME",
        help="which tokens stay (default: reconstruction, by which heads compete); with another "
        "one the curve is that of the head profile",
    )
    add("--scorer-file", type=Path, metavar="FILE",
        help="what tokens are worth, as it was fitted before (reconstruction)")  # fmt: skip
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
    parts, model = _parts(options), options.model_path
    compete = _heads_compete(settings)
    profile: HeadProfile | None = None
    found, said = list[Document](), list[str]()
    with shown_progress(options.quiet) as progress:
        if compete:
            if "tokens" in parts and settings.scorer.file is None:
                file = options.out / WORTH_FILE
                said += _tokens(options, file, progress)
                # Servers without a Redis read the file as it is.
                if settings.redis.url is not None:
                    found.append(WorthDocument.of(model_name(model), weights_revision(model), file))
            if "curve" in parts:
                every, settings = _every_head(options), _competing(options, settings)
                curve, about = _curve(options, settings, every, lengths, progress)
                found, said = [*found, curve], said + about
        if "heads" in parts:
            profile, about = _heads(options, settings, lengths, progress)
            found, said = [*found, ProfileDocument.of(profile)], said + about
        if "curve" in parts and not compete:
            known = profile or _profile(options, settings)
            curve, about = _curve(options, settings, known, lengths, progress)
            found, said = [*found, curve], said + about
    return _finish(options, settings, found, said)


def _parts(options: argparse.Namespace) -> Sequence[str]:
    """Return the parts to find of a model. Raises UsageError for a part that there is none of, and
    UnsupportedModelError for what cannot be found of the model."""
    asked = [part.strip() for part in (options.parts or "").split(",") if part]
    for part in asked:
        if part not in PARTS:
            raise UsageError("--parts", f"some of {', '.join(PARTS)}", part)
    config = read_config(options.model_path)
    if not windows_of(config):
        return asked or PARTS
    parts = asked or ["tokens"]
    check_supported(config, windows=parts == ["tokens"])
    return parts


def run_calibrate_curve(options: argparse.Namespace) -> int:
    """Handler of `kvtier calibrate curve`. Raises KvtierError; returns the exit code 0."""
    settings, lengths = _checked(options)
    compete = _heads_compete(settings)
    if settings.scorer.name is None:
        # Whatever a server would do: heads compete where the model was calibrated for that.
        is_fitted = settings.scorer.file is not None or (options.out / WORTH_FILE).is_file()
        compete = is_fitted and options.head_profile is None
    if compete:
        profile, settings = _every_head(options), _competing(options, settings)
    else:
        profile = _profile(options, settings)
    with shown_progress(options.quiet) as progress:
        curve, said = _curve(options, settings, profile, lengths, progress)
    return _finish(options, settings, [curve], said)


def _tokens(options: argparse.Namespace, file: Path, progress: Progress) -> list[str]:
    """Fit what tokens are worth; returns what to say about it."""
    from kvtier.heads.tokens import fit_tokens, summary

    fit = fit_tokens(options.model_path, seed=options.seed, progress=progress)
    # A server that starts meanwhile reads all of it or nothing.
    staging = file.with_suffix(".tmp")
    fit.worth.save(staging)
    staging.replace(file)
    return summary(fit, file)


def _heads(
    options: argparse.Namespace, settings: Settings, lengths: list[int], progress: Progress
) -> tuple[HeadProfile, list[str]]:
    """Find and draw a head profile; returns what to say about it, too."""
    from kvtier.heads.calibrate import calibrate_heads
    from kvtier.heads.report import draw_profile, summary
    from kvtier.retention.rules import locality_rule

    share = DEFAULT_SHARE if options.share is None and options.budget is None else options.share
    found = calibrate_heads(
        options.model_path, DEFAULT_METHOD, options.out / PROFILE_FILE,
        target=Target(share=share, budget=options.budget),
        lengths=lengths, seed=options.seed, rule=locality_rule(settings),
        samples_file=options.samples_file, progress=progress,
    )  # fmt: skip
    draw_profile(found.profile, options.out / PROFILE_PICTURE)
    return found.profile, summary(found)


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
    options.model_path = located(options.model_path)
    if options.out is None:
        # Refused before a folder is made for what is no model.
        read_config(options.model_path)
        options.out = calibration_folder(settings, options.model_path)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError("--out", "a directory that can be made", str(options.out)) from error
    if not options.no_store:
        with open_store(settings) as store:
            store.list()
    return settings, lengths


def _heads_compete(settings: Settings) -> bool:
    from kvtier.retention.scorers import SCORERS

    name = settings.scorer.name
    return name is None or (name in SCORERS and SCORERS[name].comparable)


def _competing(options: argparse.Namespace, settings: Settings) -> Settings:
    """The settings under which heads compete. Raises UsageError before tokens have been fitted."""
    file = settings.scorer.file or options.out / WORTH_FILE
    if not file.is_file():
        raise UsageError("--scorer-file", "what `kvtier calibrate --parts tokens` fits", str(file))
    name = settings.scorer.name or "reconstruction"
    scorer = settings.scorer.model_copy(update={"name": name, "file": file})
    return settings.model_copy(update={"head_budgets": "adaptive", "scorer": scorer})


def _every_head(options: argparse.Namespace) -> HeadProfile:
    return full_profile(model_shape(read_config(options.model_path)))


def _profile(options: argparse.Namespace, settings: Settings) -> HeadProfile:
    file = getattr(options, "head_profile", None) or settings.head_profile
    if file is not None:
        return load_profile(file)
    model = options.model_path
    key = Key.of("profile", model_name(model), weights_revision(model))
    with open_store(settings) as store:
        document = store.get(key)
    if not isinstance(document, ProfileDocument):
        raise UsageError("--head-profile", f"a file, or a stored profile under {key}", None)
    return document.profile


def _curve(
    options: argparse.Namespace,
    settings: Settings,
    profile: HeadProfile,
    lengths: list[int],
    progress: Progress,
) -> tuple[CurveDocument, list[str]]:
    """Fit and draw a curve; returns what to say about it, too."""
    from kvtier.calibration.measuring import calibrate_curve

    curve = calibrate_curve(
        options.model_path, profile, settings, lengths=lengths, contexts=options.contexts,
        seed=options.seed, samples_file=options.samples_file, dtype=options.dtype,
        progress=progress,
    )  # fmt: skip
    document, measurements = curve.document, curve.measurements
    (options.out / CURVE_FILE).write_text(document.to_json() + "\n")
    draw_curve(document.curve, measurements, options.out / CURVE_PICTURE, document.model)
    return document, describe_curve(document, measurements)


def _finish(
    options: argparse.Namespace, settings: Settings, found: Sequence[Document], said: Sequence[str]
) -> int:
    """Say what was found, and store it. The files are written by now, so nothing is lost."""
    if not options.quiet:
        print("\n".join([*said, f"files: {options.out}"]))
    if options.no_store:
        return 0
    try:
        with open_store(settings) as store:
            keys = [str(store.put(document)) for document in found]
    except (StoreError, CalibrationDocumentError) as error:
        raise type(error)(f"{error}; the result is in {options.out}, nothing is lost") from error
    if not options.quiet:
        print("\n".join(f"stored: {key}" for key in keys))
    return 0


def describe_curve(document: CurveDocument, measurements: Sequence[Measurement]) -> list[str]:
    """Describe how well a curve explains what was measured, what it asks for, and whether its
    target holds where it was fitted to all other tasks."""
    held_out = document.held_out_rmse
    error = "not measured" if held_out is None else f"{held_out:.3f}"
    low, high = document.nll_min, document.nll_max
    shares = [
        f"{document.retention(SHOWN_QUALITY, nll):.0%}" for nll in (low, (low + high) / 2, high)
    ]
    said = [
        f"curve: {document.measurements} measurements of {document.contexts} contexts, "
        f"RMSE {document.rmse:.3f}, held out {error}, R2 {document.r2:.3f}",
        f"share kept at quality {SHOWN_QUALITY}: {shares[0]} at NLL {low:.2f} nats, "
        f"{shares[1]} halfway, {shares[2]} at {high:.2f}",
    ]
    if unseen := unseen_tasks(measurements, SHOWN_QUALITY):
        share, quality = fmean(one.share for one in unseen), fmean(one.quality for one in unseen)
        worst = min(unseen, key=lambda task: task.quality)
        said.append(
            f"tasks left out of the curve's fit, quality {SHOWN_QUALITY}: {share:.0%} kept, "
            f"quality {quality:.3f}; the worst is {worst.task}, {worst.share:.0%} and "
            f"{worst.quality:.3f}"
        )
    return said
