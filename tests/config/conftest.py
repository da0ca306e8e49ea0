"""Tests of the settings run where no configuration file is."""

import pytest


@pytest.fixture(autouse=True)
def _no_outside_settings(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVTIER_CONFIG", raising=False)
