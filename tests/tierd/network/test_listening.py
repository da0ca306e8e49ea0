"""The access to the service: by default this user alone has it, through a socket in a private
directory."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest
from live_tier import blob_of, connected, fetch, in_process, key_of, payload_of
from waiting import SAFETY_S, wait_for

from kvtier.errors import TierRefusedError, UsageError
from kvtier.tier.client import TierClient
from kvtier.tier.link.breaker import Breaker
from kvtier.tier.link.link import TierLink
from kvtier_tierd.options import TierOptions


def test_a_service_that_is_told_nothing_is_this_users_alone(tmp_path, monkeypatch):
    """A client that is told as little finds it; through shared memory as by the stream."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    command = [sys.executable, "-m", "kvtier_tierd", "--memory", "1m"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as service:
        try:
            said = service.stdout.readline()
            address = TierOptions().listen
            assert said == f"kvtier tier: memory store on {address}\n"
            assert stat.S_IMODE((tmp_path / "kvtier").stat().st_mode) == 0o700
            for number, shared in enumerate((True, False)):
                with TierClient(address, shared=shared, timeout_s=SAFETY_S) as client:
                    client.connect()
                    assert client.shares_memory == shared
                    assert client.put(blob_of(number))
                    assert fetch(client, [key_of(number)])[1] == {0: payload_of(number)}
        finally:
            service.terminate()


def test_a_directory_that_is_open_to_others_is_refused_whatever_it_is_for(tmp_path):
    for mode in (0o770, 0o707, 0o701, 0o710):
        directory = tmp_path / oct(mode)
        directory.mkdir()
        directory.chmod(mode)
        listen = f"unix:{directory}/tier.sock"
        refused = pytest.raises(UsageError, match=rf"--listen.*0700.*--insecure-local.*{directory}")
        with refused, in_process(listen=listen, insecure_local=False):
            pass
        assert list(directory.iterdir()) == []
        serving = in_process(listen=listen, insecure_local=True)
        with serving as tier, connected(tier):
            pass


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path):
    directory = tmp_path / "theirs"
    directory.mkdir(mode=0o700)
    os.chown(directory, 12345, 12345)
    with (
        pytest.raises(UsageError, match="--listen"),
        in_process(listen=f"unix:{directory}/tier.sock", insecure_local=False),
    ):
        pass


def test_what_is_no_directory_is_refused(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("file", "link"):
        with (
            pytest.raises(UsageError, match="--listen"),
            in_process(listen=f"unix:{tmp_path}/{name}/tier.sock", insecure_local=False),
        ):
            pass


def test_a_directory_that_is_missing_is_made_for_this_user_alone(tmp_path):
    before = os.umask(0)
    try:
        with in_process(listen=f"unix:{tmp_path}/a/b/tier.sock", insecure_local=False):
            assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    finally:
        os.umask(before)


def test_plaintext_for_every_user_of_the_machine_wants_an_explicit_yes():
    for listen in ("127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1"):
        with pytest.raises(UsageError, match="--insecure-local"):
            TierOptions(listen=listen)
        for yes in ("insecure_local", "insecure"):
            assert TierOptions(listen=listen, **{yes: True}).listen == listen


def test_plaintext_for_other_machines_wants_another():
    for listen in ("0.0.0.0:1", "[::]:1", "tier.example.com:1"):
        for given in ({}, {"insecure_local": True}):
            with pytest.raises(UsageError, match=r"--insecure\b(?!-)"):
                TierOptions(listen=listen, **given)
        assert TierOptions(listen=listen, insecure=True).listen == listen


class Owner:
    """A socket's: `another_user` or, to begin with and after `this_user`, who runs the tests."""

    def __init__(self, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self._patch = address.removeprefix("unix:"), monkeypatch
        self._user = os.geteuid()

    def _becomes(self, user: int) -> None:
        if self._user == 0:
            os.chown(self.path, user, -1)
        else:
            # A user who may not give it away becomes another one instead.
            other = self._user if user == self._user else self._user + 1
            self._patch.setattr(os, "geteuid", lambda: other)

    def another_user(self) -> None:
        self._becomes(12345)

    def this_user(self) -> None:
        self._becomes(self._user)


def test_a_socket_of_another_user_is_not_spoken_to(tmp_path, monkeypatch):
    listening = in_process(listen=f"unix:{tmp_path}/tier.sock")
    with listening as tier, TierClient(tier.address, timeout_s=SAFETY_S) as client:
        owner = Owner(tier.address, monkeypatch)
        client.connect()
        assert client.put(blob_of(1))
        owner.another_user()
        refused = rf"^tier unix:{tmp_path}/tier.sock: expected a socket of this user's"
        for call in (
            client.connect,
            lambda: client.put(blob_of(2)),
            lambda: client.exists([key_of(1)]),
            lambda: fetch(client, [key_of(1)]),
        ):
            with pytest.raises(TierRefusedError, match=refused):
                call()
        owner.this_user()
        assert list(client.exists([key_of(1), key_of(2)]).present) == [True, False]


def test_for_an_engine_it_is_a_tier_that_is_down_and_is_said_once(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "kvtier.tier.link.calls")
    with in_process(listen=f"unix:{tmp_path}/tier.sock") as tier:
        owner = Owner(tier.address, monkeypatch)
        owner.another_user()
        client = TierClient(tier.address, timeout_s=SAFETY_S)
        link = TierLink(client, buffer_bytes=1 << 20, breaker=Breaker(first_s=0.01, longest_s=0.05))
        try:
            for _ in range(3):
                asked = link.submit(lambda client: client.exists([key_of(1)]))
                assert asked.wait(SAFETY_S)
                assert asked.result is None
            wait_for(lambda: link.counters["probe_TierRefusedError"] > 5)
            assert not link.healthy
            (said,) = [one for one in caplog.records if "serving goes on" in one.getMessage()]
            assert said.levelname == "ERROR"
            assert f"{tmp_path}/tier.sock" in said.getMessage()
            owner.this_user()
            wait_for(lambda: link.healthy)
            assert caplog.text.count("tier.sock is back") == 1
            assert link.put([blob_of(1)]) == 1
            assert link.flush(SAFETY_S)
            assert link.counters["put"] == 1
        finally:
            link.close()
