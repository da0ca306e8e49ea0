"""Addresses of a tier: what both ends take for the default one, and what cannot be one."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvtier.addresses as address_module
from kvtier.addresses import default_address, socket_path
from kvtier.config import load_settings
from kvtier.errors import ConfigurationError, UsageError
from kvtier_tierd.options import TierOptions


def test_both_ends_have_the_same_default_address(tmp_path, monkeypatch):
    """It is in the session's runtime directory, for a service that cron starts, too; in the data
    directory where there is none."""
    monkeypatch.setattr(address_module, "RUNTIME_DIRECTORIES", tmp_path)
    monkeypatch.setattr(address_module.os, "getuid", lambda: 12)
    monkeypatch.setenv("KVTIER_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "session").mkdir()

    def found(runtime: Path | str) -> str:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        return default_address()

    assert found(tmp_path / "session") == f"unix:{tmp_path}/session/kvtier/tier.sock"
    assert TierOptions().listen == default_address()
    assert load_settings(tier="default").tier.address == default_address()
    for missing in ("", tmp_path / "not there"):
        assert found(missing) == f"unix:{tmp_path}/data/run/tier.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_address() == f"unix:{tmp_path}/data/run/tier.sock"
    (tmp_path / "12").mkdir()
    assert default_address() == f"unix:{tmp_path}/12/kvtier/tier.sock"


def test_settings_take_what_can_be_an_address_and_nothing_else():
    for tier in ("localhost:7311", "[::1]:7311", "unix:/run/tier.sock", "kvtier-tier.ns.svc:7311"):
        assert load_settings(tier=tier).tier.address == tier
    for tier in (
        *("", "unix:", "unix:/" + "x" * 107),
        *("local", "http://kvtier-tier:7070", "kvtier-tier:port", "kvtier-tier:65536", ":7311"),
        *("::1:7311", "[::1]", "kvtier-tier:7311/"),
    ):
        with pytest.raises(ConfigurationError, match="tier"):
            load_settings(tier=tier)
    assert socket_path("localhost:7311") is None
    assert socket_path("unix:/run/tier.sock") == Path("/run/tier.sock")
    with pytest.raises(UsageError, match="address"):
        socket_path("unix:")


@pytest.mark.parametrize("name", ["ca", "certificate", "key"])
def test_a_unix_socket_takes_no_certificates(tmp_path, name):
    pem = tmp_path / "x.pem"
    pem.write_text("nonsense")
    files = dict.fromkeys(("tier_ca", "tier_certificate", "tier_key"), str(pem))
    assert load_settings(tier="localhost:7311", **files).tier.ca == pem
    for some in (files, {f"tier_{name}": str(pem)}):
        with pytest.raises(ConfigurationError, match="host:port"):
            load_settings(tier="unix:/run/tier.sock", **some)
