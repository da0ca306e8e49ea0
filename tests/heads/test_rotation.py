"""The rotations that were found for layers, against what their projections gave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_llama import WINDOWS, make_ids, tiny_model
from torch import Tensor

from kvtier.errors import UnsupportedModelError
from kvtier.heads.reference.attention import attending
from kvtier.heads.reference.rotation import rotation_of, rotations_of
from kvtier_kernels.scores import unrotate

HALVES, NEIGHBOURS = False, True
# Kind -> (how it is configured, whether its pairs are neighbours, layers that do not rotate).
KINDS: dict[str, tuple[dict[str, Any], bool, set[int]]] = {
    "Llama": ({}, HALVES, set()),
    "StableLm": ({}, HALVES, set()),
    "SmolLM3": ({"no_rope_layers": [1, 0, 1], "pad_token_id": 0}, HALVES, {1}),
    "Glm4": ({"pad_token_id": 0}, NEIGHBOURS, set()),
    "Ernie4_5": ({}, NEIGHBOURS, set()),
}


@torch.inference_mode()
def keys_of(model: Any, ids: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Each layer's keys `[heads, tokens, dim]`: as attention gets them, and as projected."""
    rotated: list[Tensor] = []
    projected: list[Tensor] = []

    def attend_layer(_: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        rotated.append(k[0])
        return torch.zeros_like(q)

    def projects(_: object, __: object, out: Tensor) -> None:
        projected.append(out[0].unflatten(1, (-1, 16)).transpose(0, 1))

    hooks = [
        module.register_forward_hook(projects)
        for name, module in model.named_modules()
        if name.endswith("k_proj")
    ]
    with attending(model, attend_layer):
        model(torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return rotated, projected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_keys_are_unrotated_to_what_the_projection_gave(kind: str, dtype: torch.dtype) -> None:
    options, interleaved, plain = KINDS[kind]
    model = tiny_model(kind, dtype, **options)
    found = rotations_of(model)
    assert {layer for layer, rotation in enumerate(found) if rotation is None} == plain
    assert {rotation.interleaved for rotation in found if rotation is not None} == {interleaved}
    # No token whose embedding is nothing, as that of padding is.
    rotated, projected = keys_of(model, [3 + token % 90 for token in make_ids(60)])
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    for layer, (keys, wanted) in enumerate(zip(rotated, projected, strict=True)):
        rotation = rotation_of(model, layer, torch.arange(60))
        if rotation is not None:
            keys = unrotate(keys, rotation.cos, rotation.sin, interleaved=rotation.interleaved)
        error = (keys.float() - wanted.float()).norm(dim=-1) / wanted.float().norm(dim=-1)
        assert float(error.max()) < tolerance


def test_of_layers_with_a_window_none_is_looked_for() -> None:
    found = rotations_of(tiny_model("Gemma3", **WINDOWS))
    assert [rotation is None for rotation in found] == [True, False, True]


def test_a_model_whose_rotation_no_way_undoes_is_refused() -> None:
    model = tiny_model("Llama", torch.float32)
    rotary = model.model.rotary_emb
    plain = rotary.forward
    # Layers are handed other angles than the module that is asked of them gives.
    rotary.forward = lambda x, position_ids: plain(x, position_ids * position_ids)

    def turned(_: Any, args: Any, kwargs: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        return args, {**kwargs, "position_embeddings": plain(x, kwargs["position_ids"])}

    model.model.layers[0].self_attn.register_forward_pre_hook(turned, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match="--model-path: expected keys whose rotation"):
        rotations_of(model)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rotation_that_changes_with_the_length_is_refused(kind: str) -> None:
    model = tiny_model("Llama", torch.float32)
    model.config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match=f"length, got '{kind}'"):
        rotations_of(model)
