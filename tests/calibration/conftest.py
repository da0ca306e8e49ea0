"""Fixtures of the calibration tests: a real Redis, emptied between tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis_server import RedisServer, redis_server
from waiting import SAFETY_S

from kvtier.calibration.store.redis import RedisStore


@pytest.fixture(autouse=True)
def _no_outside_settings(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """No test reads or writes the calibrations of the user who runs it."""
    monkeypatch.chdir(tmp_path)
    for name in ("CONFIG", "REDIS_URL", "REDIS_CA", "REDIS_CERTIFICATE", "REDIS_KEY"):
        monkeypatch.delenv(f"KVTIER_{name}", raising=False)
    monkeypatch.setenv("KVTIER_DATA_DIR", str(tmp_path / "data"))


@pytest.fixture(scope="session")
def shared_server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    """A server that others use too: tests that break it start their own."""
    shared_server.admin.flushall()
    shared_server.admin.config_resetstat()
    return shared_server


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    with RedisStore(server.url, timeout_s=SAFETY_S, ttl_s=1000) as opened:
        yield opened
