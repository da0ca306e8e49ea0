"""Calls of clients that take and do not use."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import grpc
from live_tier import (
    blob_of,
    header_of,
    payload_of,
)
from waiting import SAFETY_S

from kvtier.v1 import tier_pb2 as pb

MIB = 1 << 20
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
INVALID = grpc.StatusCode.INVALID_ARGUMENT
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def whose(namespace):
    return [("kvtier-namespace", namespace)]


@contextmanager
def stalled_put(stub, number, num_bytes, sent_bytes, namespace="default"):
    """A put of which only the first bytes come while the block lasts; yields the call."""
    payload, go_on = payload_of(number, num_bytes), threading.Event()

    def parts():
        header = header_of(blob_of(number, num_bytes), namespace)
        yield pb.PutRequest(header=header)
        for begin in range(0, sent_bytes, MIB):
            yield pb.PutRequest(chunk=payload[begin : min(begin + MIB, sent_bytes)])
        go_on.wait(SAFETY_S)
        for begin in range(sent_bytes, num_bytes, MIB):
            yield pb.PutRequest(chunk=payload[begin : begin + MIB])

    call = stub.Put.future(parts(), metadata=whose(namespace))
    try:
        yield call, go_on
    finally:
        call.cancel()
        go_on.set()


def transfers(tier, namespace="default"):
    return tier.server.service.namespaces._in_flight[namespace]
