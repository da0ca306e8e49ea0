"""The calibration of a server's model, from the calibration store: head profile and curve.

The profile is read once, when the pool is built; the curve is watched, so that a new one is in
force without a restart. Nothing here fails or delays serving: a store that is down means the last
known document, then its local copy, then every head and the whole context.
"""

from __future__ import annotations

import logging

from kvtier.calibration.documents import CurveDocument, ProfileDocument, load_curve
from kvtier.calibration.keys import Key, policy_digest
from kvtier.calibration.store.directory import LocalCopy, open_store
from kvtier.calibration.store.watcher import (
    LOCAL_DIRECTORY,
    CalibrationWatcher,
    OnEvent,
    Served,
    watch,
)
from kvtier.config import Settings
from kvtier.errors import CalibrationDocumentError, CalibrationMismatchError, StoreError
from kvtier.heads.model.config import model_name, weights_revision
from kvtier.heads.profile import HeadProfile, ModelShape
from kvtier.retention.locality import LocalityRule
from kvtier.retention.scorers import TokenScorer

logger = logging.getLogger(__name__)

# A start-up may wait so long for the first answer; serving goes on without it.
FIRST_POLL_S = 2.0


class FixedCurve:
    """A curve from a file; or None, on a rank that does not decide what contexts keep."""

    def __init__(self, document: CurveDocument | None) -> None:
        self._document = document
        self.counters: dict[str, int] = {}

    def curve(self) -> CurveDocument | None:
        return self._document


def curve_source(
    settings: Settings,
    model_path: str,
    profile: HeadProfile,
    rule: LocalityRule,
    scorer: TokenScorer,
    dtype: str,
    on_event: OnEvent | None = None,
) -> CalibrationWatcher | FixedCurve:
    """The curve of exactly this model, policy and KV dtype: the user's file, or the store's.

    on_event: told of the watcher's events; see CalibrationWatcher.

    Raises CalibrationDocumentError for a file that is no such curve.
    """
    served = Served(
        model=model_name(model_path),
        revision=weights_revision(model_path),
        policy=policy_digest(profile, rule, scorer),
        dtype=dtype,
    )
    if settings.curve is not None:
        return FixedCurve(served.checked(load_curve(settings.curve)))
    watcher = watch(settings, served, on_event)
    watcher.wait_first_poll(FIRST_POLL_S)
    if watcher.curve() is None:
        logger.warning(
            "no calibration curve under %s: CA heads keep everything until there is one "
            "(make it with `kvtier calibrate`)",
            served.key,
        )
    return watcher


def stored_profile(settings: Settings, model_path: str, shape: ModelShape) -> HeadProfile | None:
    """The stored head profile of a model, or None: then every head keeps the whole context."""
    model, revision = model_name(model_path), weights_revision(model_path)
    key = Key.of("profile", model, revision)
    local = LocalCopy(settings.data_dir / LOCAL_DIRECTORY)
    try:
        with open_store(settings) as store:
            document = store.get(key, renew=True)
        if document is None:
            # Without this a deleted curve would come back the next time the store is down.
            local.forget(key)
        else:
            local.save(document)
    except (StoreError, CalibrationDocumentError) as error:
        logger.warning("head profile %s: %s; using the last known one", key, error)
        document = local.load(key)
    if not isinstance(document, ProfileDocument):
        return None
    try:
        document.check_fits(model, revision, shape)
    except CalibrationMismatchError as error:
        logger.warning("head profile %s is not used: %s", key, error)
        return None
    return document.profile
