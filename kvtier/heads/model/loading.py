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
    from transformers.utils import logging

    logging.disable_progress_bar()
    placed = _placement(model_path)
    folder = None
    if "device_map" in placed:
        # Transformers keeps weights here that are in no file as it wants them.
        folder = placed["offload_folder"] = tempfile.mkdtemp()
    try:
        model = _from_pretrained(model_path, placed)
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


def _from_pretrained(model_path: str, placed: dict[str, Any]) -> Any:
    """A language model, or one that sees, too, which transformers has no other class of."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto

    kind = AutoConfig.from_pretrained(model_path).model_type
    speaks = kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    sees = kind in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    auto = AutoModelForImageTextToText if sees and not speaks else AutoModelForCausalLM
    return auto.from_pretrained(model_path, **placed)


def _placement(model_path: str) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for dtype and devices."""
    import torch

    folder = folder_of(model_path)
    files = [] if folder is None else folder.glob("*.safetensors")
    stored, room = sum(file.stat().st_size for file in files), FOR_WEIGHTS * free_memory()
    if torch.cuda.is_available():
        return {"dtype": "auto", **({} if stored <= room else {"device_map": "auto"})}
    if stored * torch.float32.itemsize / _stored_itemsize(model_path) <= room:
        return {"dtype": torch.float32}
    if stored <= room:
        return {"dtype": "auto"}
    return {"dtype": "auto", "device_map": "auto", "max_memory": {"cpu": int(room)}}


def _stored_itemsize(model_path: str) -> int:
    """Bytes of a number in a model's files, as its configuration says."""
    import torch
    from transformers import AutoConfig

    try:
        dtype = AutoConfig.from_pretrained(model_path).get_text_config().dtype
    except (OSError, ValueError, KeyError):
        return torch.float32.itemsize
    return dtype.itemsize if isinstance(dtype, torch.dtype) else torch.float32.itemsize


def free_memory() -> int:
    """Bytes that are free on the GPU, or without one on the machine."""
    import psutil
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    return int(psutil.virtual_memory().available)
