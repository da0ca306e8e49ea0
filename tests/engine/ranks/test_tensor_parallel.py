"""Two tensor parallel ranks say what one says, whatever is compressed, evicted, restored and
refreshed. SGLang's own checker compares what the ranks decide, and ends a server whose ranks part.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from compressing import uneven_profile
from engine_process import DEMO_MODEL, run_engine
from tierd.live_tier import live_tier
from tiered_engine import ENGINE, RULE

from kvtier.heads.profile import HeadProfile, load_profile

pytestmark = pytest.mark.engine

TWO_RANKS = {
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
    "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
    # Without a compiler SGLang's all-reduce on a CPU cannot be traced.
    "TORCHDYNAMO_DISABLE": "1",
}


def empty_rank() -> HeadProfile:
    """The demo model's heads without those of the second of two ranks."""
    profile = load_profile(DEMO_MODEL / "head_profile.json")
    first = profile.shape.num_kv_heads // 2
    heads = tuple(tuple(head for head in layer if head < first) for layer in profile.ca_heads)
    return profile.model_copy(update={"ca_heads": heads, "scores": None})


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(6, 384) for _ in range(count)]


def sessions(seed: int, count: int, longest: int) -> list[list[dict]]:
    """Rounds: every session's first turn side by side, then every session's second turn."""
    rng = random.Random(seed)
    lengths = [rng.randrange(longest // 3, longest) for _ in range(count)]
    first = [{"input_ids": tokens(rng, n), "max_new_tokens": 9} for n in lengths]
    second = [
        {"input_ids": tokens(rng, 70), "max_new_tokens": 9, "continues": [0, index]}
        for index in range(count)
    ]
    return [first, second]


def said(out: dict) -> list[list[list[int]]]:
    assert out["state"]["integrity"] == []
    return [[request["output_ids"] for request in requests] for requests in out["rounds"]]


def serve(folder: Path, ranks: int, rounds: list[list[dict]], env: dict[str, str], **flags) -> dict:
    engine = {**ENGINE, "tp_size": ranks, **flags}
    return run_engine(folder, engine, rounds, env | (TWO_RANKS if ranks == 2 else {}))


@pytest.mark.parametrize(
    ("profile", "slots", "settings"),
    [
        (uneven_profile, 20_000, {"KVTIER_RETENTION": "0.3"}),
        # So few slots that contexts are evicted and computed again.
        (empty_rank, 4000, {"KVTIER_PREFILL": "streaming"}),
    ],
    ids=["a share, uneven ranks", "streaming and evicting, a rank without CA heads"],
)
def test_two_ranks_say_what_one_says(tmp_path, profile, slots, settings):
    profile().save(tmp_path / "profile.json")
    env = {**RULE, "KVTIER_HEAD_PROFILE": str(tmp_path / "profile.json"), **settings}
    rounds = sessions(3, 6, 1200)
    one, two = (serve(tmp_path, ranks, rounds, env, max_total_tokens=slots) for ranks in (1, 2))
    assert said(two) == said(one)
    for name in ("dropped_tokens", "compacted_tokens", "ca_slots_used", "locality_slots_used"):
        assert two["state"][name] == one["state"][name], name
    assert two["state"]["dropped_tokens"] > 0
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


def test_two_ranks_restore_and_refresh_what_each_of_them_spilled(tmp_path):
    uneven_profile().save(tmp_path / "profile.json")
    env = {**RULE, "KVTIER_HEAD_PROFILE": str(tmp_path / "profile.json")}
    env |= {"KVTIER_RETENTION": "0.3", "KVTIER_REFRESH": "turn"}
    (first, second) = sessions(5, 3, 1200)
    # One at a time, so that no turn waits for another's.
    rounds = [[request] for request in first]
    rounds += [[{**request, "continues": [request["continues"][1], 0]}] for request in second]
    answers, restored = [], []
    with live_tier(tmp_path, "--memory", "512m") as tier:
        env["KVTIER_TIER"] = tier.address
        for ranks in (1, 2):
            env["KVTIER_TIER_NAMESPACE"] = f"{ranks}"
            before = serve(tmp_path, ranks, rounds, env)
            ended = [round_[0] for round_ in before["rounds"][len(first) :]]
            again = [
                [{"input_ids": [*turn["prompt"], *turn["output_ids"], *range(20, 60)]}]
                for turn in ended
            ]
            back = serve(
                tmp_path, ranks, [[{**r, "max_new_tokens": 9} for r in a] for a in again], env
            )
            answers.append((said(before), said(back)))
            restored.append([state["state"]["tier"] for state in (before, back)])
    for before, back in restored:
        if before.get("refresh_missed") or back.get("gave_up_waiting"):
            pytest.skip("this machine found computing faster than its tier just then")
        assert before["refreshed_turns"] == len(second)
        assert back["restored_requests"] == back["refreshed_turns"] == len(second)
    assert answers[0] == answers[1]
