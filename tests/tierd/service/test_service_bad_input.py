"""The requests that no client should send: a typed error or a miss, and the service is as it
was."""

from __future__ import annotations

import contextlib
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
    whose,
)
from waiting import wait_for

from kvtier.errors import TierProtocolError, UsageError
from kvtier.tier.blobs.payload import CHECKSUM_BYTES, MAX_LAYOUT_BYTES
from kvtier.tier.client import Blob, Landing
from kvtier.tier.wire import MAX_KEYS, MAX_NAMES_BYTES, PROTOCOL_VERSION
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd.service import requests
from kvtier_tierd.service.requests import MAX_HELD_KEYS

INVALID = grpc.StatusCode.INVALID_ARGUMENT
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
DATA_LOSS = grpc.StatusCode.DATA_LOSS
FAILED_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE

BLOB = blob_of(1)
HEADER = header_of(BLOB)
PAYLOAD = payload_of(1)
MIB = 1 << 20


def put(stub, *parts):
    """Put a header (or what should be one) and chunks."""
    requests = [pb.PutRequest(chunk=p) if isinstance(p, bytes) else pb.PutRequest(header=p)
                for p in parts]  # fmt: skip
    return stub.Put(iter(requests))


@pytest.fixture
def stub(tier, stub):
    yield stub
    with connected(tier, shared=False) as client:
        assert client.stats().blobs == client.stats().used_bytes == 0
        assert client.put(BLOB), "the service goes on"


# ---- puts that are not what they say


@pytest.mark.parametrize(("parts", "code"), [
    ((HEADER, PAYLOAD[:-1]), DATA_LOSS),
    ((HEADER,), DATA_LOSS),
    ((HEADER, PAYLOAD, b"x"), DATA_LOSS),
    ((PAYLOAD,), INVALID),
    ((), INVALID),
    ((HEADER, PAYLOAD[:5], HEADER), INVALID),
    ((HEADER, None), INVALID),
])  # fmt: skip
def test_a_put_begins_with_its_header_and_is_what_that_says(stub, parts, code):
    with failing(code):
        put(stub, *parts)


@pytest.mark.parametrize(("changes", "code"), [
    ({"key": bytes(31)}, INVALID),
    ({"num_bytes": 0}, INVALID),
    ({"num_bytes": (1 << 64) - 1}, EXHAUSTED),
    ({"layout": bytes(MAX_LAYOUT_BYTES + 1)}, INVALID),
    ({"checksum": bytes(CHECKSUM_BYTES + 1)}, INVALID),
])  # fmt: skip
def test_a_header_that_cannot_be_is_refused(stub, token, changes, code):
    header = header_of(BLOB, **changes)
    with failing(code):
        put(stub, header, PAYLOAD)
    with failing(code):
        stub.Reserve(pb.ReserveRequest(headers=[header], shared_token=token))


@settings(max_examples=60)
@given(data=st.data())
def test_whatever_is_put_in_whatever_order_nothing_is_left_held(fuzzed, data):
    """Any sequence of parts: a typed answer, and what is stored is what a header promised."""
    tier, stub = fuzzed
    chunks = st.binary(max_size=40)
    headers = st.builds(
        lambda size, key: header_of(BLOB, num_bytes=size, key=key),
        st.integers(0, 60), st.sampled_from([key_of(1), key_of(2), b"short"]),
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


# ---- bytes that are no messages


def test_bytes_that_are_no_message_are_an_invalid_argument_and_one_line_of_log(tier, caplog):
    """The test has every method, of every service here."""
    methods = pb.DESCRIPTOR.services_by_name["TierService"].methods
    names = {method.name for method in methods}
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
        with failing(INVALID):
            right = pb.PutRequest(header=HEADER).SerializeToString()
            channel.stream_unary(paths["Put"])(iter([right, b"\xff\xff\xff"]))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "no protobuf message" in line
    assert "Traceback" not in caplog.text
    assert {code for _, code in counted} == {INVALID.name}
    wait_for(lambda: tier.problems() == [])


def test_a_message_larger_than_any_of_the_protocol_is_refused(stub):
    size = MAX_NAMES_BYTES + MIB
    with failing(EXHAUSTED):
        put(stub, header_of(blob_of(1, size)), payload_of(1, size))
    with failing(EXHAUSTED):
        stub.Exists(pb.ExistsRequest(keys=[key_of(1)] * (size // 32)))
    with failing(INVALID):
        stub.Exists(pb.ExistsRequest(keys=[key_of(1)] * (MAX_KEYS + 1)))


# ---- other requests


def about_keys(stub, token, keys):
    """Every call about keys that a caller holds."""
    return (
        lambda: list(stub.Get(pb.GetRequest(keys=keys))),
        lambda: stub.Acquire(pb.AcquireRequest(keys=keys, shared_token=token)),
        lambda: stub.Delete(pb.DeleteRequest(keys=keys)),
        lambda: stub.Quarantine(pb.QuarantineRequest(keys=keys)),
    )


def test_keys_of_another_length_are_refused_everywhere(tier, stub, token):
    keys = [key_of(1), bytes(31)]
    for call in about_keys(stub, token, keys):
        with failing(INVALID):
            call()
    with connected(tier) as client:
        with pytest.raises(TierProtocolError):
            client.exists(keys)
        with pytest.raises(TierProtocolError):
            client.get(keys, lambda offer: None, 1)
        with pytest.raises(UsageError, match="key"):
            client.put(Blob(keys[1], LAYOUT, [b"x"]))


def test_more_than_a_call_may_hold_is_refused_naming_it_and_the_limit(stub, token):
    leases = [7] * (MAX_HELD_KEYS + 1)
    headers = pb.ReserveRequest(headers=[HEADER] * (MAX_HELD_KEYS + 1), shared_token=token)
    for name, call in (
        *(("keys", one) for one in about_keys(stub, token, [key_of(1)] * (MAX_HELD_KEYS + 1))),
        ("headers", lambda: stub.Reserve(headers)),
        ("leases", lambda: stub.Commit(pb.CommitRequest(leases=leases))),
        ("leases", lambda: stub.Release(pb.ReleaseRequest(leases=leases))),
    ):
        with failing(INVALID, f"{name}: expected at most {MAX_HELD_KEYS}"):
            call()


def test_what_a_client_may_not_say_or_use_is_refused(stub):
    info = pb.GetServerInfoRequest
    newer = PROTOCOL_VERSION + 1
    with failing(FAILED_PRECONDITION):
        stub.GetServerInfo(info(protocol_versions=[newer]))
    answer = stub.GetServerInfo(info(protocol_versions=[newer, PROTOCOL_VERSION]))
    assert answer.protocol_version == PROTOCOL_VERSION
    for name in ("", "x" * 201):
        with failing(grpc.StatusCode.PERMISSION_DENIED):
            stub.GetServerInfo(info(), metadata=whose(name))
    for lease in (0, 1, (1 << 64) - 1):
        with failing(FAILED_PRECONDITION):
            stub.Commit(pb.CommitRequest(leases=[lease]))
        stub.Release(pb.ReleaseRequest(leases=[lease]))
    for token in (b"", bytes(16)):
        with failing(UNAVAILABLE):
            stub.Reserve(pb.ReserveRequest(headers=[HEADER], shared_token=token))
        with failing(UNAVAILABLE):
            stub.Acquire(pb.AcquireRequest(keys=[key_of(1)], shared_token=token))


def test_a_service_that_shares_nothing_says_so():
    with in_process() as tier, raw_stub(tier.address) as stub:
        assert stub.GetServerInfo(pb.GetServerInfoRequest()).shared_path == ""
        with failing(INVALID):
            stub.Reserve(pb.ReserveRequest(headers=[HEADER]))
        with failing(INVALID):
            stub.Acquire(pb.AcquireRequest(keys=[key_of(1)]))


# ---- checksums


@pytest.mark.parametrize("shared", [True, False])
def test_another_keys_or_namespaces_bytes_under_this_key_do_not_land(tier, shared):
    with raw_stub(tier.address) as stub:
        for header in (
            header_of(BLOB, key=key_of(2)),
            header_of(blob_of(3), "another"),
            header_of(BLOB, layout=b"\x12\x05\x0a\x03old"),
        ):
            put(stub, header, PAYLOAD)
    with connected(tier, shared=shared) as client:
        outcome, landed = fetch(client, [key_of(n) for n in (1, 2, 3)])
        assert (outcome, landed) == ([Landing.CORRUPT] * 3, {})
        assert fetch(client, [key_of(1)]) == ([Landing.MISSING], {})
        assert client.stats().quarantined == 3


def test_a_client_that_cries_wolf_takes_nothing_out_of_service(tier, client, monkeypatch):
    """The service's answer to it does not keep others waiting, either."""
    looked, verifies = [], requests.verifies
    monkeypatch.setattr(
        requests, "verifies", lambda *a: looked.append(threading.current_thread()) or verifies(*a)
    )
    client.put(BLOB)
    with raw_stub(tier.address) as stub:
        answer = stub.Quarantine(pb.QuarantineRequest(keys=[BLOB.key, key_of(9)]))
    assert answer.quarantined == []
    assert len(looked) == 1
    assert tier.thread not in looked
    assert fetch(client, [BLOB.key])[0] == [Landing.LANDED]
