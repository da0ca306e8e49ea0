"""Every option of SGLang's scheduler that is not refused, under load: a busy server's tokens are
those of a quiet one of stock SGLang's, and nothing leaks.

A walk over SGLang's own arguments finds an option that it adds: it fails here until the option is
in one of the lives, refused, or said to be of no use here.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from compressing import POLICIES, RULE_ENV, uneven_profile
from engine_process import DEMO_MODEL, run_engine, run_script
from sessions import tokens
from sglang.srt.server_args import ServerArgs

pytestmark = pytest.mark.engine

BUSY = Path(__file__).with_name("busy_runner.py")
# A pool that six requests want more of than there is.
SMALL = {
    "model_path": str(DEMO_MODEL),
    "chunked_prefill_size": 256,
    "max_running_requests": 6,
    "max_total_tokens": 2400,
}


def requests(count: int = 24) -> list[dict[str, Any]]:
    """Two beginnings that all share, and something of one's own."""
    rng = random.Random(11)
    beginnings = [tokens(rng, 300), tokens(rng, 500)]
    return [
        {
            "input_ids": [*beginnings[i % 2], *tokens(rng, rng.randrange(10, 120))],
            "max_new_tokens": rng.randrange(20, 60),
            "priority": rng.randrange(3) if i % 2 else None,
            "routing_key": f"key-{i % 3}",
            "stream": i % 4 == 0,
        }
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory) -> list[list[int]]:
    """Return what stock SGLang answers where there is room for all."""
    folder = tmp_path_factory.mktemp("quiet")
    engine = {**SMALL, "max_total_tokens": 30_000, "max_running_requests": 24, **POLICIES["stock"]}
    (answers,) = run_engine(folder, engine, [requests()])["rounds"]
    return [answer["output_ids"] for answer in answers]


# Together they take every option.
LIVES: dict[str, dict[str, Any]] = {
    "mixed chunks": {
        "enable_mixed_chunk": True,
        "schedule_policy": "lpm",
        "stream_interval": 5,
        "prefill_max_requests": 2,
        "radix_eviction_policy": "lfu",
        "enable_dynamic_chunking": True,
    },
    "mixed chunks without overlap": {
        "enable_mixed_chunk": True,
        "disable_overlap_schedule": True,
        "schedule_policy": "dfs-weight",
        "num_continuous_decode_steps": 3,
        "incremental_streaming_output": True,
        "batch_notify_size": 2,
        "radix_eviction_policy": "slru",
        "radix_eviction_policy_config": {"protected_threshold": 3},
    },
    "priorities": {
        "enable_priority_scheduling": True,
        "priority_scheduling_preemption_threshold": 1,
        "schedule_low_priority_values_first": True,
        "retraction_policy": "priority",
        "schedule_conservativeness": 0.1,
        "schedule_policy": "lof",
        "radix_eviction_policy": "priority",
    },
    "priorities of a short queue": {
        "enable_priority_scheduling": True,
        "disable_priority_preemption": True,
        "default_priority_value": 1,
        "max_queued_requests": 10,
        "max_total_tokens": 1200,
        "max_prefill_tokens": 300,
        "schedule_policy": "fcfs",
    },
    "intervals": {
        "max_total_tokens": 1200,
        "prefill_decode_interval": 2,
        "prefill_decode_interval_min_bs": 2,
        "min_free_slots_delay": 2,
        "scheduler_recv_interval": 3,
        "page_size": 16,
        "schedule_policy": "routing-key",
        "abort_on_priority_when_disabled": True,
        "sleep_on_idle": True,
    },
    "whole prompts, delayed": {
        "chunked_prefill_size": -1,
        "mem_fraction_static": 0.3,
        "schedule_policy": "shortest-prefill-first",
        "enable_prefill_delayer": True,
        "prefill_delayer_max_delay_passes": 5,
        "prefill_delayer_token_usage_low_watermark": 0.1,
        "prefill_delayer_forward_passes_buckets": [1.0, 2.0],
        "prefill_delayer_wait_seconds_buckets": [0.1, 1.0],
        "prefill_delayer_queue_min_ratio": 0.5,
        "prefill_delayer_max_delay_ms": 50.0,
        "disable_chunked_prefix_cache": True,
    },
}
RETRACTED = {"enable_mixed_chunk": True, "schedule_policy": "random"}
# In all lives.
SIZES = {"max_running_requests"}
# The options of models, devices and tasks that are refused, by us or by SGLang.
ELSEWHERE = {
    *("swa_full_tokens_ratio", "_swa_full_tokens_ratio_explicitly_set", "swa_prefix_tails"),
    *("disable_hybrid_swa_memory", "max_mamba_cache_size", "mamba_full_memory_ratio"),
    *("c128_page_size", "prefill_only_disable_kv_cache"),
}


def test_every_option_of_the_scheduler_is_in_a_life_or_refused():
    from sglang.srt.arg_groups.fields.schedule import Schedule

    lives = [*LIVES.values(), RETRACTED]
    lived = {name for life in lives for name in life}
    assert set(Schedule.__struct_fields__) - lived == SIZES | ELSEWHERE
    hints = get_type_hints(Schedule, include_extras=True)
    (policies,) = hints["schedule_policy"].__metadata__
    # SGLang's scheduler does not know the first of its own list; the other looks at no cache.
    left = {*policies.choices} - {life["schedule_policy"] for life in lives}
    assert left == {"priority", "hrrn"}


def live(folder: Path, engine: dict[str, Any], env: dict[str, str], **plan: Any) -> dict[str, Any]:
    """Return what a busy server answered, which ended with all its slots."""
    # An SGLang that is older than an option goes without it.
    known = {name: engine[name] for name in engine if name in ServerArgs.__struct_fields__}
    plan = {"engine": {**SMALL, **POLICIES["kvtier"], **known}, "seed": 3, **plan}
    out = run_script(BUSY, folder, {**plan, "requests": requests()}, env)
    assert out["state"]["integrity"] == []
    # Contexts of which a quarter is kept may find room.
    everything = "KVTIER_RETENTION" not in env
    assert not everything or out["state"]["kv_evicted_tokens"] > 0, "nobody had to make room"
    assert out["after_flush"]["slots_used"] == 0
    return out


def assert_same(answers: list[list[int] | None], quiet: list[list[int]], least: int) -> None:
    """answers: None for a request that was aborted or refused, of which there may be some."""
    answered = [(a, b) for a, b in zip(answers, quiet, strict=True) if a is not None]
    assert [a for a, _ in answered] == [b for _, b in answered]
    assert len(answered) >= least


@pytest.mark.parametrize("life", LIVES)
def test_a_busy_servers_tokens_are_a_quiet_ones(tmp_path, quiet, life):
    # Every other request has a priority, which is refused where there are none; and a queue refuses
    # what it has no place for.
    least = {"intervals": len(quiet) // 2, "priorities of a short queue": 10}
    answers = live(tmp_path, LIVES[life], {})["answers"]
    assert_same(answers, quiet, least.get(life, len(quiet)))


def test_what_is_retracted_again_and_again_is_answered_alike(tmp_path, quiet):
    environment = {"SGLANG_TEST_RETRACT": "1"}
    out = live(tmp_path, RETRACTED, {}, environment=environment, pauses=1, aborts=3)
    assert out["flushed"] == [True]
    assert_same(out["answers"], quiet, len(quiet) - 3)


def test_a_paused_server_over_a_tier_can_be_flushed(tmp_path, quiet, tier):
    """Requests that wait for their KV from the tier do not stand in the way, as nobody admits them
    while the server is paused."""
    uneven_profile().save(tmp_path / "profile.json")
    env = {
        **RULE_ENV,
        "KVTIER_TIER": tier.address,
        "KVTIER_TIER_SPAN_TOKENS": "32",
        "KVTIER_HEAD_PROFILE": str(tmp_path / "profile.json"),
        "KVTIER_RETENTION": "0.25",
    }
    out = live(tmp_path, {"enable_mixed_chunk": True}, env, pauses=3)
    assert out["flushed"] == [True] * 3
    assert out["state"]["compacted_tokens"] > 0
    assert [len(a) for a in out["answers"]] == [len(b) for b in quiet]
