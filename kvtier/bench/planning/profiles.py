"""The calibration of a bench whose flags leave it open: by files beside the model, or as a server
would choose."""

from __future__ import annotations

from pathlib import Path

from kvtier.bench.options import Options
from kvtier.bench.planning.model import Model
from kvtier.calibration.defaults import WORTH_FILE, with_calibration
from kvtier.config import Settings
from kvtier.errors import HeadProfileError, UsageError
from kvtier.heads.model.config import weights_revision
from kvtier.heads.profile import HeadProfile, full_profile, load_profile
from kvtier.retention.shares import configured_share

PROFILE_FILE, CURVE_FILE = "head_profile.json", "curve.json"
# The share that a dry run assumes for a model that has not been calibrated yet.
ASSUMED_CA_SHARE = 0.25
ADAPTIVE = "none: heads compete for what is kept"
NO_PROFILE = "none, so every head keeps its whole context; `kvtier calibrate heads` makes one"


def calibrated(options: Options, model: Model) -> Settings:
    """The settings, by which heads compete where it is known what the model's tokens are worth and
    nothing else is asked for.

    It is known from a file beside the model, or from where every server of it looks
    (kvtier.calibration.defaults). Policy random draws as many heads as a profile has: beside it
    kvtier has that profile.
    """
    settings, worth = options.settings, model.path / WORTH_FILE
    if (
        any(policy.name == "random" for policy in options.policies)
        or not settings.heads_may_compete
    ):
        return settings
    scorer = settings.scorer
    if scorer.name is None and scorer.file is None and worth.is_file():
        scorer = scorer.model_copy(update={"file": worth.resolve()})
        settings = settings.model_copy(update={"scorer": scorer})
    return with_calibration(settings, str(model.path))


def find_profile(options: Options, model: Model) -> tuple[HeadProfile | None, str]:
    """The head profile and where it is from; None where no policy needs one.

    Without a file every head of kvtier's keeps its whole context. Raises HeadProfileError for a
    file that is malformed or another model's, and where a control is to copy a profile's size,
    UsageError for what layers with a window do without.
    """
    controls = [one.name for one in options.policies if one.keeps in ("window", "random")]
    if model.windows and controls:
        expected = "none by a head profile over a model of which some layers have a window"
        raise UsageError("--policies", expected, ", ".join(controls))
    if not any(policy.needs_profile for policy in options.policies):
        return None, ""
    if options.settings.competes:
        if any(policy.name == "random" for policy in options.policies):
            raise HeadProfileError(
                "--head-budgets: expected equal beside policy random, which draws as many CA heads "
                "as a head profile has"
            )
        return full_profile(model.shape), ADAPTIVE
    if model.windows:
        expected = "what `kvtier calibrate tokens` has written, beside a share, for a model of "
        raise UsageError("--scorer-file", f"{expected}which some layers have a window", None)
    path = options.settings.head_profile or model.path / PROFILE_FILE
    if options.settings.head_profile is None and not path.is_file():
        if options.dry_run:
            return _assumed_profile(model), f"assumed: {ASSUMED_CA_SHARE:.0%} CA heads"
        if any(policy.name == "random" for policy in options.policies):
            raise HeadProfileError(
                "--head-profile: expected a head profile file for policy random, and "
                f"{path} does not exist; make one with `kvtier calibrate heads`"
            )
        return full_profile(model.shape), NO_PROFILE
    profile = load_profile(path)
    revision = None if profile.revision is None else weights_revision(str(model.path))
    profile.check_fits(model.shape, revision)
    return profile, str(path)


def _assumed_profile(model: Model) -> HeadProfile:
    """The assumed share of CA heads, spread evenly over the layers."""
    shape = model.shape
    total = shape.num_layers * shape.num_kv_heads
    chosen = {int((i + 0.5) / ASSUMED_CA_SHARE) for i in range(round(total * ASSUMED_CA_SHARE))}
    layers = tuple(
        tuple(h for h in range(shape.num_kv_heads) if layer * shape.num_kv_heads + h in chosen)
        for layer in range(shape.num_layers)
    )
    return HeadProfile(model=str(model.path), shape=shape, method="assumed", ca_heads=layers)


def find_curve(settings: Settings, model: Model) -> Path | None:
    """The curve file for a quality target: the user's, or the model's; None leaves the store's."""
    share = configured_share(settings)
    if share is None or not share.rule.needs_curve or settings.curve is not None:
        return settings.curve
    path = model.path / CURVE_FILE
    return path.resolve() if path.is_file() else None
