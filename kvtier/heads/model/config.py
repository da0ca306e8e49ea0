"""What kvtier needs to know of a model, from its config.json alone, before anything loads."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from kvtier.errors import UnsupportedModelError
from kvtier.heads.profile import ModelShape
from kvtier.reading import read_json

_MLA_KEYS = ("kv_lora_rank", "qk_rope_head_dim")
_SSM_KEYS = ("mamba_d_state", "ssm_state_size", "linear_num_key_heads", "state_size", "d_state")


def read_config(model_path: str) -> dict[str, Any]:
    """The config.json of a local model directory, the text part of multimodal ones.

    Raises UsageError when there is none that can be read.
    """
    config = read_json(Path(model_path) / "config.json", "--model-path", finite=False)
    text_config = config.get("text_config")
    return {**config, **text_config} if isinstance(text_config, dict) else config


def check_splittable(config: dict[str, Any]) -> None:
    """Raise UnsupportedModelError for a model whose KV heads cannot be split by head.

    Multi-head latent attention has no per-head KV, state-space layers have no KV, and
    sliding-window layers already drop their context in their own way.  ALiBi's bias by distance
    is in none of our kernels.
    """
    architecture = ", ".join(config.get("architectures") or ["unknown"])
    expected = "a model with per-head KV in every layer (MHA or GQA, full attention)"
    if any(config.get(key) for key in _MLA_KEYS):
        raise UnsupportedModelError("--model-path", expected, f"{architecture} (MLA)")
    if any(config.get(key) for key in _SSM_KEYS):
        raise UnsupportedModelError("--model-path", expected, f"{architecture} (SSM layers)")
    if config.get("alibi") or (config.get("attn_config") or {}).get("alibi"):
        raise UnsupportedModelError("--model-path", expected, f"{architecture} (ALiBi positions)")
    kinds = set(config.get("layer_types") or ["full_attention"])
    windowed = config.get("sliding_window") and config.get("use_sliding_window", True)
    if kinds != {"full_attention"} or (windowed and "layer_types" not in config):
        raise UnsupportedModelError(
            "--model-path", expected, f"{architecture} (sliding-window or mixed layers)"
        )


def model_shape(config: dict[str, Any]) -> ModelShape:
    """The head layout of a configuration. Raises UnsupportedModelError when it names none."""
    try:
        num_heads = int(config["num_attention_heads"])
        return ModelShape(
            num_layers=int(config["num_hidden_layers"]),
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            num_attention_heads=num_heads,
            head_dim=int(config.get("head_dim") or config["hidden_size"] // num_heads),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            "--model-path", "a transformer configuration with attention heads", str(error)
        ) from error


def shape_of(model: Any) -> ModelShape:
    """Head layout of a loaded model. Raises UnsupportedModelError when it cannot be split."""
    config = model.config.get_text_config().to_dict()
    check_splittable(config)
    return model_shape(config)


def context_length(config: dict[str, Any]) -> int:
    """Longest position the model was made for, in tokens."""
    return int(config.get("max_position_embeddings") or 0)


def model_name(model_path: str) -> str:
    """What a model is called in profiles and curves: the directory's name, or the hub id."""
    path = Path(model_path)
    return path.resolve().name if path.is_dir() else model_path


def weights_revision(model_path: str) -> str | None:
    """A digest of a local model's safetensors files: sha256 over names and contents, 16 hex
    digits. None when there are none (a hub name, another format)."""
    files = sorted(Path(model_path).glob("*.safetensors"))
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:16]
