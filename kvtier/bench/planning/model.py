"""The model that a bench runs, as far as its files tell: no torch, no engine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.bench.options import Options
from kvtier.bench.policies import FP8, Policy
from kvtier.bench.schema import ScriptName
from kvtier.demo_model import find_demo_model
from kvtier.errors import UsageError
from kvtier.heads.model.config import context_length, model_shape, read_config
from kvtier.heads.model.support import check_supported, windows_of
from kvtier.heads.profile import ModelShape
from kvtier.heads.samples.synthetic import speaks_recall
from kvtier.synthetic.recall import DEFAULT_LANGUAGE

# The files of an NVIDIA driver; a container may show the second only.
_NVIDIA_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl")
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FP8: 1}


@dataclass(frozen=True)
class Model:
    """The model as the bench knows it, from files alone. kv_dtype: of the KV cache, but for
    policies that have another. windows: how many of its newest tokens each layer attends to, None
    for all; empty where all layers do."""

    path: Path
    shape: ModelShape
    max_positions: int
    vocab_size: int
    device: str
    dtype: str
    kv_dtype: str
    windows: tuple[int | None, ...] = ()

    @property
    def window(self) -> int:
        """Tokens of its windows; 0 where it has none."""
        return next((one for one in self.windows if one is not None), 0)

    @property
    def windowed_heads(self) -> int:
        """KV heads of layers with a window."""
        return (len(self.windows) - self.windows.count(None)) * self.shape.num_kv_heads

    def kv_bytes(self, policy: Policy | None = None) -> int:
        """Bytes of a number in the KV cache, or under a policy that may have its own."""
        own = None if policy is None else policy.kv_dtype
        return _DTYPE_BYTES[own or self.kv_dtype]


def find_model(options: Options) -> Model:
    """The model directory, checked for everything that can be told from its files."""
    path = options.model_path or find_demo_model()
    if not path.is_dir():
        raise UsageError("--model-path", "an existing model directory (config.json, …)", str(path))
    config = read_config(str(path))
    check_supported(config, windows=True)
    has_weights = any(path.glob("*.safetensors")) or any(path.glob("*.bin"))
    if not options.dry_run and not has_weights:
        raise UsageError("--model-path", "a directory with model weights", str(path))
    device = options.device or ("cuda" if _has_cuda() else "cpu")
    dtype = options.dtype or _default_dtype(device, config)
    return Model(
        path,
        model_shape(config),
        max_positions=context_length(config),
        vocab_size=int(config.get("vocab_size") or 0),
        device=device,
        dtype=dtype,
        kv_dtype=dtype if options.kv_dtype == "auto" else options.kv_dtype,
        windows=windows_of(config),
    )


def script_name(options: Options, model: Model) -> ScriptName:
    """Return the script that a workload is written in: the user's choice, or that of the model's
    tokenizer.

    Raises UsageError for a model whose vocabulary is smaller than the recall language's.
    """
    if options.script == "text":
        return "text"
    if options.script == "auto" and not speaks_recall(str(model.path)):
        return "text"
    if model.vocab_size < DEFAULT_LANGUAGE.vocab_size:
        wanted = f"a model with a vocabulary of at least {DEFAULT_LANGUAGE.vocab_size} tokens"
        raise UsageError("--model-path", wanted, model.vocab_size)
    return "recall"


def _has_cuda() -> bool:
    """Return whether an NVIDIA driver is there and not hidden, without importing torch."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(Path(one).exists() for one in _NVIDIA_FILES)


def _default_dtype(device: str, config: dict[str, Any]) -> str:
    """float32 on CPU, where it is exact and no slower; on CUDA the model's own 16 bits."""
    if device == "cpu":
        return "float32"
    own = config.get("torch_dtype") or config.get("dtype")
    return "float16" if own == "float16" else "bfloat16"
