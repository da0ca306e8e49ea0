"""A refresh near the data gives the entries that fetching the exact KV would have given, and moves
only those; one that was asked for wrongly, or for what is not whole, is refused; a service that
does not refresh, dies or lies is a typed error, and gives no entries.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import numpy as np
import pytest
import torch
from live_tier import connected, failing, in_process, raw_stub
from test_lying_service import Liar, lying
from waiting import SAFETY_S, wait_for

from kvtier.errors import TierError, TierExhaustedError, TierUnavailableError
from kvtier.retention.keepkv import KeepKV, QueryWindow
from kvtier.retention.refreshing import PrunedRange, RefreshRule
from kvtier.tier.blobs.names import SpanName
from kvtier.tier.blobs.payload import SpanLayout
from kvtier.tier.client import Blob, TierClient
from kvtier.tier.near_data.exact_kv import ExactSpan, exact_kv
from kvtier.tier.near_data.messages import Context, Entries
from kvtier.tier.near_data.session import NearData
from kvtier.tier.transport.connection import Deadline
from kvtier.v1 import tier_pb2 as pb
from kvtier_kernels.fp8 import narrowed, raw, widened
from kvtier_tierd.service import near_data
from kvtier_tierd.stores.base import BlobName

LAYERS, HEADS, GROUP, DIM, SPAN = 2, 3, 2, 16, 32
RULES = {
    "dropped": RefreshRule(KeepKV(pool_width=1), merges=False),
    "merged": RefreshRule(KeepKV(floor=0.0, pool_width=1), merges=True),
}


def make_spans(count: int, dtype: str, seed: int = 0) -> list[ExactSpan]:
    """Spans that follow each other, scores of 12 bytes per token behind their KV."""
    layout = SpanLayout(dtype, LAYERS, SPAN, HEADS, DIM, score_bytes=12 * SPAN)
    generator = torch.Generator().manual_seed(seed)
    spans = []
    for number in range(count):
        kv = torch.randn(layout.shape, generator=generator).to(getattr(torch, dtype))
        flat = kv.reshape(-1).view(torch.uint8).numpy()
        payload = np.concatenate((flat, np.zeros(layout.score_bytes, np.uint8)))
        spans.append(ExactSpan(number * SPAN, (number + 1) * SPAN, payload, layout))
    return spans


def make_window(seed: int, heads: int, dtype: str = "float32") -> QueryWindow:
    q = torch.randn(8, heads, GROUP, DIM, generator=torch.Generator().manual_seed(seed))
    return QueryWindow(widened(q.to(getattr(torch, dtype))), DIM**-0.5)


@contextmanager
def opened(client: TierClient, context: Context) -> Iterator[NearData]:
    session = NearData.open(client, context, Deadline(SAFETY_S))
    assert session is not None
    yield session
    session.close()


@pytest.fixture(scope="module")
def service():
    with in_process(refresh_workers=1) as tier:
        yield tier
        assert tier.problems() == []


@pytest.fixture
def client(service):
    with connected(service) as client:
        yield client
        wait_for(lambda: service.problems() == [])


@pytest.fixture
def stored(client):
    """Store spans and return them with their names. They are other ones each time."""

    def store(spans: list[ExactSpan]) -> tuple[list[ExactSpan], list[SpanName]]:
        names = [SpanName(os.urandom(32), span.begin, span.stop) for span in spans]
        for span, name in zip(spans, names, strict=True):
            client.put(Blob(name.key, span.layout.encode(), [span.payload.data]))
        return spans, names

    return store


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_what_comes_is_what_fetching_would_have_given_and_is_counted(
    client, service, stored, rule, dtype
):
    def refreshed_bytes() -> float:
        name = "kvtier_tier_refreshed_bytes_total"
        registry = service.server.metrics.registry
        return registry.get_sample_value(name, {"namespace": "default"}) or 0.0

    before, moved = refreshed_bytes(), 0
    spans, names = stored(make_spans(6, dtype))
    ranges = [PrunedRange(3, 50, 12), PrunedRange(70, 190, 30)]
    with opened(client, Context(names, ranges, rule)) as session:
        heads = [0, 2]
        for layer in (1, 0):
            window = make_window(layer, len(heads), dtype)
            came = session.choose(layer, heads, window, dtype, Deadline(SAFETY_S))
            for pruned, chosen in zip(ranges, came, strict=True):
                k, v = exact_kv(spans, layer, heads, pruned)
                expected = rule.choose(k, v, pruned.kept, window)
                for ours, theirs in ((chosen.k, expected.k), (chosen.v, expected.v)):
                    assert ours.dtype is getattr(torch, dtype)
                    assert torch.equal(raw(ours), raw(narrowed(theirs, ours.dtype)))
                    moved += ours.nbytes
                assert (chosen.log_votes is None) == (not rule.merges)
                if rule.merges:
                    assert torch.equal(chosen.log_votes, expected.log_votes)
                    moved += chosen.log_votes.nbytes
        wait_for(lambda: refreshed_bytes() - before == moved)


@pytest.mark.parametrize("wrong", ["not held", "spoilt"])
def test_a_span_that_is_not_held_or_does_not_verify_means_no_session(
    client, service, stored, wrong
):
    _, names = stored(make_spans(3, "float32"))

    def spoil() -> None:
        blob = service.store._blobs[BlobName("default", names[1].key)]
        service.store.arena.view(blob.offset, 1)[0] ^= 1

    if wrong == "spoilt":
        service.call(spoil)
    else:
        client.delete([names[1].key])
    context = Context(names, [PrunedRange(0, 96, 10)], RULES["dropped"])
    assert NearData.open(client, context, Deadline(SAFETY_S)) is None
    assert client.exists([name.key for name in names]).present == [True, False, True]


QUERIES = {
    "key": bytes(32), "layer": 0, "heads": [0], "group": 1, "dtype": "float32",
    "queries": bytes(DIM * 4),
}  # fmt: skip


@pytest.mark.parametrize("spoil", [
    {"layer": LAYERS}, {"heads": [HEADS]}, {"heads": []}, {"dtype": "int3"}, {"queries": b"odd"},
    {"key": b"short"},
], ids=lambda spoil: next(iter(spoil)))  # fmt: skip
def test_queries_that_make_no_sense_are_refused(service, stored, spoil):
    _, names = stored(make_spans(1, "float32"))
    context = Context(names, [PrunedRange(0, 20, 4)], RULES["dropped"]).encode()
    queries = pb.RefreshQueries(**QUERIES | spoil)
    requests = [pb.RefreshRequest(context=context), pb.RefreshRequest(queries=queries)]
    with raw_stub(service.address) as stub, failing(grpc.StatusCode.INVALID_ARGUMENT):
        list(stub.Refresh(iter(requests)))


def encoded(spans: list[SpanName], ranges: list[PrunedRange]) -> pb.RefreshContext:
    return Context(spans, ranges, RULES["dropped"]).encode()


@pytest.mark.parametrize("context", [
    pb.RefreshContext(),
    encoded([SpanName(b"short", 0, 3)], []),
    encoded([SpanName(bytes(32), 3, 3)], []),
    encoded([], [PrunedRange(0, 9, 5), PrunedRange(8, 12, 1)]),
    pb.RefreshContext(
        rule=encoded([], []).rule, ranges=[pb.PrunedRange(begin=5, end=9, kept=5)]
    ),
])  # fmt: skip
def test_contexts_that_make_no_sense_are_refused(service, context):
    with raw_stub(service.address) as stub, failing(grpc.StatusCode.INVALID_ARGUMENT):
        list(stub.Refresh(iter([pb.RefreshRequest(context=context)])))


@pytest.mark.parametrize(
    ("dtype", "end", "what"), [("float32", 80, "a gap"), ("float16", 60, "one layout")]
)
def test_spans_that_are_not_the_context_are_refused(client, stored, dtype, end, what):
    """The pruned range goes beyond them, or one is of another shape."""
    _, names = stored(make_spans(1, "float32") + make_spans(2, dtype)[1:])
    context = Context(names, [PrunedRange(10, end, 5)], RULES["dropped"])
    with opened(client, context) as session, pytest.raises(TierError, match=what):
        session.choose(0, [0], make_window(0, 1), "float32", Deadline(SAFETY_S))


@pytest.mark.parametrize(
    ("limit", "value", "named"),
    [("MAX_SESSIONS", 1, "refreshes under way"), ("PINNED_SHARE", 0.001, "is pinned")],
)
def test_contexts_that_wait_may_not_pin_everything(
    client, service, stored, monkeypatch, limit, value, named
):
    _, names = stored(make_spans(2, "float32"))
    context = Context(names, [PrunedRange(0, 64, 5)], RULES["dropped"])
    with opened(client, context):
        monkeypatch.setattr(near_data, limit, value)
        with pytest.raises(TierExhaustedError, match=named):
            NearData.open(client, context, Deadline(SAFETY_S))
    wait_for(lambda: service.server.service.refreshes._sessions.total() == 0)
    assert service.server.service.refreshes._pinned_bytes == 0


# ---- a service that does not refresh, dies or lies


def test_a_service_that_was_told_not_to_says_so():
    with in_process() as tier, connected(tier) as client:
        assert not client.refreshes
        with pytest.raises(TierUnavailableError, match="does not refresh"):
            NearData.open(client, Context([], [], RULES["dropped"]), Deadline(SAFETY_S))


def test_a_service_that_hangs_or_ends_in_the_middle_ends_the_session():
    go_on = threading.Event()
    with in_process(refresh_workers=1, drain_s=0.1) as tier, connected(tier) as client:
        (span,) = make_spans(1, "float32")
        client.put(Blob(bytes(32), span.layout.encode(), [span.payload.data]))
        names = [SpanName(bytes(32), span.begin, span.stop)]
        with opened(client, Context(names, [PrunedRange(0, 32, 5)], RULES["dropped"])) as session:
            window = make_window(0, 1)
            session.choose(0, [0], window, "float32", Deadline(SAFETY_S))
            tier.loop.call_soon_threadsafe(go_on.wait, 20)
            with pytest.raises(TierExhaustedError, match="in time"):
                session.choose(1, [0], window, "float32", Deadline(0.05))
            go_on.set()
            tier.shut_down()
            # The answer that was late may be there; it is not taken for another.
            for _ in range(2):
                with pytest.raises(TierError):
                    session.choose(1, [0], window, "float32", Deadline(SAFETY_S))


class RefreshLiar(Liar):
    """Tells every context that it is ready, and answers queries with what `say` makes of them."""

    say = staticmethod(lambda queries: [])

    def Refresh(self, requests, context):  # noqa: N802
        next(requests)
        yield pb.RefreshResponse(ready=pb.RefreshReady())
        for request in requests:
            yield from self.say(request.queries)


def entries_header(queries, **changes):
    entries = Entries("float32", (5,), 1, GROUP, DIM, voted=False)
    right = {"key": queries.key, "num_bytes": entries.num_bytes, "layout": entries.layout()}
    return pb.RefreshResponse(header=pb.BlobHeader(**right | {"checksum": bytes(16)} | changes))


def nothing() -> pb.RefreshResponse:
    return pb.RefreshResponse(ready=pb.RefreshReady())


def chunk(num_bytes: int) -> pb.RefreshResponse:
    return pb.RefreshResponse(chunk=bytes(num_bytes))


@pytest.mark.parametrize("say", [
    lambda queries: [nothing()],
    lambda queries: [entries_header(queries, key=bytes(32))],
    lambda queries: [entries_header(queries, layout=b"")],
    lambda queries: [entries_header(queries), nothing()],
    lambda queries: [entries_header(queries), chunk(5 * DIM * 8)],
    lambda queries: [entries_header(queries), chunk(1 << 16)],
    lambda queries: [entries_header(queries, num_bytes=1), chunk(640)],
])  # fmt: skip
def test_a_service_that_lies_gives_no_entries(say):
    with lying(RefreshLiar) as (liar, client):
        liar.say = say
        context = Context([], [PrunedRange(0, 9, 5)], RULES["dropped"])
        with opened(client, context) as session, pytest.raises(TierError):
            session.choose(0, [0], make_window(0, 1), "float32", Deadline(SAFETY_S))
