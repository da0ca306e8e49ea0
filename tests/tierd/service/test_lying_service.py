"""A client of a service that lies: a typed error or a blob that did not land, never wrong bytes."""
# ruff: noqa: N802
# gRPC calls its methods by the names of the protocol.

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_tier import blob_of, fetch, header_of, key_of, payload_of
from waiting import SAFETY_S

from kvtier.errors import (
    TierError,
    TierProtocolError,
    TierRefusedError,
    TierUnavailableError,
    UsageError,
)
from kvtier.tier.client import Landing, TierClient
from kvtier.tier.wire import PROTOCOL_VERSION, code_of, error_of, shared_digest
from kvtier.v1 import tier_pb2 as pb
from kvtier.v1 import tier_pb2_grpc

PAYLOAD = payload_of(1)
HEADER = header_of(blob_of(1))
TOKEN = bytes(range(16))
ROOM = 1 << 20


class Liar(tier_pb2_grpc.TierServiceServicer):
    """Answers with whatever is set; counts what it is told of blobs that did not verify."""

    def __init__(self) -> None:
        self.info: dict[str, Any] = {"namespace": "default", "protocol_version": PROTOCOL_VERSION}
        self.answers: dict[str, Any] = {}
        self.reported: list[bytes] = []

    def GetServerInfo(self, request, context):
        return pb.GetServerInfoResponse(**self.info)

    def Exists(self, request, context):
        return self.answers["Exists"]

    def Get(self, request, context):
        yield from self.answers["Get"]

    def Reserve(self, request, context):
        return self.answers["Reserve"]

    def Acquire(self, request, context):
        return self.answers["Acquire"]

    def Commit(self, request, context):
        return pb.CommitResponse(stored=len(request.leases))

    def Release(self, request, context):
        return pb.ReleaseResponse()

    def Quarantine(self, request, context):
        self.reported += request.keys
        return pb.QuarantineResponse()


@contextmanager
def lying() -> Iterator[tuple[Liar, TierClient]]:
    liar = Liar()
    server = grpc.server(ThreadPoolExecutor(2))
    tier_pb2_grpc.add_TierServiceServicer_to_server(liar, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with TierClient(f"127.0.0.1:{port}", timeout_s=SAFETY_S) as client:
            yield liar, client
    finally:
        server.stop(None).wait()


@pytest.fixture(scope="module")
def both():
    with lying() as both:
        yield both


@pytest.fixture
def liar(both):
    both[0].__init__()
    return both[0]


@pytest.fixture
def client(both):
    return both[1]


@pytest.fixture
def shared(both, memory_directory):
    """The client has mapped the liar's memory."""
    liar, client = both
    path = memory_directory / "kvtier-tier-lies"
    path.write_bytes(TOKEN + bytes(ROOM - len(TOKEN)))
    liar.info |= {
        "shared_path": str(path),
        "shared_bytes": ROOM,
        "shared_token": shared_digest(TOKEN),
    }
    client.connect()
    assert client.shares_memory
    yield path
    liar.info |= {"shared_path": ""}
    client._shared = None


def header(**changes):
    return pb.GetResponse(header=header_of(blob_of(1), **changes))


def chunk(data):
    return pb.GetResponse(chunk=data)


def extent(**changes):
    right = {"key": key_of(1), "lease": 7, "offset": 4096, "header": HEADER}
    return pb.Extent(**right | changes)


def test_a_service_that_says_nonsense_of_itself_is_refused_or_not_believed(liar, client):
    for claimed, used in ((0, 4096), ((1 << 32) - 1, 64 << 20)):
        liar.info["chunk_bytes"] = claimed
        client.connect()
        assert client._chunk_bytes == used
    liar.info["protocol_version"] = PROTOCOL_VERSION + 1
    with pytest.raises(TierProtocolError, match="version"):
        client.connect()
    liar.info |= {"protocol_version": PROTOCOL_VERSION, "namespace": "ada"}
    with pytest.raises(TierRefusedError, match="'ada'"):
        client.connect()


def exists(run: int, present: bytes) -> tuple[str, pb.ExistsResponse]:
    return "Exists", pb.ExistsResponse(leading_run=run, present=present)


def get(*parts: pb.GetResponse) -> tuple[str, tuple[pb.GetResponse, ...]]:
    return "Get", parts


def acquire(*extents: pb.Extent) -> tuple[str, pb.AcquireResponse]:
    return "Acquire", pb.AcquireResponse(extents=extents)


def reserve(*extents: pb.Extent) -> tuple[str, pb.ReserveResponse]:
    return "Reserve", pb.ReserveResponse(extents=extents, expires_ms=10_000)


@pytest.mark.parametrize(("method", "answer"), [
    exists(0, b""), exists(0, b"\0\0"), exists(9, b"\xff"), exists(2, b"\x01"),
    get(chunk(PAYLOAD)), get(header(key=key_of(2)), chunk(PAYLOAD)),
    get(pb.GetResponse(missing=key_of(2))),
    get(header(), chunk(PAYLOAD), header(), chunk(PAYLOAD)),
    acquire(extent(key=key_of(2))), acquire(extent(header=header_of(blob_of(2)))),
    acquire(extent(), extent()), acquire(extent(offset=ROOM - 1)),
    acquire(extent(offset=(1 << 64) - 1)), acquire(extent(offset=0)),
    reserve(extent(), extent()), reserve(extent(offset=ROOM - 1)), reserve(extent(offset=0)),
])  # fmt: skip
def test_an_answer_that_was_not_asked_for_or_contradicts_itself_is_an_error(
    liar, client, shared, method, answer
):
    before = shared.read_bytes()
    liar.answers[method] = answer
    calls = {
        "Exists": lambda: client.exists([key_of(number) for number in range(3)]),
        "Reserve": lambda: client.put(blob_of(1)),
    }
    if method == "Get":
        client._shared = None
    with pytest.raises(TierProtocolError):
        calls.get(method, lambda: fetch(client, [key_of(1)]))()
    assert shared.read_bytes() == before


def test_a_lease_that_is_over_before_it_began_is_not_used(liar, client, shared):
    before = shared.read_bytes()
    liar.answers["Reserve"] = pb.ReserveResponse(extents=[extent()], expires_ms=0)
    with pytest.raises(TierUnavailableError, match="lease"):
        client.put(blob_of(1))
    assert shared.read_bytes() == before


def test_memory_that_holds_something_else_is_corrupt(liar, client, shared):
    liar.answers["Acquire"] = pb.AcquireResponse(extents=[extent()])
    assert fetch(client, [key_of(1)]) == ([Landing.CORRUPT], {})
    assert liar.reported == [key_of(1)]


@pytest.mark.parametrize("answer", [
    [header(), chunk(PAYLOAD[:-1])],
    [header(), chunk(PAYLOAD), chunk(b"x")],
    [header(), chunk(PAYLOAD[:-1] + b"x")],
    [header(checksum=b""), chunk(PAYLOAD)],
    [header(layout=b"\x12\x00"), chunk(PAYLOAD)],
    [header(num_bytes=9_999), chunk(PAYLOAD[:-1])],
])  # fmt: skip
def test_what_is_not_exactly_what_was_stored_is_corrupt_and_reported(liar, client, answer):
    liar.answers["Get"] = answer
    assert fetch(client, [key_of(1)]) == ([Landing.CORRUPT], {})
    assert liar.reported == [key_of(1)]


PARTS = st.one_of(
    st.builds(
        lambda number, size, changes: header(key=key_of(number), num_bytes=size, **changes),
        st.integers(1, 3), st.sampled_from([0, 1, 10_000, 1 << 20]),
        st.sampled_from([{}, {}, {"checksum": bytes(16)}, {"layout": b"\x12\x00"}]),
    ),
    st.sampled_from([PAYLOAD, b"", PAYLOAD[:50]]).map(chunk),
    st.integers(1, 3).map(lambda number: pb.GetResponse(missing=key_of(number))),
    st.just(pb.GetResponse()),
)  # fmt: skip


@settings(max_examples=80)
@given(st.lists(PARTS, max_size=8))
def test_whatever_a_service_streams_wrong_bytes_never_land(both, parts):
    liar, client = both
    liar.answers["Get"] = parts
    try:
        outcome, landed = fetch(client, [key_of(number) for number in (1, 2, 3)])
    except TierError:
        return
    assert len(outcome) == 3
    assert all(payload == PAYLOAD and position == 0 for position, payload in landed.items())


def test_the_right_bytes_land_and_what_the_stream_leaves_out_is_missing(liar, client):
    liar.answers["Get"] = [header(), chunk(PAYLOAD[:100]), chunk(b""), chunk(PAYLOAD[100:])]
    outcome, landed = fetch(client, [key_of(1), key_of(2), key_of(3)])
    assert outcome == [Landing.LANDED, Landing.MISSING, Landing.MISSING]
    assert landed == {0: PAYLOAD}
    assert liar.reported == []


class Failed(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "details"


def test_every_status_is_an_error_of_ours_that_says_who_and_why_and_ours_are_themselves_again():
    for code in grpc.StatusCode:
        error = error_of(Failed(code), "there:1")
        assert isinstance(error, TierError)
        assert str(error) == f"tier there:1: {code.name.lower()}: details"
    for kind in TierError.__subclasses__():
        assert type(error_of(Failed(code_of(kind("x"))), "there:1")) is kind
    bad_input = code_of(UsageError("keys", "32 bytes each", "31"))
    assert type(error_of(Failed(bad_input), "there:1")) is TierProtocolError


@pytest.mark.parametrize("namespace", ["", "ü", "a\nb"])
def test_a_namespace_that_cannot_be_said_is_refused_by_name(namespace):
    with pytest.raises(UsageError, match="namespace"):
        TierClient("127.0.0.1:1", namespace, timeout_s=SAFETY_S)
