"""Models of every kind that kvtier serves say what they should: tiny random ones, one engine each.
docs/models.md lists them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressing import POLICIES, RULE, RULE_ENV, competing
from engine_process import REPOSITORY, run_engine
from kinds import (
    ENGINE,
    KINDS,
    VOCAB,
    refused_table,
    served_table,
    snapshot,
    write_model,
)
from thorough import THOROUGH

from kvtier.heads.model.config import layer_windows, shape_of
from kvtier.heads.profile import full_profile
from kvtier.heads.reference.compaction import AdaptiveSession, CompactingSession
from kvtier.retention.scorers.reconstruction import Reconstruction
from kvtier.retention.shares import FixedShare, Turn
from kvtier.retention.token_worth import TokenWorth, feature_width

pytestmark = pytest.mark.engine

NEW_TOKENS = 12
# Nats between the two best tokens below which rounding may choose either.
ROUNDING = 1e-3
# Nats; kvtier and stock SGLang differed by 0.044 at most, bfloat16 and float32 by 0.14.
BFLOAT16_ROUNDING = 0.1
SHARE = FixedShare(0.35)
# Sessions that are too short to be compressed; they come first.
SHORT = 2


def prompts() -> list[tuple[list[int], list[int]]]:
    """First and second prompts of sessions; some are longer than a chunk.

    No two begin with the same token: what sessions share is a turn of its own, and what a turn
    keeps depends on where it begins.
    """
    generator = torch.Generator().manual_seed(5)

    def some(count: int) -> list[int]:
        return torch.randint(3, VOCAB, (count,), generator=generator).tolist()

    lengths = (1, 30, 150, 260)
    return [([3 + at, *some(count - 1)], some(9)) for at, count in enumerate(lengths)]


@torch.inference_mode()
def is_greedy(model: Any, prompt: list[int], answer: list[int]) -> bool:
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
    sessions, asked = prompts(), {"max_new_tokens": NEW_TOKENS, "logprobs": True}
    rounds = [
        [{"input_ids": first, **asked} for first, _ in sessions],
        [
            {"continues": [0, index], "input_ids": second, **asked}
            for index, (_, second) in enumerate(sessions)
        ],
    ]
    engine = {
        "model_path": model, "dtype": dtype, "max_total_tokens": 4000, "chunked_prefill_size": 128,
        **ENGINE, **POLICIES[policy],
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    return run_engine(folder, engine, rounds, env)


def worth_of(model: Any) -> TokenWorth:
    """A random map of what the tokens of a model are worth."""
    shape = shape_of(model)
    width = feature_width(shape.num_kv_heads, shape.head_dim)
    random = torch.Generator().manual_seed(0)
    return TokenWorth(torch.randn(shape.num_layers, shape.num_kv_heads, width, generator=random))


def said_in(found: dict[str, Any]) -> list[list[list[int]]]:
    """The answers of each session's turns."""
    rounds = [[answer["output_ids"] for answer in answers] for answers in found["rounds"]]
    return [list(turns) for turns in zip(*rounds, strict=True)]


EVERY = [(name, "folder") for name in KINDS]
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
    env = {**RULE_ENV, "KVTIER_RETENTION": str(SHARE.share)}
    folder, path = tmp_path / "model", str(tmp_path / "model")
    if by == "hub id":
        folder, path = snapshot(tmp_path, "some/model"), "some/model"
        # The hub's cache is looked up when it is imported, so this is no fork.
        env |= {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "TESTS_SPAWN": "1"}
    model = write_model(folder, kind)
    worth = worth_of(model)
    env |= competing(tmp_path, worth)
    found = answers_of(tmp_path / "kvtier", path, "kvtier", env)
    said = said_in(found)
    assert found["state"]["compacted_tokens"] > 0
    assert found["state"]["integrity"] == []
    if kind.as_stock:
        stock = said_in(answers_of(tmp_path / "stock", str(folder), "stock"))
        assert [one for one, _ in said] == [one for one, _ in stock]
        assert said[:SHORT] == stock[:SHORT]
        return
    whole = [*found["rounds"][0], *found["rounds"][1][:SHORT]]
    assert all(is_greedy(model, answer["prompt"], answer["output_ids"]) for answer in whole)
    window = next((one for one in layer_windows(model) if one is not None), 0)
    rule, expected = replace(RULE, window=window), []
    for turns in prompts():
        session = AdaptiveSession(model, rule, 128, Reconstruction.of(worth))
        session.keep_count = lambda prompt, span: SHARE.choose(Turn(prompt, span)).kept_tokens
        expected.append([session.turn(prompt, NEW_TOKENS).token_ids for prompt in turns])
    assert said == expected


@pytest.mark.parametrize("name", ["Llama", "Cohere, keys rotated in neighbouring pairs"])
def test_where_heads_keep_alike_it_says_what_the_reference_says(tmp_path: Path, name: str) -> None:
    model = write_model(tmp_path / "model", KINDS[name])
    expected = []
    for turns in prompts():
        session = CompactingSession(model, full_profile(shape_of(model)), RULE, 128, in_pages=True)
        session.keep_count = lambda prompt, span: SHARE.choose(Turn(prompt, span)).kept_tokens
        expected.append([session.turn(prompt, NEW_TOKENS).token_ids for prompt in turns])
    env = {**RULE_ENV, "KVTIER_RETENTION": "0.35", "KVTIER_SCORER": "distinct-keys"}
    found = answers_of(tmp_path / "kvtier", str(tmp_path / "model"), "kvtier", env)
    assert said_in(found) == expected
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
