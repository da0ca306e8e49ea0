"""The requests that no client should send: a typed error or a miss, and the service is as it
was."""

from __future__ import annotations

import contextlib
import logging
import threading

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_tier import (
    LAYOUT,
    blob_of,
    connected,
    failing,
    fetch,
    header_of,
    in_process,
    key_of,
    payload_of,
    raw_stub,
)
from waiting import SAFETY_S, wait_for

from kvtier.errors import TierExhaustedError, TierProtocolError, UsageError
from kvtier.tier.blobs.payload import CHECKSUM_BYTES, MAX_LAYOUT_BYTES
from kvtier.tier.client import Blob, Landing, TierClient
from kvtier.tier.wire import MAX_QUERIES_BYTES, PROTOCOL_VERSION
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd.decoding import SeldomLog
from kvtier_tierd.service import requests
from kvtier_tierd.service.requests import MAX_KEYS

INVALID = grpc.StatusCode.INVALID_ARGUMENT
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
DATA_LOSS = grpc.StatusCode.DATA_LOSS
FAILED_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE

BLOB = blob_of(1)
PAYLOAD = payload_of(1)


def put(stub, *parts):
    """Put a header (or what should be one) and chunks."""
    requests = [pb.PutRequest(chunk=p) if isinstance(p, bytes) else pb.PutRequest(header=p)
                for p in parts]  # fmt: skip
    return stub.Put(iter(requests))


@pytest.fixture
def stub(tier):
    with raw_stub(tier.address) as stub:
        yield stub
    with TierClient(tier.address, shared=False, timeout_s=SAFETY_S) as client:
        client.connect()
        assert client.stats().blobs == client.stats().used_bytes == 0
        assert client.put(BLOB), "the service goes on"


# ---- puts that are not what they say


def test_a_put_that_ends_early_is_lost_data(stub):
    with failing(DATA_LOSS):
        put(stub, header_of(BLOB), PAYLOAD[:-1])
    with failing(DATA_LOSS):
        put(stub, header_of(BLOB))


def test_a_put_of_more_than_its_header_says_is_lost_data(stub):
    with failing(DATA_LOSS):
        put(stub, header_of(BLOB), PAYLOAD, b"x")


def test_a_put_begins_with_its_header_and_has_one(stub):
    with failing(INVALID):
        put(stub, PAYLOAD)
    with failing(INVALID):
        put(stub)
    with failing(INVALID):
        put(stub, header_of(BLOB), PAYLOAD[:5], header_of(BLOB))
    with failing(INVALID):
        stub.Put(iter([pb.PutRequest(header=header_of(BLOB)), pb.PutRequest()]))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"key": bytes(31)}, INVALID),
        ({"num_bytes": 0}, INVALID),
        ({"num_bytes": (1 << 64) - 1}, EXHAUSTED),
        ({"layout": bytes(MAX_LAYOUT_BYTES + 1)}, INVALID),
        ({"checksum": bytes(CHECKSUM_BYTES + 1)}, INVALID),
    ],
)
def test_a_header_that_cannot_be_is_refused(memory_directory, changes, code):
    with in_process(shared_directory=memory_directory, max_blob_bytes=4 << 20) as tier:
        with raw_stub(tier.address) as stub:
            header = header_of(BLOB, **changes)
            with failing(code):
                put(stub, header, PAYLOAD)
            token = tier.server.service.shared.token
            with failing(code):
                stub.Reserve(pb.ReserveRequest(headers=[header], shared_token=token))
        assert tier.problems() == []


@pytest.mark.parametrize("shared", [True, False])
def test_a_blob_larger_than_allowed_is_no_reason_to_give_up_on_the_tier(memory_directory, shared):
    serving = in_process(shared_directory=memory_directory, max_blob_bytes=1 << 20)
    with serving as tier, TierClient(tier.address, shared=shared, timeout_s=SAFETY_S) as client:
        client.connect()
        with pytest.raises(TierExhaustedError, match="1048576"):
            client.put(blob_of(1, (1 << 20) + 1))
        assert client.put(blob_of(1, 1 << 20))


def test_a_message_larger_than_any_of_the_protocol_is_refused(stub):
    size = MAX_QUERIES_BYTES + (1 << 20)
    with failing(EXHAUSTED):
        put(stub, header_of(blob_of(1, size)), payload_of(1, size))
    with failing(EXHAUSTED):
        stub.Exists(pb.ExistsRequest(keys=[key_of(1)] * (size // 32)))
    with failing(grpc.StatusCode.INVALID_ARGUMENT):
        stub.Exists(pb.ExistsRequest(keys=[key_of(1)] * (MAX_KEYS + 1)))


def test_bytes_that_are_no_message_are_an_invalid_argument_and_one_line_of_log(tier, caplog):
    """The test has every method, of every service here, but Refresh, which this one does not do at
    all."""
    methods = pb.DESCRIPTOR.services_by_name["TierService"].methods
    names = {method.name for method in methods} - {"Refresh"}
    paths = {name: f"/kvtier.v1.TierService/{name}" for name in sorted(names)}
    paths["Check"] = "/grpc.health.v1.Health/Check"
    paths["Reflection"] = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    with grpc.insecure_channel(tier.address) as channel:
        for name, path in paths.items():
            with failing(INVALID):
                # One request is the same as many on the wire.
                list(channel.stream_stream(path)(iter([b"\xff\xff\xff"])))
            counted = tier.server.metrics._errors._metrics
            if name in names:
                assert counted[name, INVALID.name]._value.get() == 1.0
        with failing(grpc.StatusCode.UNIMPLEMENTED):
            channel.unary_unary("/kvtier.v1.TierService/Format")(b"")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "no protobuf message" in line
    assert "Traceback" not in caplog.text


def test_a_message_that_is_none_in_the_middle_of_a_put_leaves_nothing_held(tier):
    right = pb.PutRequest(header=header_of(BLOB)).SerializeToString()
    with grpc.insecure_channel(tier.address) as channel:
        put_raw = channel.stream_unary("/kvtier.v1.TierService/Put")
        with failing(INVALID):
            put_raw(iter([right, b"\xff\xff\xff"]))
    wait_for(lambda: tier.problems() == [])
    assert set(tier.server.metrics._errors._metrics) == {("Put", INVALID.name)}


def test_a_line_that_is_said_often_is_written_seldom(caplog):
    now = [0.0]
    log = SeldomLog(logging.getLogger("kvtier_tierd.test"), every_s=10.0, clock=lambda: now[0])
    for seconds in (0, 1, 9, 10, 11, 25):
        now[0] = float(seconds)
        log.warning("%s is wrong", "it")
    assert [record.getMessage() for record in caplog.records] == [
        "it is wrong",
        "it is wrong (and 2 more like it since)",
        "it is wrong (and 1 more like it since)",
    ]


# ---- checksums


@pytest.mark.parametrize("shared", [True, False])
def test_another_keys_or_namespaces_bytes_under_this_key_do_not_land(tier, shared):
    with raw_stub(tier.address) as stub:
        right = header_of(BLOB)
        for number, wrong in ((2, right), (3, header_of(blob_of(3), "another"))):
            header = pb.BlobHeader()
            header.CopyFrom(wrong)
            header.key = key_of(number)
            put(stub, header, PAYLOAD)
        meaning = header_of(BLOB, layout=b"\x12\x05\x0a\x03old")
        put(stub, meaning, PAYLOAD)
    with TierClient(tier.address, shared=shared, timeout_s=SAFETY_S) as client:
        client.connect()
        outcome, landed = fetch(client, [key_of(n) for n in (1, 2, 3)])
        assert (outcome, landed) == ([Landing.CORRUPT] * 3, {})
        assert fetch(client, [key_of(1)]) == ([Landing.MISSING], {})
        assert client.stats().quarantined == 3


def test_a_client_that_cries_wolf_takes_nothing_out_of_service(tier, monkeypatch):
    """The service's answer to it does not keep others waiting, either."""
    looked, verifies = [], requests.verifies
    monkeypatch.setattr(
        requests, "verifies", lambda *a: looked.append(threading.current_thread()) or verifies(*a)
    )
    with TierClient(tier.address, timeout_s=SAFETY_S) as client, raw_stub(tier.address) as stub:
        client.connect()
        client.put(BLOB)
        answer = stub.Quarantine(pb.QuarantineRequest(keys=[BLOB.key, key_of(9)]))
        assert answer.quarantined == []
        assert len(looked) == 1
        assert tier.thread not in looked
        assert fetch(client, [BLOB.key])[0] == [Landing.LANDED]


# ---- other requests


def test_keys_of_another_length_are_refused_everywhere(tier):
    key = bytes(31)
    token = tier.server.service.shared.token
    with raw_stub(tier.address) as stub:
        for call in (
            lambda: stub.Exists(pb.ExistsRequest(keys=[key_of(1), key])),
            lambda: list(stub.Get(pb.GetRequest(keys=[key_of(1), key]))),
            lambda: stub.Acquire(pb.AcquireRequest(keys=[key], shared_token=token)),
            lambda: stub.Delete(pb.DeleteRequest(keys=[key])),
            lambda: stub.Quarantine(pb.QuarantineRequest(keys=[key])),
        ):
            with failing(INVALID):
                call()
    with connected(tier) as client:
        with pytest.raises(TierProtocolError):
            client.exists([key])
        with pytest.raises(TierProtocolError):
            client.get([key], lambda offer: None, 1)
        with pytest.raises(UsageError, match="key"):
            client.put(Blob(key, LAYOUT, [b"x"]))


def test_a_client_of_another_version_is_refused(stub):
    with failing(FAILED_PRECONDITION):
        stub.GetServerInfo(pb.GetServerInfoRequest(protocol_versions=[PROTOCOL_VERSION + 1]))
    offered = [PROTOCOL_VERSION + 1, PROTOCOL_VERSION]
    answer = stub.GetServerInfo(pb.GetServerInfoRequest(protocol_versions=offered))
    assert answer.protocol_version == PROTOCOL_VERSION


def test_leases_that_never_were_are_refused_and_giving_them_back_is_not(stub):
    for numbers in ([0], [1], [(1 << 64) - 1]):
        with failing(FAILED_PRECONDITION):
            stub.Commit(pb.CommitRequest(leases=numbers))
        stub.Release(pb.ReleaseRequest(leases=numbers))


def test_memory_is_shared_with_those_who_have_mapped_it_only(stub):
    for token in (b"", bytes(16)):
        with failing(UNAVAILABLE):
            stub.Reserve(pb.ReserveRequest(headers=[header_of(BLOB)], shared_token=token))
        with failing(UNAVAILABLE):
            stub.Acquire(pb.AcquireRequest(keys=[key_of(1)], shared_token=token))


def test_a_service_that_shares_nothing_says_so():
    with in_process() as tier, raw_stub(tier.address) as stub:
        assert stub.GetServerInfo(pb.GetServerInfoRequest()).shared_path == ""
        with failing(INVALID):
            stub.Reserve(pb.ReserveRequest(headers=[header_of(BLOB)]))
        with failing(INVALID):
            stub.Acquire(pb.AcquireRequest(keys=[key_of(1)]))


@settings(max_examples=60)
@given(data=st.data())
def test_whatever_is_put_in_whatever_order_nothing_is_left_held(fuzzed, data):
    """Any sequence of parts: a typed answer, and what is stored is what a header promised."""
    tier, stub = fuzzed
    chunks = st.binary(max_size=40)
    headers = st.builds(
        lambda n, size, key: header_of(BLOB, num_bytes=size, key=key),
        st.none(), st.integers(0, 60), st.sampled_from([key_of(1), key_of(2), b"short"]),
    )  # fmt: skip
    parts = data.draw(st.lists(st.one_of(headers, chunks), max_size=5))
    with contextlib.suppress(grpc.RpcError):
        put(stub, *parts)
    codes = {key[1] for key in tier.server.metrics._errors._metrics}
    assert codes <= {INVALID.name, DATA_LOSS.name}
    assert tier.problems() == []


@pytest.fixture(scope="module")
def fuzzed():
    with in_process() as tier, raw_stub(tier.address) as stub:
        yield tier, stub
