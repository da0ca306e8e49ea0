"""`kvtier tier`: what it refuses and how it says so, how it starts, and how it ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import pytest
from live_tier import (
    InProcessTier,
    blob_of,
    connected,
    fetch,
    in_process,
    key_of,
    live_tier,
    payload_of,
    raw_stub,
    stalled_put,
)
from waiting import SAFETY_S

from kvtier.errors import KvtierError, TierError
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd.cli import parse
from kvtier_tierd.limits import Limits

SMALL = ("--memory", "1m", "--shared-memory", "off", "--insecure-local")


# ---- what it is told


@pytest.mark.parametrize(("flag", "value"), [
    ("--listen", "127.0.0.1"), ("--listen", ":7311"), ("--listen", "127.0.0.1:http"),
    ("--listen", "127.0.0.1:65536"), ("--listen", "::1:7311"), ("--listen", "unix:"),
    ("--listen", "127.example.com:7311"),
    ("--store", "tape"), ("--memory", "0"), ("--memory", "much"), ("--disk", "all"),
    ("--mooncake-master", "nowhere"), ("--mooncake-metadata", "etcd"),
    ("--mooncake-segment", "1"), ("--mooncake-buffer", "0"), ("--mooncake-replicas", "few"),
    ("--mooncake-replicas", "0"),
    ("--max-blob", "0"), ("--shared-memory", "/no/such/directory"),
    ("--namespace", "=1g"), ("--namespace", "ada=much"), ("--namespace", "ada=2g,fast"),
    ("--namespace", "a\tb"),
    ("--in-flight", "0"), ("--in-flight", "few"),
    ("--metrics-port", "65536"), ("--metrics-host", "192.0.2.1"), ("--metrics-host", ""),
    ("--transfer-memory", "1g"),
    ("--stall-s", "0"), ("--drain-s", "nan"),
    ("--certificate", "/no/such.pem"), ("--key", "/no/such.pem"),
])  # fmt: skip
def test_a_value_that_makes_no_sense_is_refused_naming_its_flag(flag, value, capsys):
    with pytest.raises((KvtierError, SystemExit)) as caught:
        parse([f"{flag}={value}"])
    said = str(caught.value) + capsys.readouterr().err
    assert {"--key": "--certificate"}.get(flag, flag) in said
    if isinstance(caught.value, SystemExit):
        assert caught.value.code == 2


def test_flags_that_do_not_go_together_are_refused_naming_one(tmp_path):
    pem = tmp_path / "x.pem"
    pem.write_text("nonsense")
    tls = [f"--{name}={pem}" for name in ("certificate", "key", "client-ca")]
    for flags, named in (
        (["--store=disk"], "--disk-path"),
        (["--store=memory+disk"], "--disk-path"),
        (["--store=mooncake", "--mooncake-segment=0"], "--mooncake-capacity"),
        (["--disk=1g"], "--disk: expected --store disk or memory\\+disk"),
        ([f"--disk-path={tmp_path}", "--memory=1m"], "--disk-path: .*memory\\+disk.*got 'memory'"),
        (["--store=disk", f"--disk-path={tmp_path}", "--memory=4g"], "--memory: .*got 'disk'"),
        (["--store=memory+disk", "--mooncake-segment=1g"], "--mooncake-segment: .*mooncake"),
        ([tls[0], tls[1]], "--client-ca"),
        ([*tls, "--listen=unix:/tmp/t"], "--listen"),
        ([*tls, "--listen=127.0.0.1:0", "--memory=1m"], "--certificate"),
        (["--namespace=ada", "--namespace=ada=1g"], "--namespace"),
    ):
        with pytest.raises(KvtierError, match=named):
            InProcessTier(parse(["--shared-memory=off", *flags]))


def test_namespaces_have_their_quota_and_rate_and_all_have_the_in_flight_limit():
    told = ["--namespace=ada=2g,64m", "--namespace=bob=,1m", "--namespace=carl", "--in-flight=3"]
    options = parse(["--shared-memory=off", *told])
    assert options.served().quotas() == {"ada": 2 << 30}
    assert options.namespaces == {
        "ada": Limits(2 << 30, 3, 64 << 20),
        "bob": Limits(None, 3, 1 << 20),
        "carl": Limits(None, 3),
    }
    assert parse(["--shared-memory=off", "--in-flight=3"]).served().limits("dora").in_flight == 3


# ---- how it starts


def refused(*flags: str) -> str:
    """Return why a service does not start."""
    with pytest.raises(TierError) as caught:
        InProcessTier(parse(flags))
    return str(caught.value)


def test_an_address_in_use_is_said_clearly_and_no_file_is_left_behind(tmp_path):
    directory = tmp_path / "shm"
    directory.mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "kvtier_tierd", "--insecure-local", "--memory=1m"]
        command += [f"--shared-memory={directory}", f"--listen={address}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SAFETY_S)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"--listen {address}" in done.stderr
        assert "Traceback" not in done.stderr
        assert list(directory.iterdir()) == []
        port = address.rpartition(":")[2]
        said = refused("--listen=127.0.0.1:0", f"--metrics-port={port}", *SMALL)
        assert f"--metrics-port {port}" in said
    with in_process() as tier:
        assert "--listen" in refused(f"--listen={tier.address}", *SMALL), "nor shared by two tiers"


def test_a_socket_that_a_tier_listens_on_is_not_taken_from_it(tmp_path):
    listen = f"unix:{tmp_path}/t"
    with live_tier(tmp_path, *SMALL, listen=listen) as tier:
        assert "--listen" in refused(f"--listen={listen}", *SMALL)
        with connected(tier):
            tier.kill()
        tier.start()
        with connected(tier):
            pass


def test_a_store_that_cannot_be_opened_is_said_clearly(tmp_path):
    file = tmp_path / "file"
    file.touch()
    listen = ("--listen=127.0.0.1:0", "--insecure-local")
    disk = ("--store=disk", f"--disk-path={file}/d", "--shared-memory=off")
    assert str(file) in refused(*listen, *disk)
    assert "--memory" in refused(*listen, "--memory=1000000g", f"--shared-memory={tmp_path}")
    assert list(tmp_path.iterdir()) == [file]


# ---- how it ends


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_it_well(tmp_path, number):
    directory = tmp_path / "shm"
    directory.mkdir()
    flags = ("--memory", "1m", "--shared-memory", str(directory))
    with (
        live_tier(tmp_path, *flags) as tier,
        raw_stub(tier.address) as stub,
        stalled_put(stub, 1) as (running, go_on),
    ):
        # It was asked for later, so the put is under way when it is answered.
        stub.Stats(pb.StatsRequest())
        process = tier.process
        tier.signal(number)
        assert process.stdout.readline().strip() == "kvtier tier: draining"
        go_on.set()
        assert running.result().stored, "what runs may end"
        assert tier.wait() == 0
    assert "Traceback" not in tier.log.read_text()
    assert list(directory.iterdir()) == []


def test_the_process_that_started_it_may_stop_listening(tmp_path):
    with live_tier(tmp_path, *SMALL) as tier:
        tier.process.stdout.close()
        assert tier.terminate() == 0
    assert "Error" not in tier.log.read_text()


def test_a_disk_store_outlives_its_server(tmp_path):
    flags = ("--store", "memory+disk", "--memory", "1m", "--disk-path", str(tmp_path / "disk"))
    with live_tier(tmp_path, *flags) as tier:
        with connected(tier) as client:
            assert client.put(blob_of(1))
        assert tier.terminate() == 0
        tier.start()
        with connected(tier) as client:
            assert fetch(client, [key_of(1)])[1] == {0: payload_of(1)}
