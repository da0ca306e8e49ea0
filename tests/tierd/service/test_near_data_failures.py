"""A service that does not refresh, dies or lies: a typed error, and no entries."""

from __future__ import annotations

import pytest
from live_tier import in_process, live_tier
from near_data_spans import (
    DIM,
    FLAGS,
    GROUP,
    RULES,
    make_spans,
    make_window,
    names_of,
    opened,
    store,
)
from test_lying_service import Liar, lying
from waiting import SAFETY_S

from kvtier.errors import (
    TierError,
    TierExhaustedError,
    TierUnavailableError,
)
from kvtier.retention.refreshing import PrunedRange
from kvtier.tier.client import TierClient
from kvtier.tier.near_data.messages import Context, Entries
from kvtier.tier.near_data.session import NearData
from kvtier.tier.transport.connection import Deadline
from kvtier.v1 import tier_pb2 as pb


def test_a_service_that_was_told_not_to_says_so():
    with in_process() as tier, TierClient(tier.address, timeout_s=SAFETY_S) as client:
        client.connect()
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


def header_of(queries, **changes):
    entries = Entries("float32", (5,), 1, GROUP, DIM, voted=False)
    right = {"key": queries.key, "num_bytes": entries.num_bytes, "layout": entries.layout()}
    return pb.RefreshResponse(header=pb.BlobHeader(**right | {"checksum": bytes(16)} | changes))


@pytest.mark.parametrize(
    "say",
    [
        lambda queries: [pb.RefreshResponse(ready=pb.RefreshReady())],
        lambda queries: [header_of(queries, key=bytes(32))],
        lambda queries: [header_of(queries, layout=b"")],
        lambda queries: [header_of(queries), pb.RefreshResponse(ready=pb.RefreshReady())],
        lambda queries: [header_of(queries), pb.RefreshResponse(chunk=bytes(5 * DIM * 8))],
        lambda queries: [header_of(queries), pb.RefreshResponse(chunk=bytes(1 << 16))],
        lambda queries: [header_of(queries, num_bytes=1), pb.RefreshResponse(chunk=bytes(640))],
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
