"""Tiny random models of many kinds, as files that an engine loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB, WINDOW = 97, 40
# What makes two of three layers attend to their newest tokens only.
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": WINDOW,
}
# gpt-oss, whose heads attend to nothing, too.
SINKS = {
    **WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "truncate": False,
        "original_max_position_embeddings": 128,
    },
}  # fmt: skip
# SGLang takes another kernel's layout of gpt-oss's weights where it may choose.
EXPERTS_ON_CPU = "triton"
# What makes experts of a model's layers.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def write_model(folder: Path, architecture: str, extra: dict[str, Any]) -> Any:
    """A random model whose attention is far from uniform and whose biases are not zero."""
    import transformers

    sizes = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 512, "initializer_range": 0.25, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    # Of a model that also sees, its text's.
    names = (f"{architecture}TextConfig", f"{architecture}Config")
    make = next(getattr(transformers, name) for name in names if hasattr(transformers, name))
    config = make(**{**sizes, **extra})
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = getattr(transformers, f"{architecture}ForCausalLM")(config)
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                # SGLang has them in this dtype.
                torch.nn.init.normal_(parameter, mean=1.0)
                parameter.data = parameter.bfloat16().float()
            if name.endswith("bias") or "norm" in name:
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    model.save_pretrained(folder)
    return model.eval()
