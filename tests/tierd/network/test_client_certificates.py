"""A client whose certificate is renewed while it runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from certificates import DAY, Pair
from live_tier import blob_of
from test_tier_tls import Tls
from waiting import SAFETY_S

from kvtier.errors import TierUnavailableError, UsageError
from kvtier.tier.client import TierClient, TlsPaths


@pytest.fixture
def tls(tmp_path):
    return Tls(tmp_path)


def written(tls: Tls, pair: Pair) -> TlsPaths:
    return TlsPaths(tls.ca, *pair.write(tls.folder, "client"))


def replaced(path: Path, content: bytes) -> None:
    """Replace a file as people do: a new file is moved into place."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    os.replace(new, path)


def test_a_renewed_certificate_is_used_for_the_next_connection(tls):
    paths = written(tls, tls.authority.issue("ada", valid=-DAY))
    with (
        tls.serving() as tier,
        TierClient(tier.address, "ada", timeout_s=SAFETY_S, tls=paths) as client,
    ):
        with pytest.raises(TierUnavailableError):
            client.connect()
        renewed = tls.authority.issue("ada")
        # Half of a renewal is none: the key is still the old one.
        replaced(paths.certificate, renewed.certificate)
        with pytest.raises(TierUnavailableError):
            client.connect()
        replaced(paths.key, renewed.key)
        assert client.connect().namespace == "ada"
        assert client.put(blob_of(1))


def test_a_connection_that_works_goes_on_while_files_make_no_sense(tls):
    paths = written(tls, tls.authority.issue("ada"))
    with (
        tls.serving() as tier,
        TierClient(tier.address, "ada", timeout_s=SAFETY_S, tls=paths) as client,
    ):
        client.connect()
        replaced(paths.certificate, b"nonsense")
        paths.key.unlink()
        client.connect()
        assert client.put(blob_of(1))


def test_files_that_do_not_belong_together_are_refused_at_once(tls):
    paths = written(tls, tls.authority.issue("ada"))
    replaced(paths.key, tls.authority.issue("ada").key)
    with pytest.raises(UsageError, match=r"^tier.certificate: expected"):
        TierClient("127.0.0.1:1", "ada", tls=paths, timeout_s=SAFETY_S)
