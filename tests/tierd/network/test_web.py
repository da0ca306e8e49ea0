"""The service's answers over HTTP: its metrics, whether it lives, and whether it is ready."""

from __future__ import annotations

import asyncio
import socket
import threading
import urllib.error
import urllib.request

import pytest
from live_tier import InProcessTier, ask, blob_of, connected, fetch, in_process, key_of, live_tier
from prometheus_client.parser import text_string_to_metric_families
from waiting import SAFETY_S, wait_for

from kvtier.errors import TierProtocolError, TierUnavailableError, UsageError
from kvtier_tierd import server as server_module
from kvtier_tierd.limits import Limits
from kvtier_tierd.monitoring.metrics import MAX_NAMESPACES
from kvtier_tierd.options import TierOptions


def test_a_service_that_serves_is_alive_and_ready_and_has_metrics():
    with in_process(metrics_port=0) as tier:
        assert ask(tier, "/livez") == (200, "ok\n")
        assert ask(tier, "/readyz?verbose") == (200, "ok\n")
        status, text = ask(tier, "/metrics")
        assert status == 200
        assert "kvtier_tier_capacity_bytes" in text
        assert ask(tier, "/elsewhere")[0] == 404


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
        with urllib.request.urlopen(live.metrics_url, timeout=SAFETY_S) as answer:
            assert b"kvtier_tier_capacity_bytes 1.048576e+06" in answer.read()


def test_calls_are_timed_however_they_end_and_rare_events_are_told_from_the_start():
    with in_process(metrics_port=0) as tier:
        with connected(tier) as client:
            client.exists([key_of(1)])
            client.exists([key_of(2)])
            with pytest.raises(TierProtocolError):
                client.exists([b"short"])

        def told() -> dict[tuple[str, ...], float]:
            families = text_string_to_metric_families(ask(tier, "/metrics")[1])
            samples = (one for family in families for one in family.samples)
            return {(one.name, *one.labels.values()): one.value for one in samples}

        # A client has its answer before the call is counted.
        counted = "kvtier_tier_call_seconds_count", "Exists"
        wait_for(lambda: told().get(counted) == 3)
        samples = told()
    assert samples[counted] == 3
    assert samples["kvtier_tier_call_seconds_count", "GetServerInfo"] == 1
    assert 0 < samples["kvtier_tier_call_seconds_sum", "Exists"] < 10
    # A counter that begins at 1 has not grown for Prometheus.
    assert samples["kvtier_tier_quarantined_total", "default"] == 0


def namespaces_in_metrics(tier: InProcessTier) -> dict[str, float]:
    """Blobs that were asked for and not held, by namespace; every metric has the same namespaces
    or none."""
    families = {
        one.name: one.samples for one in text_string_to_metric_families(ask(tier, "/metrics")[1])
    }
    labels = {
        name: {one.labels["namespace"] for one in samples if "namespace" in one.labels}
        for name, samples in families.items()
    }
    misses = [one for one in families["kvtier_tier_misses"] if one.name.endswith("_total")]
    found = {one.labels["namespace"]: one.value for one in misses}
    assert {frozenset(names) for names in labels.values() if names} == {frozenset(found)}
    return found


def test_namespaces_that_clients_invent_have_a_bounded_number_of_series(memory_directory):
    many = MAX_NAMESPACES + 36
    serving = in_process(metrics_port=0, shared_directory=memory_directory)
    with serving as tier:
        for number in range(many):
            # The first is late as well: it has a label by then.
            for name in (f"invented-{number}", "invented-0"):
                with connected(tier, name) as client:
                    client.exists([key_of(1)])
                    client.put(blob_of(1, 10))
                    fetch(client, [key_of(1), key_of(2)])
                    client.delete([key_of(1)])
        found = namespaces_in_metrics(tier)
    wanted = {f"invented-{number}": 1.0 for number in range(1, MAX_NAMESPACES)}
    assert found == {"invented-0": many + 1.0, **wanted, "other": many - MAX_NAMESPACES}


def test_namespaces_that_are_served_by_name_have_series_of_their_own_however_many():
    names = [f"served-{number}" for number in range(MAX_NAMESPACES + 10)]
    with in_process(metrics_port=0, namespaces=dict.fromkeys(names, Limits())) as tier:
        for name in names:
            with connected(tier, name) as client:
                client.exists([key_of(1)])
                client.put(blob_of(1, 10))
                fetch(client, [key_of(1), key_of(2)])
        assert namespaces_in_metrics(tier) == dict.fromkeys(names, 1.0)


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
        with urllib.request.urlopen(tier.metrics_url, timeout=SAFETY_S) as answer:
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
