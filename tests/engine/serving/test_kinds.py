"""Models of every kind that kvtier serves say what they should: tiny random ones, one engine each.
docs/models.md lists them.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressing import POLICIES, RULE, RULE_ENV, competing, keeping
from engine_process import DEMO_MODEL, REPOSITORY, run_engine
from kinds import (
    ENGINE,
    KINDS,
    OVER_A_TIER,
    VOCAB,
    refused_table,
    served_table,
    snapshot,
    write_model,
)
from sessions import Prompt, one_by_one, said, said_in, side_by_side
from thorough import THOROUGH, turn_of
from tierd.live_tier import live_tier
from tiered_engine import continued

from kvtier.heads.model.config import layer_windows, shape_of
from kvtier.heads.profile import full_profile
from kvtier.heads.reference.compaction import AdaptiveSession, CompactingSession
from kvtier.heads.tokens import fit_tokens
from kvtier.retention.scorers.reconstruction import Reconstruction
from kvtier.retention.token_worth import TokenWorth, feature_width

pytestmark = pytest.mark.engine

NEW_TOKENS = 12
# Nats between the two best tokens below which rounding may choose either.
ROUNDING = 1e-3
# Nats; kvtier and stock SGLang differed by 0.044 at most, bfloat16 and float32 by 0.14.
BFLOAT16_ROUNDING = 0.1
SHARE = 0.35
# Sessions that are too short to be compressed; they come first.
SHORT = 2


def prompts() -> list[list[Prompt]]:
    """First and second prompts of sessions; some are longer than a chunk.

    No two begin with the same token: what sessions share is a turn of its own, and what a turn
    keeps depends on where it begins.
    """
    generator = torch.Generator().manual_seed(5)

    def some(count: int) -> Prompt:
        return torch.randint(3, VOCAB, (count,), generator=generator).tolist()

    lengths = (1, 30, 150, 260)
    return [[[3 + at, *some(count - 1)], some(9)] for at, count in enumerate(lengths)]


@torch.inference_mode()
def is_greedy(model: Any, prompt: Prompt, answer: Prompt) -> bool:
    """Return whether each token is transformers' best one after those before it, but for
    rounding."""
    ids = torch.tensor([[*prompt, *answer[:-1]]])
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
    logprobs = logits.log_softmax(-1)
    said = logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return bool((logprobs.amax(-1) - said <= ROUNDING).all())


def answers_of(
    folder: Path, model: str, policy: str, env: dict[str, str] | None = None, dtype: str = "float32"
) -> dict[str, Any]:
    """Return what an engine says in two turns of every session."""
    engine = {
        "model_path": model, "dtype": dtype, "max_total_tokens": 4000, "chunked_prefill_size": 128,
        **ENGINE, **POLICIES[policy],
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    return run_engine(folder, engine, side_by_side(prompts(), NEW_TOKENS, logprobs=True), env)


def worth_of(model: Any) -> TokenWorth:
    """A random map of what the tokens of a model are worth."""
    shape = shape_of(model)
    width = feature_width(shape.num_kv_heads, shape.head_dim)
    random = torch.Generator().manual_seed(0)
    return TokenWorth(torch.randn(shape.num_layers, shape.num_kv_heads, width, generator=random))


def answers_to(turns: list[Prompt], session: AdaptiveSession | CompactingSession) -> list[Prompt]:
    keeping(session, SHARE)
    return [session.turn(prompt, NEW_TOKENS).token_ids for prompt in turns]


EVERY = [(name, "folder") for name in turn_of(KINDS)]
BY_ID = [
    pytest.param(name, "hub id", marks=pytest.mark.slow)
    for name in (KINDS if THOROUGH else ("Llama",))
]


@pytest.mark.parametrize(("name", "by"), [*EVERY, *BY_ID])
def test_every_kind_says_what_it_should(tmp_path: Path, name: str, by: str) -> None:
    """Heads compete for a third of what is dropped. Over everything each answer is transformers':
    those of first turns, and of sessions that are too short to be compressed; the others are the
    reference's."""
    kind = KINDS[name]
    env = {**RULE_ENV, "KVTIER_RETENTION": str(SHARE)}
    folder, path = tmp_path / "model", str(tmp_path / "model")
    if by == "hub id":
        folder, path = snapshot(tmp_path, "some/model"), "some/model"
        # The hub's cache is looked up when it is imported, so this is no fork.
        env |= {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "TESTS_SPAWN": "1"}
    model = write_model(folder, kind)
    worth = worth_of(model)
    env |= competing(tmp_path, worth)
    found = answers_of(tmp_path / "kvtier", path, "kvtier", env)
    assert found["state"]["compacted_tokens"] > 0
    if kind.as_stock:
        theirs = answers_of(tmp_path / "stock", str(folder), "stock")["rounds"]
        mine, stock = said(found), [[one["output_ids"] for one in requests] for requests in theirs]
        assert mine[0] == stock[0]
        assert mine[1][:SHORT] == stock[1][:SHORT]
        return
    whole = [*found["rounds"][0], *found["rounds"][1][:SHORT]]
    assert all(is_greedy(model, answer["prompt"], answer["output_ids"]) for answer in whole)
    window = next((one for one in layer_windows(model) if one is not None), 0)
    rule, scorer = replace(RULE, window=window), Reconstruction.of(worth)
    sessions = (AdaptiveSession(model, rule, 128, scorer) for _ in prompts())
    assert said_in(found, len(prompts())) == list(map(answers_to, prompts(), sessions))


def test_where_heads_keep_alike_it_says_what_the_reference_says(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", KINDS["Cohere, keys rotated in neighbouring pairs"])
    profile = full_profile(shape_of(model))
    sessions = (CompactingSession(model, profile, RULE, 128, in_pages=True) for _ in prompts())
    env = {**RULE_ENV, "KVTIER_RETENTION": str(SHARE), "KVTIER_SCORER": "distinct-keys"}
    found = answers_of(tmp_path / "kvtier", str(tmp_path / "model"), "kvtier", env)
    assert said_in(found, len(prompts())) == list(map(answers_to, prompts(), sessions))
    assert found["state"]["compacted_tokens"] > 0


def test_the_docs_list_the_kinds_that_are_tested() -> None:
    """`python tests/engine/kinds.py` writes what docs/models.md should have."""
    text = (REPOSITORY / "docs" / "models.md").read_text()
    assert served_table() in text
    assert refused_table() in text


def test_in_bfloat16_it_says_what_stock_sglang_says(tmp_path: Path) -> None:
    """The answers may part by rounding: how a machine rounds depends on its instructions, and two
    tokens may be nearly as good. Up to there log-probabilities are compared."""
    write_model(tmp_path / "model", KINDS["Llama"])
    ours, theirs = (
        answers_of(tmp_path / policy, str(tmp_path / "model"), policy, dtype="bfloat16")["rounds"]
        for policy in ("kvtier", "stock")
    )
    compared = 0
    for mine, stock in zip(ours[0], theirs[0], strict=True):
        pairs = zip(mine["output_ids"], stock["output_ids"], strict=True)
        parted = next((at for at, (one, other) in enumerate(pairs) if one != other), NEW_TOKENS)
        alike = slice(parted + 1)
        assert mine["logprobs"][alike] == pytest.approx(
            stock["logprobs"][alike], abs=BFLOAT16_ROUNDING
        )
        compared += parted
    assert compared > len(ours[0]) * NEW_TOKENS / 2


@pytest.mark.parametrize("name", OVER_A_TIER if THOROUGH else OVER_A_TIER[:3])
def test_it_goes_on_from_the_tier_as_the_reference_says(tmp_path: Path, name: str) -> None:
    """Models with experts, and with windows, are calibrated, compressed, and go on when their
    server was restarted: two sessions of three turns, the last of each behind another server."""
    kind, path = KINDS[name], str(tmp_path / "model")
    model = write_model(tmp_path / "model", kind, vocab_size=384, max_position_embeddings=4096)
    for file in DEMO_MODEL.glob("tokenizer*"):
        shutil.copy(file, path)
    worth = fit_tokens(path, contexts=2, lengths=[256]).worth
    random = torch.Generator().manual_seed(2)
    sessions = [
        [torch.randint(6, 384, (count,), generator=random).tolist() for count in counts]
        for counts in ((500, 40, 60), (700, 200, 30))
    ]
    rule = replace(RULE, window=kind.extra.get("sliding_window") or 0)
    references = (AdaptiveSession(model, rule, 256, Reconstruction.of(worth)) for _ in sessions)
    wanted = list(map(answers_to, sessions, references))
    rounds = one_by_one(sessions, NEW_TOKENS)
    engine = {
        "model_path": path, "dtype": "float32", "max_total_tokens": 6000,
        "chunked_prefill_size": 256, **ENGINE, **POLICIES["kvtier"],
    }  # fmt: skip
    env = {**RULE_ENV, **competing(tmp_path, worth), "KVTIER_RETENTION": str(SHARE)}
    with live_tier(tmp_path, "--memory", "256m") as tier:
        env |= {"KVTIER_TIER": tier.address, "KVTIER_TIER_SPAN_TOKENS": "32"}
        before = run_engine(tmp_path, engine, rounds[:-2], env)
        back = run_engine(tmp_path, engine, continued(rounds, before["rounds"], 2), env)
    assert [a + b for a, b in zip(said_in(before, 2), said_in(back, 2), strict=True)] == wanted
    assert before["state"]["compacted_tokens"] > 0
    assert back["state"]["tier"]["restored_requests"] == 2
