"""A transformers model from a local directory, as calibration wants it."""

from __future__ import annotations

from typing import Any

from kvtier.errors import UnsupportedModelError, UsageError


def load_model(model_path: str) -> Any:
    """A transformers causal LM: on the GPU in its own dtype, or on the CPU in float32.

    Raises UsageError when it does not load, UnsupportedModelError when its attention cannot be
    replaced.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    on_gpu = torch.cuda.is_available()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype="auto" if on_gpu else torch.float32
        )
    except (OSError, ValueError) as error:
        raise UsageError("--model-path", "a model that transformers loads", model_path) from error
    if not getattr(model, "_supports_attention_backend", False):
        # Its attention could not be replaced, so every choice of heads would measure the same.
        expected = "a model on transformers' attention interface"
        raise UnsupportedModelError("--model-path", expected, type(model).__name__)
    return model.to("cuda" if on_gpu else "cpu").eval()
