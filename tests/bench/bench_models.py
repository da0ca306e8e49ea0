"""Tiny model directories and head profiles; nothing here loads a real engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from kvtier.heads.profile import HeadProfile, ModelShape

FAKE_WORKER = str(Path(__file__).with_name("fake_worker.py"))
SHAPE = ModelShape(num_layers=3, num_kv_heads=4, num_attention_heads=8, head_dim=32)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_size": 128,
    "vocab_size": 384,
    "max_position_embeddings": 8192,
}
DEMO_TOKENIZER = Path(__file__).resolve().parents[2] / "models" / "kvtier-demo" / "tokenizer.json"


def write_model(folder: Path, weights: bool = True, tokenizer: bool = True, **changes: Any) -> Path:
    """A model directory whose weights are empty, with the demo model's tokenizer or without one."""
    folder.mkdir(exist_ok=True)
    if tokenizer:
        shutil.copy(DEMO_TOKENIZER, folder)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    if weights:
        (folder / "model.safetensors").touch()
    return folder


def make_profile(**changes: Any) -> HeadProfile:
    """A quarter of the heads CA, all in the middle layer."""
    values: dict[str, Any] = {
        "model": "tiny",
        "shape": SHAPE,
        "method": "test",
        "ca_heads": ((), (0, 1, 2), ()),
    }
    return HeadProfile(**(values | changes))
