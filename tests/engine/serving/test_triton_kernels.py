"""The engine over the Triton kernels says what it says over the reference kernels: with
anchored and locality heads, a share of the context dropped, chunked prefill, batches and later
turns. Without a GPU the kernels run in Triton's interpreter, so contexts are short.
"""

from __future__ import annotations

import random

import pytest
import torch
from engine_process import DEMO_MODEL, run_engine

from kvtier.heads.model.config import model_shape, read_config
from kvtier.heads.profile import HeadProfile

pytestmark = pytest.mark.engine

ENV = {
    "KVTIER_LOCALITY_SINK_TOKENS": "8",
    "KVTIER_LOCALITY_RECENT_TOKENS": "16",
    "KVTIER_LOCALITY_BRANCH_RECENT_TOKENS": "12",
}


def rounds() -> list[list[dict]]:
    """Four sessions of two turns. What is long enough to be compressed is so wherever its slots
    begin, which depends on the batch."""
    rng = random.Random(11)
    turns: list[list[dict]] = [[], []]
    for index, length in enumerate((3, 80, 150, 90)):
        for turn, tokens in enumerate((length, rng.randrange(1, 20))):
            prompt = [rng.randrange(6, 384) for _ in range(tokens)]
            request = {"input_ids": prompt, "max_new_tokens": 4, "logprobs": True}
            turns[turn].append({**request, "continues": [0, index]} if turn else request)
    return turns


# The entries that are dropped depend a little on which prompts share a chunk, and that on time, so
# they come one by one.
SHARED = {"KVTIER_RETENTION": "0.5"}, {"max_running_requests": 1}
BATCHED: tuple[dict, dict] = ({}, {})


@pytest.mark.parametrize(("settings", "limits"), [SHARED, BATCHED], ids=["a share", "batched"])
def test_the_engine_says_the_same_over_triton_kernels(tmp_path, settings, limits):
    shape = model_shape(read_config(str(DEMO_MODEL)))
    heads = ((0,), (0, 2), ())
    profile = HeadProfile(model="test", shape=shape, method="test", ca_heads=heads)
    profile.save(tmp_path / "profile.json")
    engine = {
        "model_path": str(DEMO_MODEL),
        "max_total_tokens": 4000,
        "chunked_prefill_size": 64,
        "attention_backend": "kvtier",
        "radix_cache_backend": "kvtier",
        **limits,
    }
    env = {**ENV, **settings, "KVTIER_HEAD_PROFILE": str(tmp_path / "profile.json")}
    found = {}
    for name in ("reference", "triton"):
        interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
        chosen = {**env, **interpreted, "KVTIER_KERNELS": name}
        (tmp_path / name).mkdir()
        found[name] = run_engine(tmp_path / name, engine, rounds(), chosen)
    for ours, theirs in zip(found["triton"]["rounds"], found["reference"]["rounds"], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a["output_ids"] == b["output_ids"]
            assert a["cached_tokens"] == b["cached_tokens"]
            assert a["logprobs"] == pytest.approx(b["logprobs"], abs=1e-3)
    assert found["triton"]["state"]["compacted_tokens"] > 100
    assert found["triton"]["state"]["integrity"] == []
