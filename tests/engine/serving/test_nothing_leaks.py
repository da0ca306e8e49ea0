"""Hundreds of random operations on a real engine with pools far too small; nothing may leak."""

from __future__ import annotations

from pathlib import Path

import pytest
from compressing import POLICIES, RULE_ENV, competing, uneven_profile
from engine_process import DEMO_MODEL, run_script
from thorough import THOROUGH
from tierd.live_tier import live_tier

from kvtier.heads.tokens import fit_tokens
from kvtier.traffic.formats import read_trace
from kvtier.traffic.request_log import read_log, sums_of

pytestmark = pytest.mark.engine

FUZZER = Path(__file__).parents[1] / "fuzz_runner.py"


@pytest.mark.parametrize(
    ("operations", "seed", "settings"),
    [(500, 7, {}), (500 if THOROUGH else 250, 8, {"KVTIER_RETENTION": "0.5"})],
    ids=["heads alone", "a share, too"],
)
def test_every_slot_is_accounted_for_after_hundreds_of_random_operations(
    tmp_path, operations, seed, settings
):
    uneven_profile().save(tmp_path / "profile.json")
    profile = {"KVTIER_HEAD_PROFILE": str(tmp_path / "profile.json")}
    reuse = {"KVTIER_REUSE_BEHIND_EDITS": "on", "KVTIER_REUSE_LEAST_TOKENS": "64"}
    live(tmp_path, operations, seed, {**profile, **reuse, **settings}, edits=True)


@pytest.mark.parametrize(
    ("settings", "chunk", "done"),
    [
        ({}, 256, ("cut_spans", "copied_beginnings")),
        ({"KVTIER_REUSE_LEAST_TOKENS": "64"}, 256, ("moved_tokens",)),
        (
            {"KVTIER_COMPRESS_PREFILL": "always", "KVTIER_KEPT_DTYPE": "int4"},
            64,
            ("streamed_chunks",),
        ),
    ],
    ids=["cut", "edited", "coded and streamed"],
)
def test_every_slot_is_accounted_for_where_heads_compete_over_a_tier(
    tmp_path, settings, chunk, done
):
    """Spans are cut, or prompts are compressed as they come, and what was evicted comes back."""
    worth = fit_tokens(str(DEMO_MODEL), contexts=2, lengths=[512]).worth
    env = {
        **competing(tmp_path, worth),
        "KVTIER_RETENTION": "0.25",
        "KVTIER_TIER_SPAN_TOKENS": "32",
        **settings,
    }
    operations = 2000 if THOROUGH else 200
    with live_tier(tmp_path, "--memory", "256m") as tier:
        env["KVTIER_TIER"] = tier.address
        state = live(
            *(tmp_path, operations, 9, env, 2800, [done, ["restored_requests"]]),
            edits=True,
            **{"max_total_tokens": 8000, "chunked_prefill_size": chunk},
        )
    assert sum(state.get(name, 0) for name in done) > 0
    assert state["tier"]["restored_requests"] > 0


def live(
    tmp_path, operations, seed, settings, longest=700, done=(), *, edits=False, **engine
) -> dict:
    """The state after a random life under SGLang's strict checks of its memory."""
    plan = {
        "engine": {
            "model_path": str(DEMO_MODEL),
            "max_total_tokens": 3000,
            "chunked_prefill_size": 256,
            **POLICIES["kvtier"],
            **engine,
        },
        "operations": operations,
        "longest": longest,
        "seed": seed,
        "edits": edits,
        "done": done,
    }
    log = tmp_path / "requests.jsonl"
    env = {
        **RULE_ENV,
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        "KVTIER_REQUEST_LOG": str(log),
        **settings,
    }
    out = run_script(FUZZER, tmp_path, plan, env)
    assert sum(out["counts"].values()) >= 0.96 * operations, "the operations were issued"
    assert out["counts"]["aborts"] > 0.06 * operations
    assert out["finished"] > 0.1 * operations, "pressure must not stop the server from serving"
    assert out["state"]["integrity"] == []
    assert out["state"]["compacted_tokens"] > 0
    assert out["after_flush"]["slots_used"] == 0
    check_log(log, out)
    return out["state"]


def check_log(log: Path, out: dict) -> None:
    """Every prompt is accounted, and lines sum up to what the server counted."""
    requests = list(read_log(log))
    assert len(requests) >= out["finished"]
    assert len(read_trace(log).requests) == len(requests)
    whole = 0
    for one in requests:
        there = one.hit + one.restored + one.computed - one.recomputed.get("retracted", 0)
        # The last chunk of an aborted request is missing.
        assert there <= one.tokens
        assert one.recomputed_tokens <= one.computed
        whole += there == one.tokens
    assert whole >= out["finished"]
    every, _ = sums_of(requests)
    counted = out["state"]["prompts"]
    assert {name: getattr(every, name) for name in ("hit", "restored", "computed")} == {
        name: counted[name] for name in ("hit", "restored", "computed")
    }
    assert every.recomputed == {why: n for why, n in counted["recomputed"].items() if n}
