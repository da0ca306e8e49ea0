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
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_address() == f"unix:{tmp_path}/kvtier/tier.sock"
    assert TierOptions().listen == default_address()
    assert load_settings(tier="default").tier.address == default_address()


def test_without_a_runtime_directory_it_is_in_the_data_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(address_module, "RUNTIME_DIRECTORIES", tmp_path / "none")
    monkeypatch.setenv("KVTIER_DATA_DIR", str(tmp_path / "data"))
    for missing in (None, "", str(tmp_path / "not there")):
        if missing is None:
            monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        else:
            monkeypatch.setenv("XDG_RUNTIME_DIR", missing)
        assert default_address() == f"unix:{tmp_path}/data/run/tier.sock"


def test_without_the_variable_of_a_session_it_is_still_the_sessions(tmp_path, monkeypatch):
    """A service that cron starts finds what a login has started."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(address_module, "RUNTIME_DIRECTORIES", tmp_path)
    monkeypatch.setattr(address_module.os, "getuid", lambda: 12)
    (tmp_path / "12").mkdir()
    assert default_address() == f"unix:{tmp_path}/12/kvtier/tier.sock"


def test_settings_take_any_address_that_can_be_one():
    for tier in ("localhost:7311", "[::1]:7311", "unix:/run/tier.sock", "local"):
        assert load_settings(tier=tier).tier.address == tier


@pytest.mark.parametrize("tier", ["", "unix:", "unix:/" + "x" * 107])
def test_settings_refuse_an_address_that_cannot_be_one(tier):
    with pytest.raises(ConfigurationError, match="tier"):
        load_settings(tier=tier)


def test_the_path_of_a_socket_is_none_of_a_port():
    assert socket_path("localhost:7311") is None
    assert socket_path("unix:/run/tier.sock") == Path("/run/tier.sock")
    with pytest.raises(UsageError, match="address"):
        socket_path("unix:")
