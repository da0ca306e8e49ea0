"""The defaults of what a server keeps of contexts, where its settings leave that open.

Of a model that `kvtier calibrate` has seen, heads compete for a quarter of the entries; of any
other, every head keeps everything.

    DATA_DIR/calibration/MODEL/REVISION/token_worth.npz    what the map says a token is worth
                                        curve:POLICY.json  and what is there without a Redis

With a Redis that file is a copy of what is there.
"""

from __future__ import annotations

import logging
from pathlib import Path

from kvtier.calibration.documents import WorthDocument
from kvtier.calibration.keys import Key
from kvtier.calibration.store.directory import DIRECTORY, DirectoryStore, open_store, replace
from kvtier.config import Settings
from kvtier.config.sections import ScorerSettings
from kvtier.errors import CalibrationDocumentError, StoreError
from kvtier.heads.model.config import model_name, weights_revision

logger = logging.getLogger(__name__)

DEFAULT_RETENTION = 0.25
WORTH_FILE = "token_worth.npz"


def calibration_folder(settings: Settings, model_path: str, revision: str | None = None) -> Path:
    """Return the folder of a model's calibration. revision: the hub's name of a snapshot."""
    store = DirectoryStore(settings.data_dir / DIRECTORY)
    return store.folder(model_name(model_path), weights_revision(model_path, revision))


def fitted_worth(settings: Settings, model_path: str, revision: str | None = None) -> Path | None:
    """The map that was fitted to exactly these weights; None where there is none, and for weights
    that have no revision to tell them by. See `calibration_folder`."""
    weights = weights_revision(model_path, revision)
    if weights is None:
        return None
    file = calibration_folder(settings, model_path, revision) / WORTH_FILE
    if settings.redis.url is not None:
        _copy(settings, Key.of("worth", model_name(model_path), weights), file)
    return file if file.is_file() else None


def _copy(settings: Settings, key: Key, file: Path) -> None:
    """Let a file hold what the store does. Where that cannot be had it stays as it is."""
    try:
        with open_store(settings) as store:
            document = store.get(key, renew=True)
        if not isinstance(document, WorthDocument):
            return
        if not file.is_file() or file.read_bytes() != document.weights:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace(file, document.weights)
    except (StoreError, CalibrationDocumentError, OSError) as error:
        logger.warning("%s: %s; using the last known one", key, error)


def with_calibration(
    settings: Settings, model_path: str, *, revision: str | None = None, ranks: int = 1
) -> Settings:
    """The settings of a server of that model. Whatever was asked for stays as it is, but for a
    refresh where every head keeps everything: it has nothing to choose.

    ranks: of tensor parallelism; heads compete where each has at least one of them. Raises
    UsageError for a file that is no map.
    """
    scorer = _scorer_of_calibrated(settings, model_path, revision, ranks)
    if scorer is not None:
        share = settings.retention if settings.compacts else DEFAULT_RETENTION
        update = {"head_budgets": "adaptive", "scorer": scorer, "retention": share}
        return settings.model_copy(update=update)
    if settings.compacts:
        return settings
    refresh = settings.refresh.model_copy(update={"when": "off"})
    merge = settings.merge.model_copy(update={"form": "off"})
    return settings.model_copy(update={"refresh": refresh, "merge": merge})


def _scorer_of_calibrated(
    settings: Settings, model_path: str, revision: str | None, ranks: int
) -> ScorerSettings | None:
    """Return the scorer by which heads compete; None where they do not."""
    scorer, file = settings.scorer, settings.scorer.file
    if not settings.heads_may_compete:
        return None
    if scorer.name is None:
        file = file or fitted_worth(settings, model_path, revision)
    if file is None:
        return None
    # Only now, as scorers import torch.
    from kvtier.retention.scorers import SCORERS
    from kvtier.retention.scorers.reconstruction import Reconstruction
    from kvtier.retention.token_worth import TokenWorth

    name = scorer.name or Reconstruction.name
    if name not in SCORERS or not SCORERS[name].comparable:
        return None
    if ranks > TokenWorth.load(file).weights.shape[1]:
        return None
    return scorer.model_copy(update={"name": name, "file": file})
