"""The entries that NVIDIA kvpress's presses keep of given contexts, as one bit per layer, head,
token.

    python kvpress_masks.py CONTEXTS.jsonl FOLDER --model DIR [--shares 0.5,0.25,0.1] [--presses …]

    CONTEXTS.jsonl    {"name": …, "ids": […]} per line
    FOLDER/NAME.npz   "PRESS SHARE" -> numpy.packbits of bool [layers, kv_heads, tokens]

Runs in an environment of its own (requirements.txt) and imports nothing of kvtier. A context is
prefilled once, exactly: a press that keeps everything records what kvpress's hooks hand over, and
the others compress that. Contexts whose file is there are left out. For presses
that mask entries instead of dropping them (KVzip, AdaKV) the mask is theirs; for the others it is
found by looking up the keys that they return.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

PRESSES = (
    "CompactorPress",
    "KeyDiffPress",
    "SnapKVPress",
    "ExpectedAttentionPress",
    "StreamingLLMPress",
    "RandomPress",
)
RAGGED = "AdaKV ExpectedAttentionPress"
KVZIP = "KVzipPress"
EVERY = (*PRESSES, RAGGED, KVZIP)


def kept_tokens(share: float, context_tokens: int) -> int:
    """Tokens every head keeps; a share is never undercut by rounding."""
    return math.ceil(share * context_tokens - 1e-9)


def compression_ratio(kept: int, context_tokens: int) -> float:
    """The ratio at which kvpress's `int(n * (1 - ratio))` is exactly `kept`."""
    return 0.0 if kept == context_tokens else 1 - (kept + 0.5) / context_tokens


def recording_press(recorded: list[tuple[Any, ...]]) -> Any:
    """A press that keeps everything and remembers, per layer, what kvpress's hook hands to it."""
    import kvpress

    def keep(*layer: Any) -> tuple[Any, Any]:
        recorded.append(layer)
        keys, values = layer[2], layer[3]
        return keys, values

    press = kvpress.BasePress()
    press.compress = keep
    return press


def prefill(model: Any, context_ids: Any, press: Any) -> None:
    """Compute `context_ids` `[1, tokens]`, compressed by `press`."""
    from transformers import DynamicCache

    with press(model):
        model.model(input_ids=context_ids, past_key_values=DynamicCache(), use_cache=True)


def load_model(path: Path) -> Any:
    """The model in float32 with PyTorch's own attention, on one thread."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


def masks(model: Any, ids: Any, shares: Sequence[float], presses: Sequence[str]) -> dict[str, Any]:
    """The presses at all shares of one context."""
    import kvpress

    recorded: list[tuple[Any, ...]] = []
    found = {}
    single = [name for name in presses if name != KVZIP]
    if single:
        prefill(model, ids, recording_press(recorded))
    tokens = int(ids.shape[1])
    for share in shares:
        ratio = compression_ratio(kept_tokens(share, tokens), tokens)
        for name in single:
            torch.manual_seed(0)
            press = getattr(kvpress, name.split()[-1])(compression_ratio=ratio)
            if name == RAGGED:
                press = kvpress.AdaKVPress(press)
            found[f"{name} {share}"] = np.stack([kept(press, layer) for layer in recorded])
    if KVZIP in presses:
        for share, mask in kvzip_masks(model, ids, shares).items():
            found[f"{KVZIP} {share}"] = mask
    return found


def kept(press: Any, layer: tuple[Any, ...]) -> Any:
    """bool `[kv_heads, tokens]`, what a press keeps of one layer."""
    module, keys = layer[0], layer[2]
    module.masked_key_indices = None
    returned = press.compress(*layer)[0][0]
    mask = np.zeros(keys.shape[1:3], bool)
    if module.masked_key_indices is not None:
        return unmasked(module, mask.shape)
    for head, (all_keys, some) in enumerate(zip(keys[0], returned, strict=True)):
        row_of = {row.tobytes(): i for i, row in enumerate(all_keys.numpy())}
        mask[head, [row_of[row.tobytes()] for row in some.contiguous().numpy()]] = True
        assert mask[head].sum() == len(some), "two tokens with one key"
    return mask


def unmasked(module: Any, shape: tuple[int, ...]) -> Any:
    """bool `[kv_heads, tokens]` of what is not masked in a layer; the mask is taken away."""
    mask = np.ones(shape, bool)
    if module.masked_key_indices is not None:
        _, heads, tokens = (np.asarray(index) for index in module.masked_key_indices)
        mask[heads, tokens] = False
    module.masked_key_indices = None
    return mask


def kvzip_masks(model: Any, ids: Any, shares: Sequence[float]) -> dict[float, Any]:
    """KVzip scores once; its own last step is repeated for every share."""
    from kvpress import KVzipPress

    tokens = int(ids.shape[1])
    layers = [layer.self_attn for layer in model.model.layers]
    shape = (model.config.num_key_value_heads, tokens)
    found: dict[float, Any] = {}

    class EveryShare(KVzipPress):  # type: ignore[misc]
        def compress_post(self, model: Any) -> None:
            for share in shares:
                self.compression_ratio = 1 - share
                super().compress_post(model)
                found[share] = np.stack([unmasked(layer, shape) for layer in layers])

    prefill(model, ids, EveryShare(compression_ratio=0.5))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("contexts", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--shares", default="0.5,0.25,0.1", help="shares kept")
    parser.add_argument("--presses", nargs="+", choices=EVERY, default=EVERY)
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    shares = [float(text) for text in options.shares.split(",")]
    model = load_model(options.model)
    for line in options.contexts.read_text().splitlines():
        context = json.loads(line)
        file = options.folder / f"{context['name']}.npz"
        if not file.exists():
            found = masks(model, torch.tensor([context["ids"]]), shares, options.presses)
            part = file.with_suffix(".part.npz")
            packed: Any = {name: np.packbits(mask) for name, mask in found.items()}
            np.savez(part, **packed)
            part.rename(file)
            print(context["name"], flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
