"""The check that kvtier can serve a model: of SGLang's configuration before anything loads, and of
the layers that were loaded.

    check_config   kvtier.heads.model.support, of what SGLang resolves a path or a hub id to
    confirm        every attention layer is one that the backend computes; one pass over a repeated
                   token shows what layers hand to attention, and how they rotate their keys
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from kvtier.errors import UnsupportedModelError
from kvtier.heads.model.config import folder_of, read_config
from kvtier.heads.model.support import EXPECTED, check_supported, windows_of
from kvtier.heads.reference.rotation import (
    PROVING_TOKEN,
    KeyRotation,
    candidates_of,
    prove,
    proving_positions,
)
from kvtier_sglang.pool.kv_pool import HeadPagedKVPool


def resolved_config(server_args: Any) -> dict[str, Any]:
    """The language model's configuration as SGLang sees it, of a folder or a hub id, with the
    defaults of its class and the user's overrides.

    Raises OSError, ValueError or KeyError, as transformers does, where there is none.
    """
    from sglang.srt.utils.hf_transformers_utils import get_config, get_hf_text_config

    whole = get_config(
        server_args.model_path,
        trust_remote_code=getattr(server_args, "trust_remote_code", False),
        revision=getattr(server_args, "revision", None),
        model_override_args=json.loads(
            getattr(server_args, "json_model_override_args", None) or "{}"
        ),
    )
    text = get_hf_text_config(whole)
    return {**text.to_dict(), "architectures": whole.architectures}


def check_config(server_args: Any) -> dict[str, Any] | None:
    """The configuration of a model that kvtier can serve; None for one that cannot be read, of
    which SGLang will say more. Raises UnsupportedModelError."""
    path, config = server_args.model_path, None
    # The configuration is read as it is written, too: what a class does not know may be lost in
    # what it makes of it.
    if folder_of(path, getattr(server_args, "revision", None)) is not None:
        config = read_config(path)
        check_supported(config, windows=True)
    with suppress(OSError, ValueError, KeyError):
        config = resolved_config(server_args)
        check_supported(config, windows=True)
    return config


# Attribute of RadixAttention -> what kvtier's backend computes. Unset attributes are as SGLang's
# own backends take them.
_COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "logit_cap": (0, 0.0, None),
    "attn_type": (AttentionType.DECODER,),
    "is_cross_attention": (False,),
    "use_irope": (False,),
    "pos_encoding_mode": ("NONE",),
    "xai_temperature_len": (-1, 0, None),
}


def check_layer(
    layer: Any, *, heads: int, head_dim: int, context: int, window: int | None = None
) -> int | None:
    """Return how many of its newest tokens a RadixAttention attends to, its own included; None for
    all. Raise UnsupportedModelError for one that the attention backend does not compute.

    heads: KV heads of each layer on this rank; context: tokens of the longest request; window: of
    the layer, by its model's configuration.
    """
    name = f"layer {layer.layer_id}"
    for attribute, computed in _COMPUTED.items():
        value = getattr(layer, attribute, computed[0])
        if value not in computed:
            raise _unsupported(f"{name}: {attribute} = {value}")
    shape = layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim
    if shape != (heads, head_dim, head_dim):
        expected = f"{heads} KV heads of {head_dim}"
        raise _unsupported(f"{name}: KV heads, size of keys and values {shape}, not {expected}")
    size = layer.sliding_window_size
    if size is None or not 0 <= size < context - 1:
        return None
    # SGLang does not count the token itself, but some of its models do.
    if window is None or size not in (window - 1, window):
        told = f"its configuration says {window or 'none'}"
        raise _unsupported(f"{name}: a window of {size + 1} tokens, where {told}")
    return window


def _unsupported(why: str) -> UnsupportedModelError:
    return UnsupportedModelError("--model-path", EXPECTED, why)


class _SeenAllError(Exception):
    """The last layer's attention was reached; what comes behind it is not wanted."""


class _Watching:
    """An attention backend that notes what layers hand to it, and checks that kvtier's could.

    All values of a repeated token are alike, so its attention is its value, whatever the scores.
    """

    def __init__(self, runner: Any, layers: range, pool: HeadPagedKVPool) -> None:
        self.token_to_kv_pool = pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.context = int(runner.model_config.context_len)
        self.layers = layers
        self.keys: dict[int, torch.Tensor] = {}
        self._windows = windows_of(runner.model_config.hf_text_config.to_dict())
        self.windows: dict[int, int | None] = {}
        self.has_sinks = False

    def forward(
        self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save: bool = True, **others: Any
    ) -> torch.Tensor:
        pool, number = self.token_to_kv_pool, layer.layer_id
        window = self._windows[number] if number < len(self._windows) else None
        self.windows[number] = check_layer(
            layer,
            heads=pool.head_num,
            head_dim=pool.head_dim,
            context=self.context,
            window=window,
        )
        self.has_sinks |= others.pop("sinks", None) is not None
        asked = sorted(name for name, value in others.items() if value is not None)
        if asked or k is None:
            raise _unsupported(f"layer {number}: attention with {asked or 'no keys'}")
        if number in self.keys or number not in self.layers:
            raise _unsupported(f"layer {number}: a second attention")
        heads, group = layer.tp_k_head_num, layer.tp_q_head_num // layer.tp_k_head_num
        self.keys[number] = k.view(-1, heads, layer.qk_head_dim).transpose(0, 1)
        if number == self.layers[-1]:
            raise _SeenAllError
        return v.view(-1, heads, layer.v_head_dim).repeat_interleave(group, 1).flatten(1)


class Confirmed(NamedTuple):
    """The findings of one pass over a repeated token.

    keys:      each layer's, `[heads, tokens, dim]`
    positions: of the token, `[tokens]`
    windows:   how many of its newest tokens each layer attends to; None for all
    shift:     how much further on than its token's index each key is rotated; None where that is
               not the same everywhere
    """

    keys: list[torch.Tensor]
    positions: torch.Tensor
    windows: tuple[int | None, ...]
    shift: int | None = 0


@torch.inference_mode()
def confirm(runner: Any, pool: HeadPagedKVPool) -> Confirmed:
    """Let a loaded model's layers compute one pass.

    Raises UnsupportedModelError for attention that is not what kvtier's backend computes.
    """
    device = torch.device(runner.device)
    positions = proving_positions(int(runner.model_config.context_len), device)
    count = len(positions)
    nowhere = torch.zeros(count, dtype=torch.int64, device=device)
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=count,
        input_ids=torch.full_like(nowhere, PROVING_TOKEN),
        req_pool_indices=nowhere,
        seq_lens=positions + 1,
        out_cache_loc=nowhere,
        seq_lens_sum=int(positions.sum()) + count,
        positions=positions,
        mrope_positions=positions.expand(3, -1),
    )
    watching: Any = _Watching(runner, pool.layers, pool)
    shifts: set[int] = set()

    def rotates(module: Any, args: tuple[Any, ...], others: dict[str, Any]) -> None:
        given = (x for x in (*args, *others.values()) if isinstance(x, torch.Tensor))
        at = next((x for x in given if x.dtype == positions.dtype), None)
        if at is not None and at.numel() == count:
            shifts.update((at.flatten() - positions).tolist())

    with ExitStack() as stack:
        for rotary in _rotaries(runner.model):
            hook = rotary.register_forward_pre_hook(rotates, with_kwargs=True)
            stack.callback(hook.remove)
        stack.enter_context(forward_context(ForwardContext(attn_backend=watching)))
        stack.enter_context(suppress(_SeenAllError))
        # Some models count positions from 1, and do so in place.
        runner.model.forward(batch.input_ids, positions.clone(), batch)
    missing = [layer for layer in pool.layers if layer not in watching.keys]
    if missing:
        raise _unsupported(f"no attention in layers {missing}")
    windows = tuple(watching.windows[layer] for layer in pool.layers)
    if len({*windows} - {None}) > 1:
        raise _unsupported(f"windows of more than one size: {windows}")
    if watching.has_sinks and not any(windows):
        # Settings are checked against sinks where they are checked against windows.
        raise _unsupported("attention sinks where no layer has a window")
    shift = next(iter(shifts), 0) if len(shifts) < 2 else None
    return Confirmed([watching.keys[layer] for layer in pool.layers], positions, windows, shift)


def rotations(model: Any, confirmed: Confirmed) -> list[KeyRotation | None]:
    """Return how each layer rotates its keys, None where it does not, or has a window, whose keys
    nobody compares; proven on `confirm`.

    The rotations are those of text where pictures have positions of their own; requests with
    pictures are refused (kvtier_sglang.requests). Raises UnsupportedModelError where a position
    does not follow the token's index, and where no rotary embedding of the model fits.
    """
    keys, positions, windows, shift = confirmed
    if shift is None:
        raise _unsupported("keys that are rotated by something else than their tokens' index")
    candidates: list[KeyRotation | None] = [None]
    for rotary in _rotaries(model):
        # Other modules are transformers', in models under SGLang's backend for them.
        is_sglangs = hasattr(rotary, "is_neox_style")
        of_rotary = _of_sglang(rotary) if is_sglangs else candidates_of(rotary)
        candidates += [one.shifted(shift) for one in of_rotary]
    full = [index for index, window in enumerate(windows) if window is None]
    found: list[KeyRotation | None] = [None] * len(keys)
    proven = prove([keys[index] for index in full], positions, candidates)
    for index, rotation in zip(full, proven, strict=True):
        found[index] = rotation
    return found


def _rotaries(model: Any) -> Iterator[Any]:
    """The rotary embeddings that stand in a model, each once."""
    seen: set[int] = set()
    for module in model.modules():
        for name, child in module._modules.items():
            if name == "rotary_emb" and child is not None and id(child) not in seen:
                seen.add(id(child))
                yield child


def _of_sglang(rotary: RotaryEmbedding) -> list[KeyRotation]:
    if getattr(rotary, "cos_sin_cache", None) is None:
        return []

    def tables(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = rotary.cos_sin_cache[positions].to(positions.device).chunk(2, dim=-1)
        return cos, sin

    return [KeyRotation(tables, interleaved=not rotary.is_neox_style)]
