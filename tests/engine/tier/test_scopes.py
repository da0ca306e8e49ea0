"""Extra keys, adapters and cache salts that cannot be taken for each other."""

from dataclasses import replace
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st
from tree_harness import MiniScheduler

from kvtier.tier.blobs.keys import Scope
from kvtier_sglang.tier.scopes import (
    joined,
    separate_adapters,
    separated,
    share_in,
    with_memory,
    with_share,
    without_memory,
    without_share,
)
from kvtier_sglang.tier.state import TierState

KEYS = st.text(alphabet="ae0123:|\0t", max_size=6)
ADAPTERS = st.none() | st.text(alphabet="ae0123:", min_size=1, max_size=6)


@given(extra=KEYS, adapter=ADAPTERS, other_extra=KEYS, other_adapter=ADAPTERS)
def test_equal_only_for_the_same_extra_key_and_adapter(extra, adapter, other_extra, other_adapter):
    text = joined(extra, adapter)
    assert separated(text) == (extra, adapter)
    same = (extra, adapter) == (other_extra, other_adapter)
    assert (text == joined(other_extra, other_adapter)) == same


SHARES = st.none() | st.floats(0, 1, exclude_min=True)
MEMORIES = st.none() | st.text(alphabet="0123", min_size=16, max_size=16)


@given(
    first=st.tuples(KEYS, ADAPTERS, SHARES, MEMORIES),
    second=st.tuples(KEYS, ADAPTERS, SHARES, MEMORIES),
)
def test_sessions_that_keep_at_most_a_share_are_with_those_of_the_same_alone(first, second):
    texts = []
    for extra, adapter, share, memory in (first, second):
        text = plain = joined(extra, adapter)
        text = text if share is None else with_share(text, share)
        text = text if memory is None else with_memory(text, memory)
        assert share_in(text) == share
        assert without_share(without_memory(text)) == plain
        texts.append(text)
    assert (texts[0] == texts[1]) == (first == second)


def request(extra_key, lora_id):
    """Return the extra key as SGLang's constructor leaves it: the adapter's id behind the extra
    key."""
    both = extra_key if lora_id is None else (extra_key or "") + lora_id
    req = SimpleNamespace(extra_key=both, lora_id=lora_id)
    separate_adapters(req)
    return req.extra_key


def test_a_request_whose_extra_key_is_an_adapters_id_does_not_find_its_kv():
    assert request("7f3", None) != request(None, "7f3")
    assert request("tenant", "7f3") != request("tenan", "t7f3")
    assert request("tenant7f3", None) != request("tenant", "7f3")
    assert request(None, None) is None
    assert request("", None) is None


def test_a_request_is_in_the_scope_of_the_memory_that_it_was_matched_behind(connect):
    tier = MiniScheduler(link=connect()).tree.tier
    memory = SimpleNamespace(digest="0123456789abcdef", prefix_ids=(7,) * 30)
    behind, plain = TierState(memory=memory), TierState()
    key = with_memory(joined("tenant", None), memory.digest)
    expected = Scope("tenant", "salt", memory=memory.digest, memory_tokens=30)
    assert tier.scope(behind, key, "salt") == expected
    assert tier.scope(plain, joined("tenant", None), "salt") == Scope("tenant", "salt")
    less = with_share(joined("tenant", None), 0.1)
    assert tier.scope(plain, less, "salt") == Scope("tenant", "salt", share=0.1)
    assert tier.scope(behind, with_memory(less, memory.digest), "salt") == replace(
        expected, share=0.1
    )
    # Its memory was dropped before it was matched, or it has left it since.
    assert tier.scope(plain, key, "salt") is None
    assert tier.scope(behind, joined("tenant", None), "salt") is None


def test_what_was_fetched_behind_a_memory_is_forgotten_by_who_is_not_behind_it_any_more(connect):
    tier = MiniScheduler(link=connect()).tree.tier
    memory = SimpleNamespace(digest="0123456789abcdef", prefix_ids=(7,) * 30)
    stays, leaves = TierState(memory=memory), TierState()
    for state in (stays, leaves):
        tier.decline(state, Scope(memory=memory.digest))
        tier.matched(state)
    assert stays.kv_wait is not None
    assert leaves.kv_wait is None
