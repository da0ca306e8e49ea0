"""The access to the service: by default this user alone has it, through a socket in a private
directory."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import grpc._cython.cygrpc as cygrpc
import pytest
from live_tier import blob_of, connected, fetch, in_process, key_of, payload_of
from waiting import SAFETY_S, wait_for

from kvtier.errors import TierRefusedError, UsageError
from kvtier.tier.client import TierClient
from kvtier.tier.link.breaker import Breaker
from kvtier.tier.link.link import TierLink
from kvtier.tier.transport.connection import OPTIONS
from kvtier_tierd.options import TierOptions
from kvtier_tierd.server import _channel_options


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


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o701, 0o710])
def test_a_directory_that_is_open_to_others_is_refused_whatever_it_is_for(tmp_path, mode):
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(mode)
    listen = f"unix:{directory}/tier.sock"
    refused = pytest.raises(UsageError, match=rf"--listen.*0700.*--insecure-local.*{directory}")
    with refused, in_process(listen=listen, insecure_local=False):
        pass
    assert list(directory.iterdir()) == []
    with in_process(listen=listen, insecure_local=True) as tier, connected(tier):
        pass


def test_what_is_no_directory_of_this_users_is_refused_and_what_is_missing_is_made(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    names = ["file", "link"]
    if os.geteuid() == 0:
        (tmp_path / "theirs").mkdir(mode=0o700)
        os.chown(tmp_path / "theirs", 12345, 12345)
        names.append("theirs")
    for name in names:
        with (
            pytest.raises(UsageError, match="--listen"),
            in_process(listen=f"unix:{tmp_path}/{name}/tier.sock", insecure_local=False),
        ):
            pass
    before = os.umask(0)
    try:
        with in_process(listen=f"unix:{tmp_path}/a/b/tier.sock", insecure_local=False):
            assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("listen", "not_enough", "enough"),
    [
        *((f"{local}:1", [{}], "insecure_local")
          for local in ("127.0.0.1", "127.9.9.9", "localhost", "[::1]")),
        *((f"{other}:1", [{}, {"insecure_local": True}], "insecure")
          for other in ("0.0.0.0", "[::]", "tier.example.com")),
    ],
)  # fmt: skip
def test_plaintext_for_others_wants_an_explicit_yes(listen, not_enough, enough):
    """One for all users of this machine, another for other machines, which means both."""
    flag = "--" + enough.replace("_", "-")
    for given in not_enough:
        with pytest.raises(UsageError, match=rf"{flag}\b(?!-)"):
            TierOptions(listen=listen, **given)
    for yes in {enough, "insecure"}:
        assert TierOptions(listen=listen, **{yes: True}).listen == listen


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


def test_a_socket_of_another_user_is_not_spoken_to(tmp_path, monkeypatch, caplog):
    """For an engine it is a tier that is down, which is said once."""
    caplog.set_level("INFO", "kvtier.tier.link.calls")
    with (
        in_process(listen=f"unix:{tmp_path}/tier.sock") as tier,
        TierClient(tier.address, timeout_s=SAFETY_S) as client,
    ):
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
        engines = TierClient(tier.address, timeout_s=SAFETY_S)
        breaker = Breaker(first_s=0.01, longest_s=0.05)
        link = TierLink(engines, buffer_bytes=1 << 20, breaker=breaker)
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
            assert link.put([blob_of(3)]) == 1
            assert link.flush(SAFETY_S)
        finally:
            link.close()
        numbers = (1, 2, 3)
        assert client.exists([key_of(n) for n in numbers]).present == [True, False, True]


# The pattern is that of an option's name, and of nothing else in the sources: health's service has
# capitals.
OPTION = re.compile(r"""["'](grpc\.[a-z0-9_.]+)["']""")


def test_grpc_knows_every_option_that_is_passed_to_it():
    """It ignores one that it does not know, so each is looked up in gRPC's own binary."""
    root = Path(__file__).resolve().parents[3]
    folders = (root / name for name in ("kvtier", "services", "sglang_patches", "benchmarks"))
    files = (path for folder in folders for path in folder.rglob("*.py"))
    passed = {name for path in files for name in OPTION.findall(path.read_text())}
    ours, allowed = dict(OPTIONS), dict(_channel_options(TierOptions()))
    assert {*ours, *allowed} <= passed, "the search finds what is passed"
    binary = Path(cygrpc.__file__).read_bytes()
    known = {name.decode() for name in re.findall(rb"grpc\.[a-z0-9_.]+(?=\0)", binary)}
    assert sorted(passed - known) == []
    # A server ends the connection of a client that pings it more often than it allows, and pings
    # that were delayed come closer together.
    least_ms = allowed["grpc.http2.min_ping_interval_without_data_ms"]
    assert least_ms <= ours["grpc.keepalive_time_ms"] / 2
