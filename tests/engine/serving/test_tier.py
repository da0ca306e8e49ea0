"""Exact KV in a real tier, restored by a real engine: the answers are those of a session that
never left, and of a fork that was never compressed.
"""

from __future__ import annotations

import random

import pytest
import torch
from compressing import demo_model, keeping
from engine_process import DEMO_MODEL, run_engine
from live_server import ask
from prometheus_client.parser import text_string_to_metric_families
from sessions import one_by_one, said, said_in, tokens
from tierd.live_tier import LiveTier, live_tier
from tiered_engine import ENGINE, RULE, continued, run_never_missing

from kvtier.heads.profile import load_profile
from kvtier.heads.reference.compaction import CompactingSession
from kvtier.retention.locality import LocalityRule

pytestmark = pytest.mark.engine

SESSIONS, NEW = 4, 12


@pytest.fixture
def tier(tmp_path):
    with live_tier(tmp_path, "--memory", "512m") as live:
        yield live


def sessions(turns: int) -> list[list[list[int]]]:
    """Prompts from shorter than a span to several chunks."""
    rng = random.Random(11)
    lengths = [(300, 1800), *[(5, 400)] * (turns - 1)]
    return [[tokens(rng, rng.randrange(*one)) for one in lengths] for _ in range(SESSIONS)]


@pytest.mark.parametrize(("retention", "kv"), [(1.0, "auto"), (0.5, "fp8_e4m3")])
def test_a_session_that_comes_back_to_a_restarted_server_goes_on_as_if_it_never_left(
    tmp_path, tier, retention, kv
):
    """All say what the transformers reference says. One request at a time: what two prompts of one
    chunk keep may depend on where chunks end."""
    windows = (RULE[f"KVTIER_LOCALITY_{of}_TOKENS"] for of in ("SINK", "RECENT", "BRANCH_RECENT"))
    rule, profile = LocalityRule(*map(int, windows)), load_profile(DEMO_MODEL / "head_profile.json")
    kv_dtype = torch.float8_e4m3fn if kv == "fp8_e4m3" else None
    asked, wanted = sessions(4), []
    for turns in asked:
        session = CompactingSession(
            demo_model(), profile, rule, 512, kv_dtype=kv_dtype, in_pages=True
        )
        keeping(session, retention)
        wanted.append([session.turn(prompt, NEW).token_ids for prompt in turns])
    rounds, engine = one_by_one(asked, NEW), {**ENGINE, "kv_cache_dtype": kv}
    env = {**RULE, "KVTIER_TIER": tier.address}
    if retention < 1:
        env["KVTIER_RETENTION"] = str(retention)
    before = run_engine(tmp_path, engine, rounds[:-SESSIONS], env)
    assert before["state"]["tier"]["spans_spilled"] > 0
    last = continued(rounds, before["rounds"], SESSIONS)
    back = run_engine(tmp_path, engine, last, env)
    said_first, said_last = (said_in(out, SESSIONS) for out in (before, back))
    assert [a + b for a, b in zip(said_first, said_last, strict=True)] == wanted
    for (answer,), turns in zip(back["rounds"], asked, strict=True):
        # Everything but the new turn came from the tier, as it would have from the device; the
        # last token of an answer has no KV yet.
        assert answer["cached_tokens"] == len(answer["prompt"]) - len(turns[-1]) - 1
    assert back["state"]["tier"]["restored_requests"] == SESSIONS


def test_a_fork_in_the_middle_of_a_compressed_context_answers_like_one_never_compressed(
    tmp_path, tier
):
    rng = random.Random(3)
    context = tokens(rng, 3000)
    # Later forks first: a request may otherwise end inside an earlier fork's recent window, and
    # share it as it is, compressed.
    places = sorted((rng.randrange(300, 2900) for _ in range(8)), reverse=True)
    forks = [context[:place] + tokens(rng, 9) for place in places]
    rounds = one_by_one([[prompt] for prompt in (context, *forks)], NEW)
    env = {**RULE, "KVTIER_TIER": tier.address}
    forked = run_engine(tmp_path, ENGINE, rounds, env)
    exact = run_engine(tmp_path, {**ENGINE, "radix_cache_backend": None}, rounds)
    assert said(forked) == [[one["output_ids"]] for (one,) in exact["rounds"]]
    # At most a span and the new tokens had to be computed.
    computed = [len(one["prompt"]) - one["cached_tokens"] for (one,) in forked["rounds"][1:]]
    assert max(computed) <= 9 + 64
    assert forked["state"]["tier"]["restored_requests"] > 0


def ways_of_gets(tier: LiveTier, namespace: str) -> set[str]:
    """Return the ways that payloads of a namespace went from the tier: shared, stream."""
    families = text_string_to_metric_families(ask(tier.metrics_url)[1])
    every = next(one for one in families if one.name == "kvtier_tier_bytes")
    wanted = {"direction": "get", "namespace": namespace}
    return {one.labels["path"] for one in every.samples if wanted.items() <= one.labels.items()}


def test_a_refresh_in_fp8_gives_the_same_tokens_however_exact_kv_comes(tmp_path):
    """Through shared memory, or over the network. In float32: tier/test_refreshed_answers.py."""
    rounds = one_by_one(sessions(2), NEW)
    env = {**RULE, "KVTIER_RETENTION": "0.25", "KVTIER_REFRESH": "turn"}
    engine, found = {**ENGINE, "kv_cache_dtype": "fp8_e4m3"}, []
    (tmp_path / "shared").mkdir()
    flags = ("--shared-memory", str(tmp_path / "shared"), "--metrics-port", "0")
    with live_tier(tmp_path, "--memory", "512m", *flags) as tier:
        env["KVTIER_TIER"] = tier.address
        for shared, way in (("true", "shared"), ("false", "stream")):
            # Each has a namespace of its own, or the second run would have nothing to compute.
            wanted = {"KVTIER_TIER_SHARED_MEMORY": shared, "KVTIER_TIER_NAMESPACE": way}
            found.append(run_never_missing(tmp_path, rounds, env | wanted, engine))
            assert found[-1]["state"]["tier"]["refreshed_turns"] == SESSIONS
            assert ways_of_gets(tier, way) == {way}
    assert said(found[0]) == said(found[1])
