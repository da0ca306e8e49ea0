"""gRPC ignores an option that it does not know: every name is looked up in gRPC's own binary."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import grpc
import grpc._cython.cygrpc as cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from live_tier import in_process
from tierd.faults.tcp_proxy import tcp_proxy
from waiting import wait_for

from kvtier.tier.transport import connection as connection_module
from kvtier_tierd import server as server_module
from kvtier_tierd.options import TierOptions

REPOSITORY = Path(__file__).resolve().parents[3]
FOLDERS = ("kvtier", "services", "sglang_patches", "benchmarks", "examples", "tests")
# The pattern is that of an option's name, and of nothing else in the sources: health's service has
# capitals.
NAME = re.compile(r"grpc\.[a-z0-9_.]+")


def known_names() -> set[str]:
    """Return whatever looks like an option in the shared object of gRPC."""
    binary = Path(cygrpc.__file__).read_bytes()
    return {name.decode() for name in re.findall(rb"grpc\.[a-z0-9_.]+(?=\0)", binary)}


def passed_names() -> set[str]:
    """Options in our sources: the first of a tuple of two, or a key of a dictionary."""
    names = set()
    for folder in FOLDERS:
        for path in (REPOSITORY / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names |= {name for name in literals(node) if NAME.fullmatch(name)}
    return names


def literals(node: ast.AST) -> set[str]:
    """Strings where the name of an option would be."""
    places: list[ast.expr | None] = []
    if isinstance(node, ast.Tuple) and len(node.elts) == 2:
        places = [node.elts[0]]
    elif isinstance(node, ast.Dict):
        places = node.keys
    constants = [place.value for place in places if isinstance(place, ast.Constant)]
    return {value for value in constants if isinstance(value, str)}


def test_grpc_knows_every_option_that_is_passed_to_it():
    passed = passed_names()
    for options in (connection_module.OPTIONS, server_module._channel_options(TierOptions())):
        assert {name for name, _ in options} <= passed, "the search finds what is passed"
    assert sorted(passed - known_names()) == []


def test_a_client_that_is_idle_keeps_its_connection(monkeypatch):
    """The client sends a ping a second, the most that gRPC does: it ends a connection at the fourth
    that comes sooner than the server allows, and its default for that is five minutes."""
    monkeypatch.setattr(server_module, "MIN_PING_INTERVAL_MS", 500, raising=False)
    states = []
    options = dict(connection_module.OPTIONS) | {
        "grpc.keepalive_time_ms": 200,
        "grpc.http2.max_pings_without_data": 0,
    }
    with (
        in_process() as tier,
        tcp_proxy(tier.address, keep=True) as proxy,
        grpc.insecure_channel(proxy.address, [*options.items()]) as channel,
    ):
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        channel.subscribe(states.append)
        wait_for(lambda: pings(proxy.sent) >= 6)
        channel.unsubscribe(states.append)
    assert set(states) == {grpc.ChannelConnectivity.READY}


def pings(sent: bytes) -> int:
    """PING frames that a client has sent, and not in answer to one (RFC 9113, 4.1 and 6.7)."""
    found, at = 0, len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    while at + 9 <= len(sent):
        kind, flags = sent[at + 3], sent[at + 4]
        found += kind == 6 and not flags & 1
        at += 9 + int.from_bytes(sent[at : at + 3], "big")
    return found


def test_pings_of_our_own_clients_come_no_sooner_than_the_server_allows():
    ours = dict(connection_module.OPTIONS)["grpc.keepalive_time_ms"]
    allowed = dict(server_module._channel_options(TierOptions()))
    assert allowed["grpc.http2.min_ping_interval_without_data_ms"] <= ours / 2
