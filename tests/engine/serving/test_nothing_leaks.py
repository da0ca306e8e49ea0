"""Hundreds of random operations on a real engine with pools far too small; nothing may leak."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from compressing import RULE_ENV, competing, uneven_profile
from engine_process import run_script
from kinds import WINDOWS, Kind, write_model
from test_kinds import worth_of
from thorough import THOROUGH
from tierd.live_tier import LiveTier, live_tier
from tiered_engine import ENGINE, RULE
from waiting import wait_for

from benchmarks.common.engines import ranks_on_a_cpu
from kvtier.traffic.formats import read_trace
from kvtier.traffic.request_log import read_log, sums_of

pytestmark = pytest.mark.engine

FUZZER = Path(__file__).parents[1] / "fuzz_runner.py"
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
# The number of times that a tier is killed, and that it is paused.
TIMES = 60 if THOROUGH else 1


def test_every_slot_is_accounted_for_after_hundreds_of_random_operations(tmp_path):
    uneven_profile().save(tmp_path / "profile.json")
    settings = {
        "KVTIER_HEAD_PROFILE": str(tmp_path / "profile.json"),
        "KVTIER_RETENTION": "0.5",
        "KVTIER_REUSE_BEHIND_EDITS": "on",
        "KVTIER_REUSE_LEAST_TOKENS": "64",
    }
    live(tmp_path, 500 if THOROUGH else 250, 8, settings)


class Life(NamedTuple):
    """A life over a tier. done: of each list one counter is above zero in the end."""

    settings: dict[str, str]
    engine: dict[str, int]
    longest: int
    done: list[list[str]]


LIVES = {
    "cut and edited": Life(
        {"KVTIER_REUSE_LEAST_TOKENS": "64"},
        {"max_total_tokens": 8000},
        2800,
        [["cut_spans", "copied_beginnings"], ["moved_tokens"]],
    ),
    "coded and streamed": Life(
        {"KVTIER_COMPRESS_PREFILL": "always", "KVTIER_KEPT_DTYPE": "int4"},
        {"max_total_tokens": 8000, "chunked_prefill_size": 64},
        2800,
        [["streamed_chunks"]],
    ),
    "windows": Life({}, {"max_total_tokens": 4000}, 1400, [["cut_spans"], ["variants"]]),
}


@pytest.mark.parametrize("name", LIVES)
def test_every_slot_is_accounted_for_where_heads_compete_over_a_tier(tmp_path, name):
    """Spans are cut, or prompts are compressed as they come, and what was evicted comes back."""
    life, worth, model = LIVES[name], None, {}
    if name == "windows":
        sizes = {"vocab_size": 384, "max_position_embeddings": 16384}
        worth = worth_of(write_model(tmp_path / "model", Kind("Gemma3", WINDOWS), **sizes))
        model = {"model_path": str(tmp_path / "model")}
    env = {**competing(tmp_path, worth), "KVTIER_RETENTION": "0.25", **life.settings}
    with live_tier(tmp_path, "--memory", "256m") as tier:
        env |= {"KVTIER_TIER": tier.address, "KVTIER_TIER_SPAN_TOKENS": "32"}
        operations, done = 2000 if THOROUGH else 200, [*life.done, ["restored_requests"]]
        state = live(
            tmp_path, operations, 9, env, longest=life.longest, done=done, **life.engine, **model
        )
    counted = {**state, **state["tier"]}
    for names in done:
        assert sum(counted.get(counter, 0) for counter in names) > 0, names
    # A server's own records pass its rules.
    assert counted.get("records_refused", 0) == 0


@contextmanager
def dying(tier: LiveTier, enough: Path) -> Iterator[list[str]]:
    """Kills it, stops it for a while, and starts it again; yields what it did. enough: a file that
    it makes when it has done that as often as it should."""
    ended, rng, done = threading.Event(), random.Random(0), list[str]()

    def disturb() -> None:
        begun = enough.with_suffix(".begun")
        wait_for(lambda: begun.exists() or ended.is_set())
        for what in ("killed", "paused") * TIMES:
            if ended.wait(rng.uniform(2, 6)):
                return
            if what == "killed":
                tier.kill()
                ended.wait(rng.uniform(0, 3))
                tier.start()
            else:
                tier.pause()
                ended.wait(rng.uniform(0.2, 3))
                tier.resume()
            done.append(what)
        enough.touch()

    thread = threading.Thread(target=disturb, name="disturber")
    thread.start()
    try:
        yield done
    finally:
        ended.set()
        thread.join()


def test_two_ranks_live_on_whatever_their_tier_does(tmp_path):
    """The tier dies and comes back, and fails one of them more often: nothing hangs, nothing leaks,
    and SGLang's checker sees the ranks decide alike. TESTS_THOROUGH=1 goes on for some ten
    minutes."""
    uneven_profile().save(tmp_path / "profile.json")
    plan = {
        "engine": {**ENGINE, "tp_size": 2, "max_total_tokens": 3000, "chunked_prefill_size": 256},
        "operations": 100_000,
        "until": str(tmp_path / "enough"),
        "seed": 11,
        "fault": "unsteady",
    }
    env = {
        **RULE,
        **STRICT,
        **ranks_on_a_cpu(2),
        "KVTIER_HEAD_PROFILE": str(tmp_path / "profile.json"),
        "KVTIER_RETENTION": "0.4",
        "KVTIER_REFRESH": "turn",
    }
    with (
        live_tier(tmp_path, "--memory", "64m") as tier,
        dying(tier, tmp_path / "enough") as disturbed,
    ):
        out = run_script(FUZZER, tmp_path, plan, env | {"KVTIER_TIER": tier.address})
    assert disturbed == ["killed", "paused"] * TIMES
    assert out["state"]["integrity"] == []
    assert out["state"]["compacted_tokens"] > 0
    assert out["state"]["tier"]["restored_requests"] > 0
    assert out["after_flush"]["slots_used"] == 0


def live(
    folder: Path,
    operations: int,
    seed: int,
    settings: dict[str, str],
    *,
    longest: int = 700,
    done: list[list[str]] | None = None,
    **engine: Any,
) -> dict[str, Any]:
    """The state after a random life under SGLang's strict checks of its memory."""
    plan = {
        "engine": {
            **ENGINE,
            "dtype": "float32",
            "max_total_tokens": 3000,
            "chunked_prefill_size": 256,
            **engine,
        },
        "operations": operations,
        "longest": longest,
        "seed": seed,
        "edits": True,
        "done": done or [],
    }
    log = folder / "requests.jsonl"
    env = {
        **RULE_ENV,
        **STRICT,
        "KVTIER_REQUEST_LOG": str(log),
        **settings,
    }
    out = run_script(FUZZER, folder, plan, env)
    assert sum(out["counts"].values()) >= 0.96 * operations, "the operations were issued"
    assert out["counts"]["aborts"] > 0.06 * operations
    assert out["finished"] > 0.1 * operations, "pressure must not stop the server from serving"
    assert out["state"]["integrity"] == []
    assert out["state"]["compacted_tokens"] > 0
    assert out["after_flush"]["slots_used"] == 0
    check_log(log, out)
    return out["state"]


def check_log(log: Path, out: dict[str, Any]) -> None:
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
