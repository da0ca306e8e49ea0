"""Two tensor parallel ranks say what one says, whatever is compressed and evicted. SGLang's own
checker compares what the ranks decide, and ends a server whose ranks part. Over a tier:
test_faulty_ranks.py.
"""

from __future__ import annotations

import random

import pytest
from engine_process import DEMO_MODEL
from serving import PROFILES, serve
from sessions import Rounds, said, side_by_side, tokens
from sglang_versions import needs_drafts
from tiered_engine import RULE

pytestmark = pytest.mark.engine


def sessions(seed: int, count: int, longest: int) -> Rounds:
    """Two turns of each session, side by side."""
    rng = random.Random(seed)
    lengths = [rng.randrange(longest // 3, longest) for _ in range(count)]
    return side_by_side([[tokens(rng, n), tokens(rng, 70)] for n in lengths], 9)


def test_two_ranks_say_what_one_says_though_one_of_them_has_no_ca_heads(tmp_path):
    """All ranks free as many slots as the one with most anchored heads can. There is no cap on
    tokens: ranks have the slots that their memory was planned for, or the server does not start, as
    what scores take is not in SGLang's bytes of a token."""
    PROFILES["an empty rank"]().save(tmp_path / "profile.json")
    env = {**RULE, "KVTIER_HEAD_PROFILE": str(tmp_path / "profile.json"), "KVTIER_RETENTION": "0.5"}
    uncapped = {"max_total_tokens": None, "mem_fraction_static": 0.2}
    rounds = sessions(3, 6, 1200)
    one, two = (serve(tmp_path, ranks, rounds, env, **uncapped) for ranks in (1, 2))
    assert said(two) == said(one)
    assert one["state"]["compacted_tokens"] > two["state"]["compacted_tokens"] > 0
    assert min(out["state"]["slots"] for out in (one, two)) > 30_000


def test_two_ranks_evict_what_one_evicts(tmp_path):
    """There are so few slots that contexts are evicted and computed again. What is computed again
    says other things: so ranks are even, which hold as many slots as one, and requests come one by
    one."""
    PROFILES["even"]().save(tmp_path / "profile.json")
    env = {**RULE, "KVTIER_HEAD_PROFILE": str(tmp_path / "profile.json")}
    first, second = sessions(3, 6, 1200)
    rounds = [[request] for request in first]
    rounds += [[{**request, "continues": [at, 0]}] for at, request in enumerate(second)]
    one, two = (serve(tmp_path, ranks, rounds, env, max_total_tokens=2400) for ranks in (1, 2))
    assert said(two) == said(one)
    for name in ("compacted_tokens", "kv_evicted_tokens", "slots_used"):
        assert two["state"][name] == one["state"][name] > 0, name


@needs_drafts
def test_two_ranks_verify_drafts_over_an_fp8_cache_as_one_does(tmp_path):
    """A text repeats itself, so that drafts are accepted."""
    PROFILES["uneven"]().save(tmp_path / "profile.json")
    rng = random.Random(5)
    phrases = [tokens(rng, 35) for _ in range(4)]
    contexts = [{"input_ids": one * 12, "max_new_tokens": 1} for one in phrases]
    new = {"max_new_tokens": 30}
    questions = [{"input_ids": one, "continues": [0, i], **new} for i, one in enumerate(phrases)]
    env = {**RULE, "KVTIER_HEAD_PROFILE": str(tmp_path / "profile.json")}
    flags = {"speculative_algorithm": "NGRAM", "kv_cache_dtype": "fp8_e4m3"}
    one, two = (serve(tmp_path, ranks, [contexts, questions], env, **flags) for ranks in (1, 2))
    assert said(two) == said(one)
    assert one["state"]["compacted_tokens"] >= two["state"]["compacted_tokens"] > 0
    assert min(answer["accept_length"] for answer in two["rounds"][1]) > 1
    assert two["state"]["kv_capacity_bytes"] < one["state"]["kv_capacity_bytes"], "half the heads"


def test_two_ranks_keep_what_the_curve_says_of_each_context(tmp_path):
    """The first rank decides: the last digits of an NLL may differ between ranks."""
    env = {
        "KVTIER_HEAD_PROFILE": str(DEMO_MODEL / "head_profile.json"),
        "KVTIER_QUALITY": "0.95",
        "KVTIER_CURVE": str(DEMO_MODEL / "curve.json"),
    }
    rounds = sessions(4, 3, 2000)
    one, two = (serve(tmp_path, ranks, rounds, env) for ranks in (1, 2))
    assert said(two) == said(one)
    assert two["state"]["retention"]["reasons"].keys() == {"quality"}
    kept = [
        [turn["kept_tokens"] for turn in out["state"]["retention"]["recent"]] for out in (one, two)
    ]
    assert kept[0] == kept[1]


def test_a_rank_that_parts_is_caught(tmp_path):
    """SGLang's checker sees what kvtier has it compare."""
    PROFILES["even"]().save(tmp_path / "profile.json")
    env = {**RULE, "KVTIER_HEAD_PROFILE": str(tmp_path / "profile.json"), "KVTIER_RETENTION": "0.3"}
    with pytest.raises(AssertionError):
        serve(tmp_path, 2, sessions(3, 2, 1200), env, fault="parting")
    assert "Found rank divergence" in (tmp_path / "script.log").read_text(errors="replace")
