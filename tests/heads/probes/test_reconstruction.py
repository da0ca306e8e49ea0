"""The attention that tokens draw when a context is repeated, against transformers' own weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_llama import WINDOWS, tiny_model

from kvtier.heads.model.config import shape_of
from kvtier.heads.probes import watching
from kvtier.heads.probes.reconstruction import question_attention, repetition_attention
from kvtier.heads.profile import full_profile
from kvtier.heads.reference.session import ReferenceSession
from kvtier.heads.samples.questions import Question

CONTEXT = [int(i) for i in torch.randint(0, 60, (37,), generator=torch.Generator().manual_seed(1))]
REQUEST = [5, 9, 2]


def exact_kv(model: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the exact KV of the context, per layer."""
    shape = shape_of(model)
    session = ReferenceSession(model, full_profile(shape))
    session.turn(CONTEXT, 0)
    return [session.exact_kv(layer) for layer in range(shape.num_layers)]


Kind = tuple[str, dict[str, Any], set[int]]
# Architecture, what else it has, its layers with a window.
PLAIN, WINDOWED = ("Llama", {}, set[int]()), ("Gemma3", WINDOWS, {0, 2})
SINKS = ("GptOss", WINDOWS, {0, 2})
KINDS = [(512, PLAIN), (3, WINDOWED), (3, SINKS)]


def drawn_of(model: Any, ids: list[int], windowed: set[int]) -> torch.Tensor:
    """Return by transformers' own weights the most that a token behind the context gives each token
    of it, `[layers, kv_heads, tokens]`; 0 in layers with a window."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        weights = model(torch.tensor([ids]), output_attentions=True, use_cache=False).attentions
    heads, tokens = shape_of(model).num_kv_heads, len(CONTEXT)
    later = [one[0, :, tokens:, :tokens].unflatten(0, (heads, -1)) for one in weights]
    most = [one.amax((1, 2)).float() * (at not in windowed) for at, one in enumerate(later)]
    return torch.stack(most)


@pytest.fixture(params=KINDS, ids=str)
def prepared(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, list[tuple[torch.Tensor, torch.Tensor]], set[int]]:
    """A model, the exact KV of the context, and its layers with a window."""
    chunk_tokens, (architecture, others, windowed) = request.param
    monkeypatch.setattr(watching, "CHUNK_TOKENS", chunk_tokens)
    model = tiny_model(architecture, **others)
    return model, exact_kv(model), windowed


def test_it_is_the_most_that_any_later_query_gives_a_token(prepared: Any) -> None:
    model, kv, windowed = prepared
    found = repetition_attention(model, kv, CONTEXT, REQUEST)
    most = drawn_of(model, [*CONTEXT, *REQUEST, *CONTEXT], windowed)
    torch.testing.assert_close(found, most, rtol=1e-4, atol=1e-6)


def test_questions_draw_what_each_would_draw_alone(prepared: Any) -> None:
    model, kv, windowed = prepared
    questions = [Question((7, 3, 11), (4, 8)), Question((60, 2), (9, 9, 1))]
    found = question_attention(model, kv, questions)
    # The last token of an answer is asked for, and asks for nothing.
    alone = [
        drawn_of(model, [*CONTEXT, *one.prompt_ids, *one.answer_ids[:-1]], windowed)
        for one in questions
    ]
    torch.testing.assert_close(found, torch.stack(alone).amax(0), rtol=1e-4, atol=1e-6)
