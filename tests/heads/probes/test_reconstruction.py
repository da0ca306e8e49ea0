"""The attention that tokens draw when a context is repeated, against transformers' own weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_llama import WINDOWS, tiny_model

from kvtier.heads.model.config import shape_of
from kvtier.heads.probes import reconstruction
from kvtier.heads.probes.reconstruction import attention_asked, attention_drawn
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
KINDS = [(512, PLAIN), (3, PLAIN), (3, WINDOWED), (3, SINKS)]


@pytest.mark.parametrize(("chunk_tokens", "kind"), KINDS)
def test_it_is_the_most_that_any_later_query_gives_a_token(
    monkeypatch: pytest.MonkeyPatch, chunk_tokens: int, kind: Kind
) -> None:
    monkeypatch.setattr(reconstruction, "CHUNK_TOKENS", chunk_tokens)
    architecture, others, windowed = kind
    model = tiny_model(architecture, **others)
    shape = shape_of(model)
    kv = exact_kv(model)
    found = attention_drawn(model, kv, CONTEXT, REQUEST)

    model.set_attn_implementation("eager")
    ids = torch.tensor([[*CONTEXT, *REQUEST, *CONTEXT]])
    with torch.inference_mode():
        weights = model(ids, output_attentions=True, use_cache=False).attentions
    tokens = len(CONTEXT)
    for layer, one in enumerate(weights):
        later = one[0, :, tokens:, :tokens].unflatten(0, (shape.num_kv_heads, -1))
        most = later.amax((1, 2)).float() * (layer not in windowed)
        torch.testing.assert_close(found[layer], most, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("chunk_tokens", "kind"), KINDS)
def test_questions_draw_what_each_would_draw_alone(
    monkeypatch: pytest.MonkeyPatch, chunk_tokens: int, kind: Kind
) -> None:
    monkeypatch.setattr(reconstruction, "CHUNK_TOKENS", chunk_tokens)
    architecture, others, windowed = kind
    model = tiny_model(architecture, **others)
    shape = shape_of(model)
    kv = exact_kv(model)
    questions = [Question((7, 3, 11), (4, 8)), Question((60, 2), (9, 9, 1))]
    found = attention_asked(model, kv, questions)

    model.set_attn_implementation("eager")
    expected = torch.zeros_like(found)
    tokens = len(CONTEXT)
    for question in questions:
        # The last token of an answer is asked for, and asks for nothing.
        ids = torch.tensor([[*CONTEXT, *question.prompt_ids, *question.answer_ids[:-1]]])
        with torch.inference_mode():
            weights = model(ids, output_attentions=True, use_cache=False).attentions
        for layer, one in enumerate(weights):
            later = one[0, :, tokens:, :tokens].unflatten(0, (shape.num_kv_heads, -1))
            if layer not in windowed:
                expected[layer] = torch.maximum(expected[layer], later.amax((1, 2)).float())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
