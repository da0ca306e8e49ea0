"""The service's answers over HTTP: its metrics, whether it lives, and whether it is ready. What the
metrics say is in test_service_running.py."""

from __future__ import annotations

import asyncio
import socket
import threading
import urllib.error
import urllib.request
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from live_server import free_port
from live_tier import ask, blob_of, connected, fetch, in_process, key_of, live_tier
from prometheus_client.parser import text_string_to_metric_families
from waiting import SAFETY_S

from kvtier.errors import TierUnavailableError
from kvtier_tierd import server as server_module
from kvtier_tierd.limits import Limits
from kvtier_tierd.monitoring import metrics, web
from kvtier_tierd.stores.memory import MemoryStore


def test_a_service_that_serves_is_alive_and_ready_and_one_that_stands_still_is_not_alive(
    monkeypatch,
):
    monkeypatch.setattr(server_module, "LAST_S", 0.2)
    with in_process(metrics_port=0) as tier:
        assert ask(tier, "/livez") == (200, "ok\n")
        assert ask(tier, "/readyz?verbose") == (200, "ok\n")
        assert ask(tier, "/elsewhere")[0] == 404
        go_on = threading.Event()
        tier.loop.call_soon_threadsafe(go_on.wait, 20)
        try:
            assert ask(tier, "/livez") == (503, "the event loop does not answer\n")
        finally:
            go_on.set()
        assert ask(tier, "/livez")[0] == 200


def test_a_service_that_recovers_its_store_is_alive_and_not_ready(monkeypatch):
    """Orchestrators kill what does not answer; recovering a large disk store takes its time."""
    port, asked = free_port(), []
    tier = SimpleNamespace(server=SimpleNamespace(web=SimpleNamespace(server_port=port)))

    async def recover(store: MemoryStore) -> None:
        asked.extend([await asyncio.to_thread(ask, tier, path) for path in ("/livez", "/readyz")])

    monkeypatch.setattr(MemoryStore, "start", recover)
    with in_process(metrics_port=port):
        assert [status for status, _ in asked] == [200, 503]


def test_a_connection_that_asks_nothing_is_closed(monkeypatch):
    monkeypatch.setattr(web._Handler, "timeout", web._Handler.timeout / 50)
    with in_process(metrics_port=0) as tier:
        address = ("127.0.0.1", tier.server.web.server_port)
        with socket.create_connection(address, timeout=SAFETY_S) as idle:
            assert idle.recv(1) == b""


@pytest.mark.parametrize("host", ["127.0.0.2", "::1"])
def test_metrics_are_bound_where_they_are_wanted(tmp_path, host):
    if host == "::1":
        try:
            with socket.socket(socket.AF_INET6) as probe:
                probe.bind((host, 0))
        except OSError as error:
            pytest.skip(f"no IPv6 on this machine: {error}")
    flags = ("--memory", "1m", "--metrics-host", host, "--metrics-port", "0")
    with live_tier(tmp_path, *flags) as tier:
        url = urlsplit(tier.metrics_url)
        assert url.hostname == host
        with urllib.request.urlopen(tier.metrics_url, timeout=SAFETY_S) as answer:
            assert b"kvtier_tier_capacity_bytes 1.048576e+06" in answer.read()
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(f"http://127.0.0.1:{url.port}/livez", timeout=SAFETY_S)


@pytest.mark.parametrize("known", [True, False])
def test_namespaces_that_clients_invent_have_a_bounded_number_of_series(
    memory_directory, monkeypatch, known
):
    """Those that are served by name have series of their own, however many."""
    monkeypatch.setattr(metrics, "MAX_NAMESPACES", 4)
    names = [f"name-{number}" for number in range(9)]
    served = dict.fromkeys(names, Limits()) if known else {}
    options = {"shared_directory": memory_directory, "namespaces": served}
    with in_process(metrics_port=0, **options) as tier:
        # The first is late as well: it has a label by then.
        for name in (*names, names[0]):
            with connected(tier, name) as client:
                client.exists([key_of(1)])
                client.put(blob_of(1, 10))
                fetch(client, [key_of(1), key_of(2)])
                client.delete([key_of(1)])
        families = list(text_string_to_metric_families(ask(tier, "/metrics")[1]))
    misses = [one for family in families for one in family.samples
              if one.name == "kvtier_tier_misses_total"]  # fmt: skip
    counted = {one.labels["namespace"]: one.value for one in misses}
    own = dict.fromkeys(names if known else names[:4], 1.0) | {names[0]: 2.0}
    assert counted == own | ({} if known else {"other": 5.0})
    # Every metric has the same namespaces or none.
    for family in families:
        found = {one.labels["namespace"] for one in family.samples if "namespace" in one.labels}
        assert found in (set(), set(counted))


def test_a_metrics_address_that_is_not_to_be_had_is_refused_naming_its_flags():
    with (
        pytest.raises(TierUnavailableError, match=r"--metrics-host 192\.0\.2\.1 --metrics-port 0"),
        in_process(metrics_host="192.0.2.1", metrics_port=0),
    ):
        pass
