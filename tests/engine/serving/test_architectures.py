"""Models of other architectures say through kvtier, over two turns, what they should: tiny random
ones, compared with transformers where everything is kept, and with the reference where it is not.
docs/models.md lists them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressing import RULE, RULE_ENV
from engine_process import run_engine
from tiny_models import EXPERTS, EXPERTS_ON_CPU, SINKS, VOCAB, WINDOWS, write_model

from kvtier.heads.model.config import shape_of
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
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Llama with tied embeddings": ("Llama", {"tie_word_embeddings": True}),
    "Llama 3.1's scaled positions": ("Llama", {"rope_parameters": LLAMA3}),
    "YaRN": ("Llama", {"rope_parameters": YARN}),
    "Qwen2, biases on Q, K, V": ("Qwen2", {}),
    "Qwen3, normalised Q and K": ("Qwen3", {}),
    "Qwen3-MoE": ("Qwen3Moe", EXPERTS),
    "Mistral without a window": ("Mistral", {"sliding_window": None}),
    "Ministral 3": ("Ministral3", {"sliding_window": None}),
    "Mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "OLMoE": ("Olmoe", {"num_key_value_heads": 4, **EXPERTS}),
    "Granite": ("Granite", {}),
    "Gemma 1": ("Gemma", {}),
    "Starcoder2": ("Starcoder2", {"sliding_window": None}),
    "GLM-4": ("Glm4", {}),
    "GLM-4.5, experts": ("Glm4Moe", {"n_routed_experts": 4, **EXPERTS}),
    "Cohere": ("Cohere", {}),
    "Phi-3": ("Phi3", {}),
    "SmolLM3, some layers without rotation": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "Seed-OSS": ("SeedOss", {}),
    "GPT-NeoX": ("GPTNeoX", {"num_key_value_heads": 4}),
    "ERNIE 4.5": ("Ernie4_5", {}),
    "Gemma 3, windows": ("Gemma3", WINDOWS),
    "OLMo 3, windows": ("Olmo3", WINDOWS),
    "Cohere 2, windows": ("Cohere2", WINDOWS),
    "gpt-oss, windows and sinks": ("GptOss", SINKS),
}
# SGLang's own model says something else than transformers, with its own attention, too.
AS_STOCK = ("OLMo 3, windows",)
# One of each way to rotate keys that SGLang's models have: its own modules by halves and by
# neighbours, transformers' in models of its own and without rotation in some layers.
ROTATED = ("Llama", "YaRN", "GLM-4", "Cohere", "Phi-3", "SmolLM3, some layers without rotation",
           "Seed-OSS", "GPT-NeoX", "ERNIE 4.5")  # fmt: skip


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
    """Whether each token is transformers' best one after those before it, but for rounding."""
    ids = torch.tensor([[*prompt, *answer[:-1]]])
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
    logprobs = logits.log_softmax(-1)
    said = logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return bool((logprobs.amax(-1) - said <= ROUNDING).all())


KVTIER = {"attention_backend": "kvtier", "radix_cache_backend": "kvtier"}
STOCK = {"attention_backend": "torch_native"}


def answers_of(
    folder: Path,
    model: Path,
    dtype: str,
    backends: dict[str, str],
    env: dict[str, str] | None = None,
) -> dict[str, Any]:
    """What an engine says in two turns of every session."""
    sessions, asked = prompts(), {"max_new_tokens": NEW_TOKENS, "logprobs": True}
    rounds = [
        [{"input_ids": first, **asked} for first, _ in sessions],
        [
            {"continues": [0, index], "input_ids": second, **asked}
            for index, (_, second) in enumerate(sessions)
        ],
    ]
    engine = {
        "model_path": str(model), "dtype": dtype, "max_total_tokens": 4000,
        "chunked_prefill_size": 128, "moe_runner_backend": EXPERTS_ON_CPU, **backends,
    }  # fmt: skip
    folder.mkdir()
    return run_engine(folder, engine, rounds, env)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_says_what_transformers_says(tmp_path: Path, name: str) -> None:
    model = write_model(tmp_path / "model", *ARCHITECTURES[name])
    found = answers_of(tmp_path / "kvtier", tmp_path / "model", "float32", KVTIER)
    if name in AS_STOCK:
        stock = answers_of(tmp_path / "stock", tmp_path / "model", "float32", STOCK)
        for answers, theirs in zip(found["rounds"], stock["rounds"], strict=True):
            said = [answer["output_ids"] for answer in answers]
            assert said == [answer["output_ids"] for answer in theirs]
        return
    for answers in found["rounds"]:
        for answer in answers:
            assert len(answer["output_ids"]) == NEW_TOKENS
            assert is_greedy(model, answer["prompt"], answer["output_ids"])
    assert all(answer["cached_tokens"] > 0 for answer in found["rounds"][1])
    assert found["state"]["integrity"] == []


@pytest.mark.parametrize(
    ("name", "budgets"),
    [*((name, "adaptive") for name in ROTATED), ("Llama", "equal"), ("Cohere", "equal")],
)
def test_compressed_it_says_what_the_reference_says(
    tmp_path: Path, name: str, budgets: str
) -> None:
    """A third of a turn is kept, chosen by keys before rotation."""
    model = write_model(tmp_path / "model", *ARCHITECTURES[name])
    rule, shape = FixedShare(0.35), shape_of(model)
    width = feature_width(shape.num_kv_heads, shape.head_dim)
    random = torch.Generator().manual_seed(0)
    weights = torch.randn(shape.num_layers, shape.num_kv_heads, width, generator=random)
    worth = TokenWorth(weights)
    worth.save(tmp_path / "worth.npz")
    env = {**RULE_ENV, "KVTIER_RETENTION": "0.35", "KVTIER_SCORER": "distinct-keys"}
    if budgets == "adaptive":
        env |= {
            "KVTIER_SCORER": "reconstruction",
            "KVTIER_SCORER_FILE": str(tmp_path / "worth.npz"),
            "KVTIER_HEAD_BUDGETS": "adaptive",
        }
    expected = []
    for turns in prompts():
        session: AdaptiveSession | CompactingSession
        if budgets == "adaptive":
            session = AdaptiveSession(model, RULE, 128, Reconstruction.of(worth))
        else:
            session = CompactingSession(model, full_profile(shape), RULE, 128, in_pages=True)
        session.keep_count = lambda prompt, span: rule.choose(Turn(prompt, span)).kept_tokens
        expected.append([session.turn(prompt, NEW_TOKENS).token_ids for prompt in turns])
    found = answers_of(tmp_path / "kvtier", tmp_path / "model", "float32", KVTIER, env)
    said = [[answer["output_ids"] for answer in answers] for answers in found["rounds"]]
    assert [list(turns) for turns in zip(*said, strict=True)] == expected
    assert found["state"]["compacted_tokens"] > 0


def test_in_bfloat16_it_says_what_stock_sglang_says(tmp_path: Path) -> None:
    """But for rounding: how a machine rounds depends on its instructions, and where two tokens are
    nearly as good, the answers may part. Up to there log-probabilities are compared."""
    write_model(tmp_path / "model", *ARCHITECTURES["Llama"])
    ours, theirs = (
        answers_of(tmp_path / name, tmp_path / "model", "bfloat16", backends)["rounds"]
        for name, backends in (("kvtier", KVTIER), ("stock", STOCK))
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
