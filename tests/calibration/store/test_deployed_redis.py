"""The Redis of deploy/base/redis, run from its configuration: kvtier can do what it does there, by
its certificate alone, and nothing else."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from calibration_samples import curve_document
from live_server import free_port
from test_redis_tls import needs_tls_binary, write_certificates
from waiting import wait_for

from deploy.checks.rendering import DEPLOY
from kvtier.calibration.store.opening import open_store
from kvtier.config import load_settings
from kvtier.errors import StoreUnavailableError

CONFIGURATION = DEPLOY / "base" / "redis" / "valkey.conf"


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """Start the deployed Redis and yield its port, and the folder of its certificates."""
    binary, port = needs_tls_binary(), free_port()
    folder = tmp_path_factory.mktemp("certificates")
    write_certificates(folder, ["127.0.0.1"])
    for ours, theirs in (
        ("server.pem", "tls.crt"),
        ("server.key", "tls.key"),
        ("ca.pem", "ca.crt"),
    ):
        (folder / ours).rename(folder / theirs)
    written = tmp_path_factory.mktemp("redis") / "valkey.conf"
    # The container's volumes are moved to folders here, and its port to one that is free.
    text = CONFIGURATION.read_text()
    for old, new in (
        ("/certificates", str(folder)),
        ("dir /data", f"dir {written.parent}"),
        ("tls-port 6379", f"tls-port {port}"),
    ):
        assert old in text
        text = text.replace(old, new)
    written.write_text(text)
    server = subprocess.Popen([binary, str(written)], stdout=subprocess.DEVNULL)
    try:
        wait_until_it_answers(client(port, folder), server)
        yield port, folder
    finally:
        server.kill()
        server.wait()


def client(port: int, folder: Path) -> Any:
    return redis.Redis(
        host="127.0.0.1",
        port=port,
        ssl=True,
        ssl_ca_certs=str(folder / "ca.crt"),
        ssl_certfile=str(folder / "tls.crt"),
        ssl_keyfile=str(folder / "tls.key"),
    )


def wait_until_it_answers(one: Any, server: subprocess.Popen[bytes]) -> None:
    def answers() -> bool:
        assert server.poll() is None, "the server ended"
        try:
            return bool(one.ping())
        except redis.ConnectionError:
            return False

    wait_for(answers)


@pytest.fixture
def settings(deployed, monkeypatch) -> None:
    """Set the settings as deploy/overlays/production does."""
    port, folder = deployed
    monkeypatch.setenv("KVTIER_REDIS_URL", f"rediss://127.0.0.1:{port}/0")
    for name, file in (("CA", "ca.crt"), ("CERTIFICATE", "tls.crt"), ("KEY", "tls.key")):
        monkeypatch.setenv(f"KVTIER_REDIS_{name}", str(folder / file))


def test_calibrations_are_stored_listed_read_and_deleted(settings):
    with open_store(load_settings()) as store:
        key = store.put(curve_document())
        assert store.get(key) is not None
        assert [stored.key for stored in store.list()] == [key]
        assert store.delete(key)


def test_without_a_certificate_nothing_is_answered(settings, monkeypatch):
    for name in ("CERTIFICATE", "KEY"):
        monkeypatch.delenv(f"KVTIER_REDIS_{name}")
    with open_store(load_settings()) as store, pytest.raises(StoreUnavailableError):
        store.list()


@pytest.mark.parametrize(
    "command",
    [
        ["SET", "other:key", "1"],
        ["CONFIG", "GET", "*"],
        ["FLUSHALL"],
        ["EVAL", "return 1", "0"],
        ["SHUTDOWN"],
        ["ACL", "LIST"],
        ["KEYS", "*"],
        ["SUBSCRIBE", "kvtier"],
    ],
    ids=lambda words: words[0],
)
def test_with_one_only_what_kvtier_does_is_allowed(deployed, command):
    with pytest.raises(redis.exceptions.NoPermissionError):
        client(*deployed).execute_command(*command)
