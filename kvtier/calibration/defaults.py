"""What a server keeps of contexts where its settings leave that open.

Of a model that `kvtier calibrate` has seen, heads compete for a quarter of the entries; of any
other, every head keeps everything.

    DATA_DIR/calibration/MODEL/REVISION/token_worth.npz    what the map says a token is worth
                                        curve:POLICY.json  and what is there without a Redis
"""

from __future__ import annotations

from pathlib import Path

from kvtier.calibration.store.directory import DirectoryStore
from kvtier.calibration.store.opening import DIRECTORY
from kvtier.config import Settings
from kvtier.heads.model.config import model_name, weights_revision

DEFAULT_RETENTION = 0.25
WORTH_FILE = "token_worth.npz"


def calibration_folder(settings: Settings, model_path: str, revision: str | None = None) -> Path:
    """Where the calibration of a model is. revision: the hub's name of a snapshot."""
    store = DirectoryStore(settings.data_dir / DIRECTORY)
    return store.folder(model_name(model_path), weights_revision(model_path, revision))


def fitted_worth(settings: Settings, model_path: str, revision: str | None = None) -> Path | None:
    """The map that was fitted to exactly these weights; None where there is none, and for weights
    that have no revision to tell them by. See `calibration_folder`."""
    if weights_revision(model_path, revision) is None:
        return None
    file = calibration_folder(settings, model_path, revision) / WORTH_FILE
    return file if file.is_file() else None


def with_calibration(
    settings: Settings, model_path: str, *, revision: str | None = None, ranks: int = 1
) -> Settings:
    """The settings of a server of that model. Whatever was asked for stays as it is.

    ranks: of tensor parallelism; heads compete where each has at least one of them.
    """
    from kvtier.retention.scorers import SCORERS
    from kvtier.retention.scorers.reconstruction import Reconstruction

    if not settings.heads_may_compete:
        return settings
    scorer, file = settings.scorer, settings.scorer.file
    if scorer.name is None:
        file = file or fitted_worth(settings, model_path, revision)
    elif scorer.name not in SCORERS or not SCORERS[scorer.name].comparable:
        return settings
    if file is None or ranks > _kv_heads(file):
        return settings
    return settings.model_copy(
        update={
            "head_budgets": "adaptive",
            "scorer": scorer.model_copy(
                update={"name": scorer.name or Reconstruction.name, "file": file}
            ),
            "retention": settings.retention if settings.compacts else DEFAULT_RETENTION,
        }
    )


def _kv_heads(file: Path) -> int:
    """Of the model that a map was fitted to. Raises UsageError for another file."""
    from kvtier.retention.token_worth import TokenWorth

    return int(TokenWorth.load(file).weights.shape[1])


__all__ = [
    "DEFAULT_RETENTION",
    "WORTH_FILE",
    "calibration_folder",
    "fitted_worth",
    "with_calibration",
]
