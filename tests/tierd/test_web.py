"""What the service says over HTTP: its metrics, whether it lives, and whether it is ready."""

from __future__ import annotations

import asyncio
import socket
import threading
import urllib.error
import urllib.request

import pytest
from live_tier import InProcessTier, blob_of, eventually, header_of, in_process, live_tier, raw_stub

from kvtier.errors import TierUnavailableError, UsageError
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd import server as server_module
from kvtier_tierd.options import TierOptions


def ask(tier: InProcessTier, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    """The status and the text of the answer."""
    url = f"http://{host}:{tier.server.metrics_port}{path}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_service_that_serves_is_alive_and_ready_and_has_metrics():
    with in_process(metrics_port=0) as tier:
        assert ask(tier, "/livez") == (200, "ok\n")
        assert ask(tier, "/readyz?verbose") == (200, "ok\n")
        status, text = ask(tier, "/metrics")
        assert status == 200
        assert "kvtier_tier_capacity_bytes" in text
        assert ask(tier, "/elsewhere")[0] == 404


def test_a_service_that_drains_is_alive_and_not_ready():
    with in_process(metrics_port=0, drain_s=20.0) as tier, raw_stub(tier.address) as stub:
        waiting = threading.Event()

        def half():
            yield pb.PutRequest(header=header_of(blob_of(1)))
            waiting.wait(20)

        call = stub.Put.future(half())
        eventually(lambda: tier.server.service.namespaces._in_flight["default"] == 1)
        stopping = threading.Thread(target=tier.shut_down)
        stopping.start()
        eventually(lambda: ask(tier, "/readyz")[0] == 503)
        assert ask(tier, "/readyz") == (503, "not ready\n")
        assert ask(tier, "/livez") == (200, "ok\n")
        waiting.set()
        assert call.exception() is not None
        stopping.join(20)


def test_a_service_that_recovers_its_store_is_alive_and_not_ready(monkeypatch):
    """Orchestrators kill what does not answer; recovering a large disk store takes its time."""
    asked = []
    real = server_module.make_store

    def slow(*arguments):
        store = real(*arguments)
        start = store.start

        async def start_and_be_asked():
            tier = type("Starting", (), {"server": servers[0]})
            asked.extend([await asyncio.to_thread(ask, tier, p) for p in ("/livez", "/readyz")])
            await start()

        monkeypatch.setattr(store, "start", start_and_be_asked)
        return store

    servers = []
    real_init = server_module.TierServer.__init__

    def init(self, options):
        servers.append(self)
        real_init(self, options)

    monkeypatch.setattr(server_module, "make_store", slow)
    monkeypatch.setattr(server_module.TierServer, "__init__", init)
    with in_process(metrics_port=0):
        assert [status for status, _ in asked] == [200, 503]


def test_a_service_whose_event_loop_stands_still_is_not_alive(monkeypatch):
    monkeypatch.setattr(server_module, "LAST_S", 0.2)
    with in_process(metrics_port=0) as tier:
        go_on = threading.Event()
        tier.loop.call_soon_threadsafe(go_on.wait, 20)
        try:
            assert ask(tier, "/livez") == (503, "the event loop does not answer\n")
        finally:
            go_on.set()
        assert ask(tier, "/livez")[0] == 200


def test_metrics_are_bound_where_they_are_wanted(tmp_path):
    with in_process(metrics_port=0, metrics_host="127.0.0.2") as tier:
        assert ask(tier, "/livez", "127.0.0.2")[0] == 200
        with pytest.raises(urllib.error.URLError):
            ask(tier, "/livez", "127.0.0.1")
    flags = ("--memory", "1m", "--metrics-host", "127.0.0.2", "--metrics-port", "0")
    with live_tier(tmp_path, *flags) as live:
        assert live.metrics_url.startswith("http://127.0.0.2:")
        with urllib.request.urlopen(live.metrics_url, timeout=10) as answer:
            assert b"kvtier_tier" in answer.read()


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_metrics_are_bound_to_an_address_of_ipv6(tmp_path):
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"no IPv6 on this machine: {error}")
    flags = ("--memory", "1m", "--metrics-host", "::1", "--metrics-port", "0")
    with live_tier(tmp_path, *flags) as tier:
        assert tier.metrics_url.startswith("http://[::1]:")
        with urllib.request.urlopen(tier.metrics_url, timeout=10) as answer:
            assert answer.status == 200


def test_a_metrics_address_that_is_not_to_be_had_is_refused_naming_its_flags():
    with pytest.raises(UsageError, match="--metrics-host"):
        TierOptions(metrics_host="127.0.0.2")
    with pytest.raises(UsageError, match="--metrics-host"):
        TierOptions(metrics_host="", metrics_port=0)
    with (
        pytest.raises(TierUnavailableError, match=r"--metrics-host 192\.0\.2\.1 --metrics-port 0"),
        in_process(metrics_host="192.0.2.1", metrics_port=0),
    ):
        pass
