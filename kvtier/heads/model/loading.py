"""A transformers model from a local directory, as calibration wants it."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from typing import Any

from kvtier.errors import UnsupportedModelError, UsageError
from kvtier.heads.model.config import folder_of

# The share of the free memory that weights may take; the rest is for contexts.
FOR_WEIGHTS = 0.7


def load_model(model_path: str) -> Any:
    """A transformers causal LM: on the GPU in its own dtype, or on the CPU in float32. One that
    takes more memory than there is runs on the CPU in its own dtype, and where that is too much,
    too, a layer at a time from its files.

    Raises UsageError when it does not load, UnsupportedModelError when its attention cannot be
    replaced.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = None
    try:
        config = AutoConfig.from_pretrained(model_path)
        placed = _placement(model_path, config.get_text_config().dtype)
        if "device_map" in placed:
            # Transformers keeps weights here that are in no file as it wants them.
            folder = placed["offload_folder"] = tempfile.mkdtemp()
        # Transformers has no other class of some models that see, too.
        speaks = config.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        sees = config.model_type in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        auto = AutoModelForImageTextToText if sees and not speaks else AutoModelForCausalLM
        model = auto.from_pretrained(model_path, **placed)
    except (OSError, ValueError) as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise UsageError("--model-path", "a model that transformers loads", model_path) from error
    if not getattr(model, "_supports_attention_backend", False):
        # Its attention could not be replaced, so every choice of heads would measure the same.
        expected = "a model on transformers' attention interface"
        raise UnsupportedModelError("--model-path", expected, type(model).__name__)
    if folder is not None:
        weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
        return model.eval()
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def _placement(model_path: str, dtype: Any) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for dtype and devices. dtype: that the model's
    files have, as its configuration says"""
    import torch

    folder = folder_of(model_path)
    files = [] if folder is None else folder.glob("*.safetensors")
    stored, room = sum(file.stat().st_size for file in files), FOR_WEIGHTS * free_memory()
    if torch.cuda.is_available():
        return {"dtype": "auto", **({} if stored <= room else {"device_map": "auto"})}
    itemsize = dtype.itemsize if isinstance(dtype, torch.dtype) else torch.float32.itemsize
    if stored * torch.float32.itemsize / itemsize <= room:
        return {"dtype": torch.float32}
    if stored <= room:
        return {"dtype": "auto"}
    return {"dtype": "auto", "device_map": "auto", "max_memory": {"cpu": int(room)}}


def free_memory() -> int:
    """Bytes that are free on the GPU, or without one on the machine."""
    import psutil
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    return int(psutil.virtual_memory().available)
