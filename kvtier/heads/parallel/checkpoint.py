"""A checkpoint whose KV heads stand in another order within their layers.

What a layer computes does not change: the rows of its query, key and value projections and the
columns of its output projection move together.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.errors import UnsupportedModelError, UsageError
from kvtier.heads.model.config import model_shape, read_config
from kvtier.heads.model.support import check_supported
from kvtier.heads.parallel.balance import Order
from kvtier.heads.profile import ModelShape

if TYPE_CHECKING:
    from torch import Tensor

# Of the text model, alone or inside one that sees or hears, too.
_ATTENTION = re.compile(
    r"^(?:(?:model|language_model|text_model)\.)*layers\.(\d+)\.self_attn\.(.+)$"
)
_ROWS = {"q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias", "v_proj.weight",
         "v_proj.bias"}  # fmt: skip
_COLUMNS = {"o_proj.weight"}
_NEEDED = {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"}
# The same for all heads of a layer.
_SHARED = {"o_proj.bias", "q_norm.weight", "k_norm.weight", "rotary_emb.inv_freq"}
_NORMS = {"q_norm.weight", "k_norm.weight"}
# Other forms of the weights, and what was measured on the weights as they were.
_LEFT_OUT = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.npz", "head_profile*.json",
             "curve*.json", "*.png")  # fmt: skip


def permute_checkpoint(model_path: Path, orders: Sequence[Order], out: Path) -> None:
    """Write the model's folder with each layer's KV heads, and their query heads, in a new order.

    model_path: a folder with safetensors; a file of weights is in memory at a time
    orders:     per layer, which KV head comes to each place
    out:        folder to write; it must not exist, its parent must

    Raises UsageError for a folder without safetensors or a place that cannot be written to, and
    UnsupportedModelError for weights whose heads are not understood: fused or quantised ones.
    """
    files = sorted(model_path.glob("*.safetensors"))
    if not files:
        raise UsageError("--model-path", "a directory with safetensors", str(model_path))
    if out.exists() or not out.parent.is_dir():
        raise UsageError("--out", "a new folder in an existing directory", str(out))
    config = read_config(str(model_path))
    check_supported(config)
    shape = model_shape(config)
    _check_orders(shape, orders)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        made = Path(scratch) / out.name
        shutil.copytree(model_path, made, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        moved: set[tuple[int, str]] = set()
        for file in files:
            moved |= _permute_file(file, made / file.name, shape, orders)
        _check_complete(shape, moved)
        made.replace(out)


def _check_orders(shape: ModelShape, orders: Sequence[Order]) -> None:
    heads = list(range(shape.num_kv_heads))
    if len(orders) != shape.num_layers or any(sorted(order) != heads for order in orders):
        expected = f"{shape.num_layers} orders of {shape.num_kv_heads} KV heads"
        raise UsageError("orders", expected, [list(order) for order in orders])


def _permute_file(
    source: Path, target: Path, shape: ModelShape, orders: Sequence[Order]
) -> set[tuple[int, str]]:
    """Returns layers and names of what was moved."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    moved, tensors = set[tuple[int, str]](), {}
    with safe_open(source, framework="pt") as weights:
        metadata = weights.metadata()
        for name in weights.keys():  # noqa: SIM118
            tensor = weights.get_tensor(name)
            match = _ATTENTION.match(name)
            if match is not None and match[2] in _NORMS and tensor.numel() != shape.head_dim:
                expected = "norms of queries and keys that all heads share"
                raise UnsupportedModelError("--model-path", expected, f"{name} {len(tensor)}")
            if match is not None and match[2] not in _SHARED:
                layer, part = int(match[1]), match[2]
                if part not in _ROWS | _COLUMNS or layer >= shape.num_layers:
                    expected = "plain projections of queries, keys, values and output"
                    raise UnsupportedModelError("--model-path", expected, name)
                tensor = _moved(name, tensor, part, shape, orders[layer])
                moved.add((layer, part))
            tensors[name] = tensor
    save_file(tensors, target, metadata=metadata)
    return moved


def _moved(name: str, tensor: Tensor, part: str, shape: ModelShape, order: Order) -> Tensor:
    """A projection with its heads in that order."""
    axis = 1 if part in _COLUMNS else 0
    heads = shape.num_kv_heads if part[0] in "kv" else shape.num_attention_heads
    if tensor.shape[axis] != heads * shape.head_dim or not tensor.is_floating_point():
        expected = f"a weight of {heads} heads of {shape.head_dim} dimensions"
        raise UnsupportedModelError("--model-path", expected, f"{name} {tuple(tensor.shape)}")
    # A KV head's query heads move with it.
    per_head = tensor.unflatten(axis, (shape.num_kv_heads, -1))
    return per_head[list(order)].flatten(0, 1) if axis == 0 else (
        per_head[:, list(order)].flatten(1, 2).contiguous()
    )  # fmt: skip


def _check_complete(shape: ModelShape, moved: set[tuple[int, str]]) -> None:
    for layer in range(shape.num_layers):
        for part in sorted(_NEEDED):
            if (layer, part) not in moved:
                found = f"no layers.{layer}.self_attn.{part}"
                raise UnsupportedModelError("--model-path", "a model named like Llama", found)


__all__ = ["permute_checkpoint"]
