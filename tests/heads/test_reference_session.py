"""The reference implementation against brute-force masked float64 attention, and transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_llama import (
    RULE,
    SHAPE,
    WINDOWS,
    brute_force_logits,
    make_ids,
    profile_of,
    tiny_model,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvtier.errors import HeadProfileMismatchError, UnsupportedModelError, UsageError
from kvtier.heads.profile import ModelShape, full_profile, window_profile
from kvtier.heads.reference.attention import attending
from kvtier.heads.reference.session import ReferenceSession, TurnResult
from kvtier.retention.locality import LocalityRule

MIXED = profile_of((0,), (), (0, 1))


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """Plain transformers, no cache."""
    ids = list(ids)
    for _ in range(count):
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[-count:]


@pytest.mark.parametrize(
    "architecture", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma3", "Olmo3", "Cohere2", "GptOss"]
)
def test_with_every_head_ca_a_session_is_plain_transformers(architecture: str) -> None:
    has_windows = architecture in ("Gemma3", "Olmo3", "Cohere2", "GptOss")
    model = tiny_model(architecture, **(WINDOWS if has_windows else {}))
    session = ReferenceSession(model, full_profile(SHAPE), RULE, chunk_tokens=16)
    history: list[int] = []
    for turn in range(3):
        prompt = make_ids(30 + turn, seed=turn)
        history += prompt
        got = session.turn(prompt, 6)
        assert got.token_ids == greedy(model, history, 6)
        history += got.token_ids


@pytest.mark.parametrize("compensation", [True, False])
@pytest.mark.parametrize("profile", [MIXED, window_profile(SHAPE)], ids=["mixed", "window"])
def test_a_session_equals_brute_force_masked_attention(
    model: Any, profile: Any, compensation: bool
) -> None:
    rule = LocalityRule(5, 7, 3, compensation=compensation)
    session = ReferenceSession(model, profile, rule, chunk_tokens=11)
    nodes: list[tuple[int, int, int]] = []
    ids: list[int] = []
    for turn, (length, new) in enumerate([(40, 4), (25, 9), (3, 2), (31, 5)]):
        prompt = make_ids(length, seed=10 + turn)
        start, prompt_stop = session.num_tokens, len(ids) + length
        ids += prompt
        got = session.turn(prompt, new)
        ids += got.token_ids
        logits = brute_force_logits(model, profile, nodes, ids, rule)
        expected = torch.log_softmax(logits.float(), -1)
        rows = range(prompt_stop - 1, prompt_stop - 1 + new)
        assert got.token_ids == [int(expected[row].argmax()) for row in rows]
        wanted = [float(expected[row, token]) for row, token in zip(rows, got.token_ids)]  # noqa: B905
        assert got.logprobs == pytest.approx(wanted, abs=1e-5)
        assert session.num_tokens == len(ids) - 1, "the last sampled token has no KV yet"
        nodes.append((start, session.num_tokens, prompt_stop))


def test_devices_without_the_tiled_kernel_give_the_same(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> list[TurnResult]:
        session = ReferenceSession(model, MIXED, RULE, chunk_tokens=16)
        return [session.turn(make_ids(length, seed=length), 6) for length in (40, 25, 33)]

    tiled = run()
    monkeypatch.setattr("kvtier.heads.reference.attention._has_tiled_kernel", lambda _: False)
    monkeypatch.setattr("kvtier.heads.reference.attention.KEY_BLOCK", 8)
    for got, wanted in zip(run(), tiled, strict=True):
        assert got.token_ids == wanted.token_ids
        assert got.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)


def test_a_fork_goes_its_own_way_and_chunks_do_not_matter(model: Any) -> None:
    session = ReferenceSession(model, MIXED, RULE)
    session.turn(make_ids(40), 4)
    assert session.retained(0) == {0: 43, 1: 5 + 7 + 3 + 1}, "sink, recent, generated, one entry"
    fork, twin = session.fork(), session.fork()
    fork.turn(make_ids(30, seed=5), 8)
    first = session.turn(make_ids(9, seed=6), 5)
    assert twin.turn(make_ids(9, seed=6), 5) == first
    results = [
        ReferenceSession(model, MIXED, RULE, chunk_tokens=chunk).turn(make_ids(50), 8)
        for chunk in (1, 7, 64)
    ]
    assert len({tuple(result.token_ids) for result in results}) == 1


def test_an_eos_belongs_to_its_turn_and_a_last_token_to_the_next(model: Any) -> None:
    free = ReferenceSession(model, MIXED, RULE).turn(make_ids(40), 8).token_ids
    at = free.index(free[3]) + 1
    for new_tokens, held in ((8, 40 + at), (at, 40 + at - 1)):
        session = ReferenceSession(model, MIXED, RULE)
        stopped = session.turn(make_ids(40), new_tokens, eos=free[3]).token_ids
        assert stopped == free[:at]
        assert session.num_tokens == held
        session.turn(make_ids(5, seed=1), 0)
        assert session.num_tokens == 40 + at + 5


def test_the_model_is_as_before_even_after_an_error(model: Any) -> None:
    before = model.config._attn_implementation, set(ALL_ATTENTION_FUNCTIONS)

    def fail(*_: Any) -> Any:
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"), attending(model, fail):
        model(torch.tensor([[1, 2]]), use_cache=False)
    assert (model.config._attn_implementation, set(ALL_ATTENTION_FUNCTIONS)) == before


def test_errors_name_what_is_wrong(model: Any) -> None:
    with pytest.raises(UsageError, match="prompt_ids"):
        ReferenceSession(model, MIXED, RULE).turn([], 1)
    other = ModelShape(num_layers=1, num_kv_heads=2, num_attention_heads=4, head_dim=16)
    with pytest.raises(HeadProfileMismatchError):
        ReferenceSession(model, full_profile(other), RULE)
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, sliding_window=8,
    )  # fmt: skip
    windowed = MistralForCausalLM(config)
    shape = ModelShape(num_layers=1, num_kv_heads=1, num_attention_heads=2, head_dim=16)
    with pytest.raises(UnsupportedModelError, match="sliding"):
        ReferenceSession(windowed, full_profile(shape), RULE)
