"""`kvtier tier`: what it refuses and how it says so, how it starts, and how it ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from live_tier import blob_of, connected, fetch, header_of, key_of, live_tier, payload_of, raw_stub
from waiting import SAFETY_S, wait_for

from kvtier.errors import KvtierError
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd.cli import parse
from kvtier_tierd.limits import Limits
from kvtier_tierd.options import TierOptions

SMALL = ("--memory", "1m", "--shared-memory", "off", "--insecure-local")


def tierd(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m kvtier_tierd`, expected to end by itself."""
    command = [sys.executable, "-m", "kvtier_tierd", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=SAFETY_S)


def refusal(*arguments: str) -> str:
    """Return what the user is told; refused by exit code 2 and without a traceback."""
    done = tierd(*arguments)
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return done.stderr


# ---- what it is told


def test_the_command_is_part_of_kvtier_and_explains_itself():
    binary = Path(sys.executable).with_name("kvtier")
    done = subprocess.run(
        [binary, "tier", "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith("usage: kvtier tier")
    for flag in ("--listen", "--store", "--memory", "--namespace", "--client-ca", "--drain-s"):
        assert flag in done.stdout
    listed = subprocess.run(
        [binary, "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    assert "kvtier tier --help" in " ".join(listed.stdout.split())


def test_the_defaults_of_the_command_are_those_of_the_options():
    assert parse(["--shared-memory", "off"]) == TierOptions()


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--listen", "127.0.0.1"),
        ("--listen", ":7311"),
        ("--listen", "127.0.0.1:http"),
        ("--listen", "127.0.0.1:65536"),
        ("--listen", "::1:7311"),
        ("--listen", "unix:"),
        ("--listen", "127.example.com:7311"),
        ("--memory", "0"),
        ("--memory", "much"),
        ("--disk", "all"),
        ("--mooncake-master", "nowhere"),
        ("--mooncake-replicas", "few"),
        ("--max-blob", "0"),
        ("--shared-memory", "/no/such/directory"),
        ("--namespace", "=1g"),
        ("--namespace", "ada=much"),
        ("--namespace", "ada=2g,fast"),
        ("--namespace", "a\tb"),
        ("--in-flight", "0"),
        ("--in-flight", "few"),
        ("--refresh-workers", "-1"),
        ("--metrics-port", "65536"),
        ("--metrics-host", "192.0.2.1"),
        ("--transfer-memory", "1g"),
        ("--stall-s", "0"),
        ("--drain-s", "nan"),
        ("--certificate", "/no/such.pem"),
        ("--key", "/no/such.pem"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_naming_its_flag(flag, value, capsys):
    with pytest.raises((KvtierError, SystemExit)) as caught:
        parse([f"{flag}={value}"])
    said = str(caught.value) + capsys.readouterr().err
    assert {"--key": "--certificate"}.get(flag, flag) in said
    if isinstance(caught.value, SystemExit):
        assert caught.value.code == 2


def test_flags_that_do_not_go_together_are_refused_naming_one(tmp_path, capsys):
    pem = tmp_path / "x.pem"
    pem.write_text("nonsense")
    tls = [f"--{name}={pem}" for name in ("certificate", "key", "client-ca")]
    for flags, named in (
        (["--store=disk"], "--disk-path"),
        (["--store=memory+disk"], "--disk-path"),
        ([tls[0], tls[1]], "--client-ca"),
        ([*tls, "--listen=unix:/tmp/t"], "--listen"),
        ([*tls, "--listen=127.0.0.1:0", *SMALL], "--certificate"),
        (["--namespace=ada", "--namespace=ada=1g"], "--namespace"),
        (["--no-such-flag"], "--no-such-flag"),
    ):
        assert named in refusal(*flags), flags


def test_namespaces_have_their_quota_and_rate_and_all_have_the_in_flight_limit():
    told = ["--namespace=ada=2g,64m", "--namespace=bob=,1m", "--namespace=carl", "--in-flight=3"]
    options = parse(["--shared-memory=off", *told])
    assert options.quotas() == {"ada": 2 << 30}
    assert options.namespaces == {
        "ada": Limits(2 << 30, 3, 64 << 20),
        "bob": Limits(None, 3, 1 << 20),
        "carl": Limits(None, 3),
    }
    assert parse(["--shared-memory=off", "--in-flight=3"]).served().limits("dora").in_flight == 3


# ---- how it starts


def test_a_port_in_use_is_said_clearly_and_no_file_is_left_behind(tmp_path):
    directory = tmp_path / "shm"
    directory.mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = ("--insecure-local", "--memory=1m", f"--shared-memory={directory}")
        assert f"--listen {address}" in refusal("--listen", address, *flags)
        assert list(directory.iterdir()) == []
        port = address.rpartition(":")[2]
        said = refusal("--listen", "127.0.0.1:0", "--metrics-port", port, *SMALL)
        assert f"--metrics-port {port}" in said
    with live_tier(tmp_path, *SMALL) as tier:
        assert "--listen" in refusal("--listen", tier.address, *SMALL), "nor shared by two tiers"


def test_a_socket_that_a_tier_listens_on_is_not_taken_from_it(tmp_path):
    listen = f"unix:{tmp_path}/t"
    with live_tier(tmp_path, *SMALL, listen=listen) as tier:
        assert "--listen" in refusal("--listen", listen, *SMALL)
        with connected(tier):
            tier.kill()
        tier.start()
        with connected(tier):
            pass


def test_a_store_that_cannot_be_opened_is_said_clearly(tmp_path):
    file = tmp_path / "file"
    file.touch()
    listen = ("--listen=127.0.0.1:0", "--insecure-local")
    said = refusal(*listen, "--store=disk", f"--disk-path={file}/d")
    assert str(file) in said
    said = refusal(*listen, "--memory=1000000g", f"--shared-memory={tmp_path}")
    assert "--memory" in said
    assert list(tmp_path.iterdir()) == [file]


# ---- how it ends


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_it_well(tmp_path, number):
    directory = tmp_path / "shm"
    directory.mkdir()
    flags = ("--memory", "1m", "--shared-memory", str(directory))
    with live_tier(tmp_path, *flags) as tier, raw_stub(tier.address) as stub:
        half_done, go_on = threading.Event(), threading.Event()

        def half():
            yield pb.PutRequest(header=header_of(blob_of(1)))
            half_done.set()
            go_on.wait(SAFETY_S)
            yield pb.PutRequest(chunk=payload_of(1))

        running = stub.Put.future(half())
        assert half_done.wait(SAFETY_S)
        wait_for(lambda: stub.Stats(pb.StatsRequest()).capacity_bytes > 0)
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
