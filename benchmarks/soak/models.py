"""The models that the soak serves: the demo model, the same with other weights, and an adapter; and
by which rules each engine keeps what it serves.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from kvtier.calibration.documents import ProfileDocument, load_curve
from kvtier.calibration.store.directory import open_store
from kvtier.config import load_settings
from kvtier.heads.model.config import model_shape, read_config
from kvtier.heads.profile import full_profile, load_profile

# Names of the weights, as the servers are told them.
FIRST, SECOND = "v1", "v2"
ADAPTER = "tenant"
ADAPTER_RANK = 4
SPAN_TOKENS = 128
# The rule of an engine that keeps everything, and those of the one that does not, in turn.
EVERYTHING = "everything"
LOCALITY, QUALITY, SHARE = "locality heads", "quality target", "fixed share"
POLICIES: Mapping[str, Mapping[str, str]] = {
    # Its exact KV has the names of an engine's that keeps everything, and is shared with it.
    LOCALITY: {},
    QUALITY: {"quality": "0.95", "refresh": "turn", "merge": "keepkv"},
    SHARE: {"retention": "0.3", "refresh": "turn"},
}


def write_other_weights(model: Path, folder: Path) -> Path:
    """The model under its own name with other keys and values; returns where."""
    import torch
    from safetensors.torch import load_file, save_file

    other = folder / "other" / model.name
    shutil.copytree(model, other)
    weights = load_file(other / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        if "k_proj" in name or "v_proj" in name:
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weights[name] = weight + 0.3 * weight.std() * noise
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    return other


def write_adapter(model: Path, folder: Path) -> Path:
    """A LoRA of the attention outputs, which SGLang adapts on a CPU, too; in PEFT's format."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, inputs = config["hidden_size"], config["head_dim"] * config["num_attention_heads"]
    generator = torch.Generator().manual_seed(2)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        for side, shape in (("A", (ADAPTER_RANK, inputs)), ("B", (hidden, ADAPTER_RANK))):
            scale = 0.1 if side == "A" else 0.3
            weights[f"{prefix}.lora_{side}.weight"] = scale * torch.randn(
                shape, generator=generator
            )
    path = folder / "adapter"
    path.mkdir()
    save_file(weights, path / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": ADAPTER_RANK,
        "lora_alpha": ADAPTER_RANK,
        "target_modules": ["o_proj"],
        "base_model_name_or_path": model.name,
        "task_type": "CAUSAL_LM",
    }
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return path


def adapter_id(path: Path) -> str:
    """Return SGLang's id of an adapter of `--lora-paths`, which it appends to a request's extra
    key."""
    return uuid5(NAMESPACE_URL, f"{ADAPTER}\0{path}").hex


def write_full_profile(model: Path, folder: Path) -> Path:
    """A head profile by which nothing is ever dropped."""
    path = folder / "full_profile.json"
    full_profile(model_shape(read_config(str(model)))).save(path)
    return path


def store_calibration(model: Path, redis_url: str) -> None:
    """The model's head profile and curve into the Redis of the servers."""
    with open_store(load_settings(redis_url=redis_url)) as store:
        store.put(ProfileDocument.of(load_profile(model / "head_profile.json")))
        store.put(load_curve(model / "curve.json"))


def server_flags(
    model: Path, adapter: Path, *, device_tokens: int, requests: int, threads: int = 1
) -> list[str]:
    """SGLang's flags that all servers of the soak have in common. requests: at a time."""
    return [
        "--model-path", str(model), "--weight-version", FIRST, "--dtype", "float32",
        "--device", "cpu", "--skip-tokenizer-init", "--grammar-backend", "none",
        "--skip-server-warmup", "--sleep-on-idle", "--log-level", "warning",
        "--random-seed", "0", "--chunked-prefill-size", "256",
        "--max-total-tokens", str(device_tokens), "--max-running-requests", str(requests),
        "--enable-lora", "--lora-paths", f"{ADAPTER}={adapter}",
        "--max-lora-rank", str(ADAPTER_RANK), "--lora-target-modules", "o_proj",
        "--lora-backend", "torch_native",
    ]  # fmt: skip


def engine_flags(folder: Path, redis_url: str, tier: str, policy: str, full: Path) -> list[str]:
    """kvtier's. folder: of the engine; policy: EVERYTHING or one of POLICIES; full: the profile by
    which nothing is dropped. The engine that keeps everything has payloads come over its
    connection, where they may be damaged, and asks for them whatever it measured."""
    settings = {
        "data-dir": str(folder),
        "redis-url": redis_url,
        "calibration-poll-s": "1",
        "tier": tier,
        "tier-span-tokens": str(SPAN_TOKENS),
        "tier-buffer-bytes": str(64 << 20),
    }
    everything = {"head-profile": str(full), "tier-patience-s": "2"}
    settings |= everything if policy == EVERYTHING else POLICIES[policy]
    flags = [text for name, value in settings.items() for text in (f"--{name}", value)]
    return [*flags, "--no-tier-shared-memory"] if policy == EVERYTHING else flags
