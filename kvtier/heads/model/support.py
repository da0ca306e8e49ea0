"""The models that kvtier can serve and calibrate, told by their configuration before they load.

A layer has KV of its own per head. It attends to its whole context, or, beside layers that do, to
its newest tokens (a window). What else a layer may do (chunks, latent KV, states instead of KV,
a cap) is refused by name. The engine asks again of the loaded layers,
`kvtier_sglang.support`, as a configuration need not tell all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from kvtier.errors import UnsupportedModelError

Config = Mapping[str, Any]

EXPECTED = "a model with per-head KV and full attention, in some layers windows (MHA or GQA)"
FULL, WINDOW = "full_attention", "sliding_attention"
# The keys under which configurations of models that also see or hear keep that of their language
# model.
NESTED = ("text_config", "llm_config", "language_config", "thinker_config")

# Keys that only configurations with such layers set.
_LATENT = ("kv_lora_rank", "qk_rope_head_dim")
_STATES = (
    "mamba_d_state", "mamba_d_ssm", "mamba_num_heads", "ssm_state_size", "ssm_cfg", "state_size",
    "d_state", "linear_num_key_heads", "linear_attn_config", "conv_L_cache", "lru_width",
    "attn_type_list", "mixer_types", "layers_block_type", "block_types", "hybrid_override_pattern",
    "attn_layer_indices", "attn_layer_period", "full_attn_idxs", "layer_group_size",
)  # fmt: skip
_WINDOWS = ("hybrid_layer_pattern", "sliding_window_pattern", "interleaved_sliding_window")
_SHARED = ("num_kv_shared_layers", "cross_layer_kv_sharing", "kv_sharing_pattern")
_SPARSE = ("sparse_attention_config", "sparse_config", "index_topk", "attention_chunk_size")
_CAPS = ("attn_logit_softcapping", "attn_logit_softcap", "attention_logit_cap")
_SINKS = ("add_swa_attention_sink_bias", "add_full_attention_sink_bias", "attention_sink_bias")
_OTHER_SOURCES = ("cross_attention_layers", "is_encoder_decoder", "add_cross_attention")
_ENCODERS = ("bert", "clip", "siglip", "vit", "roberta")


def text_config(config: Config) -> dict[str, Any]:
    """The configuration of the language model, where it is one part of several; `architectures`
    stays the whole model's."""
    for key in NESTED:
        nested = config.get(key)
        if isinstance(nested, Mapping):
            whole = {"architectures": config.get("architectures")}
            return text_config({**config, **nested, **whole, key: None})
    return dict(config)


def check_supported(config: Config, *, windows: bool = False) -> None:
    """Raise UnsupportedModelError, which names the obstacle, for a model that kvtier cannot split
    by head. windows: whether some of its layers may have one."""
    config = text_config(config)
    some = () if windows else ((lambda config: bool(windows_of(config)), "sliding windows"),)
    for is_obstacle, name in (*_OBSTACLES, *some):
        if is_obstacle(config):
            architecture = ", ".join(config.get("architectures") or ["unknown"])
            raise UnsupportedModelError("--model-path", EXPECTED, f"{architecture} ({name})")


def _any_of(*keys: str) -> Callable[[Config], bool]:
    return lambda config: any(bool(config.get(key)) for key in keys)


def _is_encoder(config: Config) -> bool:
    if config.get("use_bidirectional_attention") in (True, "all"):
        return True
    kind = str(config.get("model_type") or "")
    return any(kind.endswith(name) for name in _ENCODERS) and not config.get("is_decoder")


def _is_alibi(config: Config) -> bool:
    return bool(config.get("alibi") or (config.get("attn_config") or {}).get("alibi"))


def windows_of(config: Config) -> tuple[int | None, ...]:
    """Return for each layer how many of its newest tokens it attends to, its own included; None for
    one that attends to all. Empty where every layer does."""
    config = text_config(config)
    window, types = _window(config), _layer_types(config)
    if window is None or WINDOW not in types:
        return ()
    return tuple(window if kind == WINDOW else None for kind in types)


def _window(config: Config) -> int | None:
    """Tokens of its windows; None where it has none, or none that leaves a token out."""
    window = config.get("sliding_window") or config.get("sliding_window_size")
    positions = config.get("max_position_embeddings")
    if not window or not config.get("use_sliding_window", True):
        return None
    return None if isinstance(positions, int) and window >= positions else int(window)


def _layer_types(config: Config) -> tuple[str, ...]:
    """Return the kind of each layer's attention; empty where the configuration does not tell layers
    apart."""
    types = config.get("layer_types")
    if not types and _window(config) is not None:
        # Files that are older than the key: the kind's class knows.
        with suppress(ImportError, AttributeError, KeyError, TypeError, ValueError):
            from transformers import AutoConfig

            types = getattr(AutoConfig.for_model(**config), "layer_types", None)
    return tuple(types or ())


def _mixes_others(config: Config) -> bool:
    return bool(set(_layer_types(config)) - {FULL, WINDOW})


def _is_windowed(config: Config) -> bool:
    types = _layer_types(config)
    if types:
        return FULL not in types and _window(config) is not None
    return _window(config) is not None or _any_of(*_WINDOWS)(config)


def _is_capped(config: Config) -> bool:
    # Grok's cap stands in its code.
    grok = any(str(name).startswith("Grok1") for name in config.get("architectures") or ())
    return grok or _any_of(*_CAPS)(config)


def _sizes_differ(config: Config) -> bool:
    head_dim = config.get("head_dim")
    if head_dim is None and config.get("hidden_size") and config.get("num_attention_heads"):
        head_dim = config["hidden_size"] // config["num_attention_heads"]
    others = ("v_head_dim", "swa_head_dim", "swa_v_head_dim", "global_head_dim")
    heads = config.get("num_key_value_heads")
    of_windows = config.get("swa_num_key_value_heads")
    return any(config.get(key) not in (None, head_dim) for key in others) or (
        of_windows not in (None, heads)
    )


_OBSTACLES: tuple[tuple[Callable[[Config], bool], str], ...] = (
    (_any_of(*_LATENT), "MLA"),
    (_any_of(*_STATES), "SSM, linear-attention or other layers without KV"),
    (_any_of("block_configs"), "layers that differ"),
    (_any_of(*_SPARSE), "sparse or chunked attention"),
    (_any_of(*_SINKS), "attention sinks in some layers"),
    (_is_alibi, "ALiBi positions"),
    (_is_capped, "capped attention logits"),
    (_any_of(*_OTHER_SOURCES), "cross-attention"),
    (_is_encoder, "an encoder"),
    (_mixes_others, "layers of other kinds than full attention and windows"),
    (_any_of(*_SHARED), "layers that share KV"),
    (_is_windowed, "sliding windows in every layer"),
    (_sizes_differ, "keys or values of more than one size"),
)
