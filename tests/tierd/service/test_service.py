"""The service and its client together: what was put is what is got, on both paths."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_tier import LAYOUT, blob_of, connected, fetch, in_process, key_of, payload_of

from kvtier.tier.client import Blob, Landing

CHUNK = 64 << 10
PAGE = 4096


@pytest.fixture(params=["shared", "stream"])
def client(tier, request):
    with connected(tier, shared=request.param == "shared") as client:
        assert client.shares_memory == (request.param == "shared")
        yield client


@pytest.mark.parametrize("num_bytes", [1, PAGE, CHUNK + 1, 3_000_001])
def test_blobs_of_any_size_come_back(num_bytes, memory_directory):
    with in_process(shared_directory=memory_directory, chunk_bytes=CHUNK) as tier:
        for number, shared in enumerate([True, False]):
            with connected(tier, shared=shared) as client:
                assert client.put(blob_of(number, num_bytes))
                outcome, landed = fetch(client, [key_of(number)])
                assert outcome == [Landing.LANDED]
                assert landed[0] == payload_of(number, num_bytes)
        assert tier.problems() == []


def test_one_call_gets_many_blobs_and_says_what_became_of_each(client):
    for number in range(0, 40, 2):
        client.put(blob_of(number, 1000 * number + 1))
    wanted = [7, *range(40), 4, 4]

    def land(offer):
        assert offer[1:] == (1000 * wanted[offer.position] + 1, LAYOUT)
        if wanted[offer.position] == 8:
            return None
        return memoryview(buffers.setdefault(offer.position, bytearray(offer.num_bytes)))

    buffers: dict[int, bytearray] = {}
    outcome = client.get([key_of(number) for number in wanted], land, 1 << 20)
    for position, number in enumerate(wanted):
        if number == 8:
            assert outcome[position] is Landing.DECLINED
        elif number % 2:
            assert outcome[position] is Landing.MISSING
        else:
            assert outcome[position] is Landing.LANDED
            assert buffers[position] == payload_of(number, 1000 * number + 1)


def test_an_empty_piece_is_a_piece(client):
    payload = payload_of(1)
    client.put(Blob(key_of(1), LAYOUT, [b"", payload[:10], b"", payload[10:]]))
    assert fetch(client, [key_of(1)])[1] == {0: payload}


def test_nothing_asked_for_is_nothing_got(client):
    assert client.get([], lambda offer: None, 0) == []
    assert client.exists([]) == (0, [])
    assert client.delete([]) == 0


def test_a_put_of_what_is_held_stores_nothing_and_replace_replaces(client, tier):
    assert client.put(blob_of(1))
    used = client.stats().used_bytes
    other = Blob(key_of(1), LAYOUT, [payload_of(2, 5000)])
    assert not client.put(blob_of(1, 3_000_000))
    assert not client.put(other)
    assert client.stats().used_bytes == used
    assert fetch(client, [key_of(1)])[1] == {0: payload_of(1)}
    assert client.put(other, replace=True)
    assert fetch(client, [key_of(1)])[1] == {0: payload_of(2, 5000)}
    assert client.stats().blobs == 1


def test_what_is_deleted_is_gone(client):
    for number in range(3):
        client.put(blob_of(number))
    assert client.delete([key_of(0), key_of(2), key_of(9)]) == 2
    assert client.exists([key_of(number) for number in range(3)]).present == [False, True, False]


@settings(max_examples=50)
@given(st.data())
def test_exists_says_what_is_there_and_how_far_a_chain_goes(exists_client, data):
    numbers = data.draw(st.lists(st.integers(0, 20), max_size=30))
    presence = exists_client.exists([key_of(number) for number in numbers])
    assert presence.present == [number % 3 != 0 for number in numbers]
    gaps = [i for i, number in enumerate(numbers) if number % 3 == 0]
    assert presence.leading_run == (gaps[0] if gaps else len(numbers))


@pytest.fixture(scope="module")
def exists_client():
    with in_process() as tier, connected(tier) as client:
        for number in range(21):
            if number % 3:
                client.put(blob_of(number, 10))
        yield client
