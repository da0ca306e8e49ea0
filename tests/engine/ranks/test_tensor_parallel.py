"""Two tensor parallel ranks say what one says, whatever is compressed and evicted. SGLang's own
checker compares what the ranks decide, and ends a server whose ranks part. Over a tier:
test_faulty_ranks.py.
"""

from __future__ import annotations

import random

import pytest
from engine_process import DEMO_MODEL
from serving import PROFILES, first_turns, next_turns, said, serve, tokens
from tiered_engine import RULE

pytestmark = pytest.mark.engine


def sessions(seed: int, count: int, longest: int) -> list[list[dict]]:
    """Rounds: every session's first turn side by side, then every session's second turn."""
    rng = random.Random(seed)
    return [first_turns(rng, count, longest), next_turns(rng, 0, count)]


@pytest.mark.parametrize(
    ("profile", "slots", "settings"),
    [
        ("even", 20_000, {"KVTIER_RETENTION": "0.3"}),
        # So few slots that contexts are evicted and computed again.
        ("an empty rank", 4000, {"KVTIER_PREFILL": "streaming"}),
    ],
    ids=["a share, even ranks", "streaming and evicting, a rank without CA heads"],
)
def test_two_ranks_say_what_one_says(tmp_path, profile, slots, settings):
    PROFILES[profile]().save(tmp_path / "profile.json")
    env = {**RULE, "KVTIER_HEAD_PROFILE": str(tmp_path / "profile.json"), **settings}
    rounds = sessions(3, 6, 1200)
    one, two = (serve(tmp_path, ranks, rounds, env, max_total_tokens=slots) for ranks in (1, 2))
    assert said(two) == said(one)
    for name in ("dropped_tokens", "compacted_tokens", "ca_slots_used", "locality_slots_used"):
        assert two["state"][name] == one["state"][name], name
    assert two["state"]["dropped_tokens"] > 0
    assert two["state"]["kv_capacity_bytes"] < one["state"]["kv_capacity_bytes"], "half the heads"
    idle = two["state"]["idle_share_of_ranks"]
    assert len(idle) == 2
    assert (max(idle) > 0) == (profile != "even")
    assert min(idle) == 0
    assert max(idle) < 1
    assert "idle_share_of_ranks" not in one["state"]


def test_two_ranks_verify_drafts_over_an_fp8_cache_as_one_does(tmp_path):
    """Where a text repeats itself, so that drafts are accepted."""
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
    assert two["state"]["dropped_tokens"] == one["state"]["dropped_tokens"] > 0
    assert min(answer["accept_length"] for answer in two["rounds"][1]) > 1


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


def test_without_a_token_cap_both_ranks_have_the_slots_that_the_poorer_pays_for(tmp_path):
    """Else the server does not start: what scores take is not in SGLang's bytes of a token, and a
    rank without CA heads could pay for more."""
    PROFILES["an empty rank"]().save(tmp_path / "profile.json")
    env = {**RULE, "KVTIER_HEAD_PROFILE": str(tmp_path / "profile.json"), "KVTIER_RETENTION": "0.5"}
    rounds = sessions(6, 2, 600)
    uncapped = {"max_total_tokens": None, "mem_fraction_static": 0.5}
    one, two = (serve(tmp_path, ranks, rounds, env, **uncapped) for ranks in (1, 2))
    assert said(two) == said(one)
    assert two["state"]["ca_slots"] > 30_000
    assert 0 < two["state"]["idle_share_of_ranks"][1] < 1


def test_a_rank_that_parts_is_caught(tmp_path):
    """SGLang's checker sees what kvtier has it compare."""
    PROFILES["even"]().save(tmp_path / "profile.json")
    env = {**RULE, "KVTIER_HEAD_PROFILE": str(tmp_path / "profile.json"), "KVTIER_RETENTION": "0.3"}
    with pytest.raises(AssertionError, match="rank divergence"):
        serve(tmp_path, 2, sessions(3, 2, 1200), env, fault="parting")
