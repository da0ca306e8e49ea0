"""The choice of the calibration store that the settings mean."""

from __future__ import annotations

from kvtier.calibration.store.base import CalibrationStore
from kvtier.calibration.store.directory import DirectoryStore
from kvtier.config import Settings

DIRECTORY = "calibration"


def open_store(settings: Settings) -> CalibrationStore:
    """The Redis of `redis.url`; without one the files in `data_dir`."""
    if settings.redis.url is None:
        return DirectoryStore(settings.data_dir / DIRECTORY)
    from kvtier.calibration.store.redis import RedisStore

    return RedisStore(
        settings.redis.url.get_secret_value(),
        ca_certs=settings.redis.ca,
        certificate=settings.redis.certificate,
        key=settings.redis.key,
        timeout_s=settings.redis.timeout_s,
        ttl_s=settings.calibration.ttl_s,
    )


__all__ = ["open_store"]
