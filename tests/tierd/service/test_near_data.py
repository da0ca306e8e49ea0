"""A refresh near the data gives the entries that fetching the exact KV would have given, and moves
only those; one that was asked for wrongly, or for what is not whole, is refused; a service that
does not refresh, dies or lies is a typed error, and gives no entries.
"""

from __future__ import annotations

from contextlib import contextmanager
from hashlib import sha256

import grpc
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from live_tier import connected, failing, in_process, live_tier, raw_stub
from test_lying_service import Liar, lying
from waiting import SAFETY_S, wait_for

from kvtier.errors import TierError, TierExhaustedError, TierProtocolError, TierUnavailableError
from kvtier.retention.keepkv import KeepKV, QueryWindow
from kvtier.retention.refreshing import Chosen, PrunedRange, RefreshRule
from kvtier.tier.blobs.names import SpanName
from kvtier.tier.blobs.payload import SpanLayout
from kvtier.tier.client import Blob, TierClient
from kvtier.tier.near_data.exact_kv import ExactSpan, exact_kv
from kvtier.tier.near_data.messages import Context, Entries
from kvtier.tier.near_data.session import NearData
from kvtier.tier.transport.connection import Deadline
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd.service import near_data
from kvtier_tierd.stores.base import BlobName

LAYERS, HEADS, GROUP, DIM, SPAN = 2, 3, 2, 16, 32
DTYPES = ["float32", "bfloat16", "float16"]
RULES = {
    "dropped": RefreshRule(KeepKV(pool_width=1), merges=False),
    "merged": RefreshRule(KeepKV(floor=0.0, pool_width=1), merges=True),
}
FLAGS = ("--memory", "16m", "--refresh-workers", "1")


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


def names_of(spans: list[ExactSpan], seed: int = 0) -> list[SpanName]:
    return [
        SpanName(sha256(f"{span} {seed}".encode()).digest(), span.begin, span.stop)
        for span in spans
    ]


def store(client: TierClient, spans: list[ExactSpan], names: list[SpanName]) -> None:
    for span, name in zip(spans, names, strict=True):
        client.put(Blob(name.key, span.layout.encode(), [span.payload.data]))


def make_window(seed: int, heads: int, dtype: str) -> QueryWindow:
    q = torch.randn(8, heads, GROUP, DIM, generator=torch.Generator().manual_seed(seed))
    return QueryWindow(q.to(getattr(torch, dtype)), DIM**-0.5)


def opened(client: TierClient, context: Context) -> NearData:
    session = NearData.open(client, context, Deadline(SAFETY_S))
    assert session is not None
    return session


def assert_equal(ours: Chosen, theirs: Chosen) -> None:
    assert torch.equal(ours.k, theirs.k)
    assert torch.equal(ours.v, theirs.v)
    assert (ours.log_votes is None) == (theirs.log_votes is None)
    if ours.log_votes is not None:
        assert torch.equal(ours.log_votes, theirs.log_votes)


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_what_comes_is_what_fetching_would_have_given(client, rule, dtype):
    spans = make_spans(6, dtype)
    names = names_of(spans)
    store(client, spans, names)
    ranges = [PrunedRange(3, 50, 12), PrunedRange(70, 190, 30)]
    session = opened(client, Context(names, ranges, rule))
    heads = [0, 2]
    for layer in (1, 0):
        window = make_window(layer, len(heads), dtype)
        came = session.choose(layer, heads, window, dtype, Deadline(SAFETY_S))
        for pruned, chosen in zip(ranges, came, strict=True):
            k, v = exact_kv(spans, layer, heads, pruned)
            assert_equal(chosen, rule.choose(k, v, pruned.kept, window))
    session.close()


@given(
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "float8_e4m3fn"]),
    counts=st.lists(st.integers(1, 7), max_size=4),
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    dim=st.integers(1, 5),
    voted=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_entries_come_out_as_they_went_in(dtype, counts, heads, group, dim, voted, seed):
    generator = torch.Generator().manual_seed(seed)
    chosen = []
    for n in counts:
        k, v = (torch.randn(heads, n, dim, generator=generator) for _ in range(2))
        votes = torch.randn(heads, group, n, generator=generator) if voted else None
        kind = getattr(torch, dtype)
        chosen.append(Chosen(k.to(kind), v.to(kind), votes))
    entries = Entries(dtype, tuple(counts), heads, group, dim, voted)
    payload = entries.encode(chosen)
    for ours, theirs in zip(entries.decode(payload), chosen, strict=True):
        for a, b in zip(ours[:2], theirs[:2], strict=True):
            assert torch.equal(a.view(torch.uint8), b.contiguous().view(torch.uint8))
        if voted:
            assert torch.equal(ours.log_votes, theirs.log_votes)
    with pytest.raises(TierProtocolError):
        entries.decode(np.append(payload, np.uint8(0)))


def test_a_span_that_is_not_held_means_no_session(client):
    spans = make_spans(3, "float32", seed=1)
    names = names_of(spans, seed=1)
    store(client, spans[:2], names[:2])
    context = Context(names, [PrunedRange(0, 96, 10)], RULES["dropped"])
    assert NearData.open(client, context, Deadline(SAFETY_S)) is None


def test_a_span_that_does_not_verify_means_no_session_and_is_gone(client, service):
    spans = make_spans(2, "float32", seed=2)
    names = names_of(spans, seed=2)
    store(client, spans, names)

    def spoil() -> None:
        blob = service.store._blobs[BlobName("default", names[1].key)]
        service.store.arena.view(blob.offset, 1)[0] ^= 1

    service.call(spoil)
    context = Context(names, [PrunedRange(0, 64, 10)], RULES["dropped"])
    assert NearData.open(client, context, Deadline(SAFETY_S)) is None
    assert client.exists([name.key for name in names]).present == [True, False]


@pytest.mark.parametrize(
    "spoil",
    [
        {"layer": LAYERS},
        {"heads": [HEADS]},
        {"heads": []},
        {"dtype": "int3"},
        {"queries": b"odd"},
        {"key": b"short"},
    ],
    ids=lambda spoil: next(iter(spoil)),
)
def test_queries_that_make_no_sense_are_refused_by_name(client, service, spoil):
    spans = make_spans(1, "float32", seed=3)
    names = names_of(spans, seed=3)
    store(client, spans, names)
    context = Context(names, [PrunedRange(0, 20, 4)], RULES["dropped"]).encode()
    right = {
        "key": bytes(32),
        "layer": 0,
        "heads": [0],
        "group": 1,
        "dtype": "float32",
        "queries": bytes(DIM * 4),
    }
    requests = [
        pb.RefreshRequest(context=context),
        pb.RefreshRequest(queries=pb.RefreshQueries(**right | spoil)),
    ]
    with raw_stub(service.address) as stub, failing(grpc.StatusCode.INVALID_ARGUMENT):
        list(stub.Refresh(iter(requests)))


@pytest.mark.parametrize(
    "context",
    [
        pb.RefreshContext(),
        Context([SpanName(b"short", 0, 3)], [], RULES["dropped"]).encode(),
        Context([SpanName(bytes(32), 3, 3)], [], RULES["dropped"]).encode(),
        Context([], [PrunedRange(0, 9, 5), PrunedRange(8, 12, 1)], RULES["dropped"]).encode(),
        pb.RefreshContext(
            rule=Context([], [], RULES["dropped"]).encode().rule,
            ranges=[pb.PrunedRange(begin=5, end=9, kept=5)],
        ),
    ],
    ids=["no rule", "a short key", "an empty span", "ranges that overlap", "nothing dropped"],
)
def test_contexts_that_make_no_sense_are_refused(service, context):
    with raw_stub(service.address) as stub, failing(grpc.StatusCode.INVALID_ARGUMENT):
        list(stub.Refresh(iter([pb.RefreshRequest(context=context)])))


@pytest.mark.parametrize(
    ("dtype", "end", "what"), [("float32", 80, "a gap"), ("float16", 60, "one layout")]
)
def test_spans_that_are_not_the_context_are_refused(client, dtype, end, what):
    """The pruned range goes beyond them, or one is of another shape."""
    spans = make_spans(1, "float32", seed=4) + make_spans(2, dtype, seed=4)[1:]
    names = names_of(spans, seed=end)
    store(client, spans, names)
    session = opened(client, Context(names, [PrunedRange(10, end, 5)], RULES["dropped"]))
    with pytest.raises(TierError, match=what):
        session.choose(0, [0], make_window(0, 1, "float32"), "float32", Deadline(SAFETY_S))
    session.close()


@pytest.mark.parametrize(
    ("limit", "value", "named"),
    [("MAX_SESSIONS", 1, "refreshes under way"), ("PINNED_SHARE", 0.001, "is pinned")],
)
def test_contexts_that_wait_may_not_pin_everything(
    client, service, monkeypatch, limit, value, named
):
    spans = make_spans(2, "float32", seed=6)
    names = names_of(spans, seed=6)
    store(client, spans, names)
    context = Context(names, [PrunedRange(0, 64, 5)], RULES["dropped"])
    with opened_for_a_while(client, context):
        monkeypatch.setattr(near_data, limit, value)
        with pytest.raises(TierExhaustedError, match=named):
            NearData.open(client, context, Deadline(SAFETY_S))
    monkeypatch.undo()
    wait_for(lambda: service.server.refreshes._sessions.total() == 0)
    assert service.server.refreshes._pinned_bytes == 0


@contextmanager
def opened_for_a_while(client: TierClient, context: Context):
    session = opened(client, context)
    yield session
    session.close()


def test_what_was_sent_is_counted(client, service):
    spans = make_spans(2, "float32", seed=8)
    names = names_of(spans, seed=8)
    store(client, spans, names)
    labels = {"namespace": "default"}
    registry = service.server.metrics.registry
    before = registry.get_sample_value("kvtier_tier_refreshed_bytes_total", labels) or 0
    with opened_for_a_while(
        client, Context(names, [PrunedRange(0, 64, 5)], RULES["dropped"])
    ) as session:
        window = make_window(0, 1, "float32")
        session.choose(0, [0], window, "float32", Deadline(SAFETY_S))

        def counted() -> bool:
            found = registry.get_sample_value("kvtier_tier_refreshed_bytes_total", labels) or 0
            return found - before == 2 * 5 * DIM * 4

        wait_for(counted)


# ---- a service that does not refresh, dies or lies


def test_a_service_that_was_told_not_to_says_so():
    with in_process() as tier, connected(tier) as client:
        assert not client.refreshes
        with pytest.raises(TierUnavailableError, match="does not refresh"):
            NearData.open(client, Context([], [], RULES["dropped"]), Deadline(SAFETY_S))


def test_a_service_that_dies_in_the_middle_ends_the_session(tmp_path):
    spans = make_spans(2, "float32")
    names = names_of(spans)
    with (
        live_tier(tmp_path, *FLAGS) as tier,
        TierClient(tier.address, timeout_s=SAFETY_S) as client,
    ):
        store(client, spans, names)
        session = opened(client, Context(names, [PrunedRange(0, 64, 5)], RULES["dropped"]))
        window = make_window(0, 1, "float32")
        session.choose(0, [0], window, "float32", Deadline(SAFETY_S))
        tier.pause()
        with pytest.raises(TierExhaustedError, match="in time"):
            session.choose(1, [0], window, "float32", Deadline(0.05))
        tier.resume()
        tier.kill()
        # The answer that was late may be there; it is not taken for another.
        for _ in range(2):
            with pytest.raises(TierError):
                session.choose(1, [0], window, "float32", Deadline(SAFETY_S))
        session.close()


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


@pytest.mark.parametrize(
    "say",
    [
        lambda queries: [pb.RefreshResponse(ready=pb.RefreshReady())],
        lambda queries: [entries_header(queries, key=bytes(32))],
        lambda queries: [entries_header(queries, layout=b"")],
        lambda queries: [entries_header(queries), pb.RefreshResponse(ready=pb.RefreshReady())],
        lambda queries: [entries_header(queries), pb.RefreshResponse(chunk=bytes(5 * DIM * 8))],
        lambda queries: [entries_header(queries), pb.RefreshResponse(chunk=bytes(1 << 16))],
        lambda queries: [
            entries_header(queries, num_bytes=1),
            pb.RefreshResponse(chunk=bytes(640)),
        ],
    ],
    ids=["no entries", "other key", "other layout", "cut short", "corrupt", "too long", "size"],
)
def test_a_service_that_lies_gives_no_entries(say):
    with lying(RefreshLiar) as (liar, client):
        liar.say = say
        session = opened(client, Context([], [PrunedRange(0, 9, 5)], RULES["dropped"]))
        with pytest.raises(TierError):
            session.choose(0, [0], make_window(0, 1, "float32"), "float32", Deadline(SAFETY_S))
        session.close()
