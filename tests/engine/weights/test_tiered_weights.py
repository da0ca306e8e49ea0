"""The tree while weights change: the tier is left alone for as long as KV of other weights may be
cached, and asked under new names afterwards.
"""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from tiered_tree_harness import turn
from tree_harness import MiniScheduler, Unchanging
from tree_requests import Request, context
from waiting import SAFETY_S

from kvtier.tier.blobs.names import ContextNames
from kvtier_sglang.tier.scopes import joined
from kvtier_sglang.tier.state import TierState


class Trained(Unchanging):
    """A model whose weights are those of a training step."""

    step = 0

    def names(self) -> ContextNames:
        revision = f"{self.known.identity.revision} step {self.step}"
        return replace(self.known, identity=replace(self.known.identity, revision=revision))


def server(connect, step: int = 0) -> MiniScheduler:
    s = MiniScheduler(link=connect())
    s.tree.tier.model = Trained(s.tree.tier.names)
    update(s, step)
    return s


def update(s: MiniScheduler, step: int) -> None:
    """Update the weights as SGLang goes about it, before its cache is flushed."""
    s.tree.weights_change()
    s.tree.tier.model.step = step


def flush(s: MiniScheduler) -> None:
    s.tree.reset()
    s.allocator.clear()


PROMPT = context(60)


def test_nothing_is_asked_or_stored_while_kv_of_other_weights_is_cached(connect):
    other = server(connect, 1)
    turn(other, PROMPT, [1, 2])
    assert other.tree.tier.link.flush(SAFETY_S)
    s = server(connect)
    turn(s, context(50, seed=3), [1])
    spilled = s.tree.tier.spiller.counters["spans_spilled"]
    update(s, 1)
    assert s.tree.report()["tier"]["outdated"]
    # The tier has the prompt of these weights; but what a request attends to here may be of others.
    assert turn(s, [*PROMPT, 1, 2, 9], [3]).restored == 0
    assert s.tree.tier.spiller.counters["spans_spilled"] == spilled
    flush(s)
    assert not s.tree.report()["tier"]["outdated"]
    assert turn(s, [*PROMPT, 1, 2, 9], [3]).restored == 62
    assert s.tree.tier.spiller.counters["spans_spilled"] > spilled


def test_a_request_that_runs_while_weights_change_is_not_stored(connect):
    s = server(connect)
    request = s.admit(PROMPT)
    assert s.extend(request, 30)
    s.checkpoint(request)
    update(s, 1)
    assert s.extend(request, 100)
    s.checkpoint(request)
    assert s.decode(request, 1)
    assert s.decode(request, 2)
    s.release(request, checkpoint=True)
    assert s.tree.tier.link.flush(SAFETY_S)
    for step in (0, 1):
        # The KV that was stored before the change is of the weights before.
        restored = turn(server(connect, step), [*PROMPT, 1, 2, 9], [3]).restored
        assert restored <= (30 if step == 0 else 0)


def test_what_landed_before_the_weights_changed_is_dropped(connect):
    a = server(connect)
    turn(a, PROMPT, [1, 2])
    assert a.tree.tier.link.flush(SAFETY_S)
    b = server(connect)
    request = Request([*PROMPT, 1, 2, 9])
    key = RadixKey(request.full_untruncated_fill_ids, limit=len(PROMPT) + 2)
    match = b.tree.match_prefix(MatchPrefixParams(key=key, req=request))
    assert b._ask_tier(request, key, match).host_hit_length >= 60
    update(b, 1)
    assert b.tree.match_prefix(MatchPrefixParams(key=key, req=request)).host_hit_length == 0


def test_equal_tokens_of_another_adapter_extra_key_or_salt_share_nothing(connect):
    a = server(connect)
    turn(a, PROMPT, [1, 2])
    assert a.tree.tier.link.flush(SAFETY_S)
    found = [
        a.tree.tier.scope(TierState(), extra_key, salt)
        for extra_key in (joined("", None), joined("lora", None), joined("", "lora"))
        for salt in (None, "salt")
    ]
    assert len(set(found)) == 6
    chains = [a.tree.tier.names.chains(scope, PROMPT).exact.keys for scope in found]
    present = a.tree.tier.link.client.exists([keys[0] for keys in chains])
    assert list(present.present) == [True, *[False] * 5]
