"""The Redis of deploy/base/redis, run from its configuration: kvtier can do what it does there, by
its certificate alone, and nothing else."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from calibration_samples import curve_document
from live_server import free_port
from tls_redis import needs_tls_binary, write_certificates
from waiting import wait_for

from deploy.checks.rendering import DEPLOY
from kvtier.calibration.store.directory import open_store
from kvtier.config import load_settings
from kvtier.errors import StoreUnavailableError

CONFIGURATION = DEPLOY / "base" / "redis" / "valkey.conf"
FILES = {"CA": "ca.crt", "CERTIFICATE": "tls.crt", "KEY": "tls.key"}


def certificates(folder: Path) -> Path:
    """Make certificates with the names that they have in the deployment."""
    write_certificates(folder)
    for ours, theirs in zip(("ca.pem", "server.pem", "server.key"), FILES.values(), strict=True):
        (folder / ours).rename(folder / theirs)
    return folder


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """Start the deployed Redis and yield its port, and the folder of its certificates."""
    binary, port = needs_tls_binary(), free_port()
    folder = certificates(tmp_path_factory.mktemp("certificates"))
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
        asked = client(port, folder)

        def answers() -> bool:
            assert server.poll() is None, "the server ended"
            try:
                return bool(asked.ping())
            except redis.ConnectionError:
                return False

        wait_for(answers)
        yield port, folder
    finally:
        server.kill()
        server.wait()


def client(port: int, folder: Path, host: str = "127.0.0.1") -> Any:
    ca, certificate, key = (str(folder / name) for name in FILES.values())
    return redis.Redis(
        host=host,
        port=port,
        ssl=True,
        ssl_check_hostname=host == "127.0.0.1",
        ssl_ca_certs=ca,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )


def test_calibrations_are_stored_with_the_certificate_of_production_and_no_other(
    deployed, monkeypatch, tmp_path
):
    port, folder = deployed
    mine = certificates(tmp_path / "of another authority")
    # deploy/overlays/production sets them so.
    monkeypatch.setenv("KVTIER_REDIS_URL", f"rediss://127.0.0.1:{port}/0")
    monkeypatch.setenv("KVTIER_REDIS_CA", str(folder / FILES["CA"]))
    with open_store(load_settings()) as store, pytest.raises(StoreUnavailableError):
        store.list()
    for name in ("CERTIFICATE", "KEY"):
        monkeypatch.setenv(f"KVTIER_REDIS_{name}", str(mine / FILES[name]))
    with open_store(load_settings()) as store:
        with pytest.raises(StoreUnavailableError):
            store.list()
        # A renewed certificate is taken over by the client that is there.
        for name in ("CERTIFICATE", "KEY"):
            shutil.copy(folder / FILES[name], mine)
        key = store.put(curve_document())
        assert store.get(key) is not None
        assert [stored.key for stored in store.list()] == [key]
        assert store.delete(key)


def test_a_client_of_another_host_is_let_in_by_its_certificate(deployed):
    """The image decides otherwise: without a password, some refuse who does not come from here."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as elsewhere:
        try:
            elsewhere.connect(("192.0.2.1", 9))  # sends nothing
        except OSError as error:
            pytest.skip(f"no address but the loopback: {error}")
        host = elsewhere.getsockname()[0]
    assert client(*deployed, host).ping()


@pytest.mark.parametrize(
    "command",
    [
        "SET other:key 1", "CONFIG GET *", "FLUSHALL", "EVAL return 0", "SHUTDOWN", "ACL LIST",
        "KEYS *", "SUBSCRIBE kvtier",
    ],
)  # fmt: skip
def test_with_one_only_what_kvtier_does_is_allowed(deployed, command):
    with pytest.raises(redis.exceptions.NoPermissionError):
        client(*deployed).execute_command(*command.split())
