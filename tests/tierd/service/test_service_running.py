"""The run of the service: what it says of itself, and how it ends."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from live_tier import ask, blob_of, failing, fetch, in_process, key_of, raw_stub, stalled_put
from waiting import SAFETY_S, wait_for

from kvtier.errors import TierExhaustedError, TierUnavailableError
from kvtier.tier.client import TierClient
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd.server import SERVICE_NAME

PAGE = 4096


def test_a_draining_service_ends_what_runs_and_takes_no_more():
    with (
        in_process(drain_s=3600.0, metrics_port=0) as tier,
        raw_stub(tier.address) as stub,
        stalled_put(stub, 1) as (running, go_on),
        watching(tier.address) as watched,
    ):
        wait_for(lambda: tier.server.service.namespaces._in_flight["default"] == 1)
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVING

        stopping = threading.Thread(target=tier.shut_down)
        stopping.start()
        assert next(watched).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (ask(tier, "/readyz"), ask(tier, "/livez")) == ((503, "not ready\n"), (200, "ok\n"))
        with failing(grpc.StatusCode.UNAVAILABLE):
            stub.Exists(pb.ExistsRequest(keys=[key_of(1)]))
        with (
            TierClient(tier.address, timeout_s=SAFETY_S) as client,
            pytest.raises(TierUnavailableError),
        ):
            client.connect()
        go_on.set()
        assert running.result().stored
        stopping.join(SAFETY_S)
        assert not stopping.is_alive(), "the end does not wait for a watcher"


@contextmanager
def watching(address):
    with grpc.insecure_channel(address) as channel:
        yield health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        )


def test_a_call_that_does_not_end_is_cut_off_when_draining_is_over(memory_directory):
    with (
        in_process(drain_s=0.1, shared_directory=memory_directory) as tier,
        raw_stub(tier.address) as stub,
        stalled_put(stub, 1) as (running, _),
    ):
        wait_for(lambda: tier.server.service.namespaces._in_flight["default"] == 1)
        tier.shut_down()
        assert running.exception() is not None
        assert tier.store.account.reserved.total() == 0


def test_stats_and_metrics_say_what_happened(memory_directory):
    with in_process(shared_directory=memory_directory, metrics_port=0) as tier:
        streaming = TierClient(tier.address, "ada", shared=False, timeout_s=SAFETY_S)
        sharing = TierClient(tier.address, "ada", timeout_s=SAFETY_S)
        with streaming, sharing:
            streaming.connect(), sharing.connect()
            streaming.put(blob_of(1, 1000))
            sharing.put(blob_of(2, 5000))
            sharing.put(blob_of(2, 5000))
            for one in (streaming, sharing):
                fetch(one, [key_of(1), key_of(2), key_of(3)])
            streaming.exists([key_of(1), key_of(9)])
            with pytest.raises(TierExhaustedError):
                streaming.put(blob_of(4, 17 << 20))
            stats = streaming.stats()
        assert (stats.store, stats.blobs, stats.used_bytes) == ("memory", 2, 3 * PAGE)
        assert stats.capacity_bytes == stats.namespace_quota_bytes == 16 << 20
        _, said = ask(tier, "/metrics")
        for line in (
            'bytes_total{direction="put",namespace="ada",path="stream"} 1000.0',
            'bytes_total{direction="put",namespace="ada",path="shared"} 5000.0',
            'bytes_total{direction="get",namespace="ada",path="stream"} 6000.0',
            'bytes_total{direction="get",namespace="ada",path="shared"} 6000.0',
            'blobs_moved_total{direction="get",namespace="ada",path="shared"} 2.0',
            'misses_total{namespace="ada"} 2.0',
            'lookups_total{held="yes",namespace="ada"} 1.0',
            'lookups_total{held="no",namespace="ada"} 1.0',
            'errors_total{code="RESOURCE_EXHAUSTED",method="Put"} 1.0',
            "used_bytes 12288.0",
            "capacity_bytes 1.6777216e+07",
            "blobs 2.0",
            "leases 0.0",
            "evictions_total 0.0",
            "shed_total 0.0",
            "leases_expired_total 0.0",
        ):
            assert f"\nkvtier_tier_{line}\n" in said, line


def test_the_store_is_asked_for_metrics_in_its_own_thread_only(monkeypatch):
    with in_process(metrics_port=0) as tier:
        asked, stats = [], tier.store.stats
        monkeypatch.setattr(
            tier.store, "stats", lambda: asked.append(threading.current_thread()) or stats()
        )
        assert "kvtier_tier_used_bytes 0.0" in ask(tier, "/metrics")[1]
        assert asked == [tier.thread]


def test_health_and_reflection_answer(tier):
    with grpc.insecure_channel(tier.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE_NAME):
            status = health.Check(health_pb2.HealthCheckRequest(service=name)).status
            assert status == health_pb2.HealthCheckResponse.SERVING
        with failing(grpc.StatusCode.NOT_FOUND):
            health.Check(health_pb2.HealthCheckRequest(service="another"))
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = reflection.ServerReflectionInfo(iter([request]))
        names = {service.name for service in answer.list_services_response.service}
        assert {"kvtier.v1.TierService", "grpc.health.v1.Health"} <= names
