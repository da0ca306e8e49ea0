"""Which calibration store the settings mean."""

from __future__ import annotations

from kvtier.calibration.store.base import CalibrationStore
from kvtier.calibration.store.redis import RedisStore
from kvtier.config import Settings


def open_store(settings: Settings) -> CalibrationStore:
    """The Redis of `redis.url`; without one the embedded server of `data_dir`, when first used."""
    if settings.redis.url is not None:
        return RedisStore(
            settings.redis.url.get_secret_value(),
            ca_certs=settings.redis.ca,
            certificate=settings.redis.certificate,
            key=settings.redis.key,
            timeout_s=settings.redis.timeout_s,
            ttl_s=settings.calibration.ttl_s,
        )
    from kvtier.calibration.store.embedded import EmbeddedStore

    return EmbeddedStore(
        settings.data_dir, timeout_s=settings.redis.timeout_s, ttl_s=settings.calibration.ttl_s
    )


__all__ = ["open_store"]
