"""Attention to earlier copies: one forward over random tokens said several times (RazorAttention).

repetition      0             1             2 (here)
token        | A  B  C  D | A  B  C  D | A  b  C  D |    the query is the small b
echo               B            B                        its earlier identical copies
induction             C            C                     the tokens right behind those copies
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvtier.errors import UsageError
from kvtier.heads.model.config import shape_of
from kvtier.heads.probes.watching import read
from kvtier.heads.profile import Matrix
from kvtier.heads.progress import Progress, no_progress
from kvtier.reading import read_json


class RepeatMasses(NamedTuple):
    """Attention mass per query head, `[layers][heads]` in [0, 1]: mean over the tokens of all
    repetitions but the first, each summed over its earlier copies."""

    echo: Matrix
    induction: Matrix


def repeat_masses(
    model: Any, base: Sequence[int], repeats: int, progress: Progress = no_progress
) -> RepeatMasses:
    """Run `base`, different tokens, `repeats` times over and see where each head looks.

    Raises UnsupportedModelError when the model's heads cannot be split.
    """
    shape, period, total = shape_of(model), len(base), repeats * len(base)
    sums = torch.zeros(
        2, shape.num_layers, shape.num_kv_heads, shape.group_size, dtype=torch.float64
    )
    nothing = torch.zeros(
        shape.num_kv_heads, 0, shape.head_dim, dtype=model.dtype, device=model.device
    )

    def watch(layer: int, head: int, asking: slice, weights: Tensor) -> None:
        if not layer and not head:
            progress("repeated random tokens", asking.start, total)
        rows = torch.arange(asking.start, asking.stop, device=weights.device)
        for distance in range(period, asking.stop, period):
            # Earlier rows have no copy this far back.
            copies = rows[rows >= distance] - distance
            theirs = weights[:, -len(copies) :]
            for behind in (0, 1):
                at = (copies + behind).expand(len(theirs), -1).unsqueeze(-1)
                sums[behind, layer, head] += theirs.gather(2, at).double().sum((1, 2)).cpu()

    read(model, [(nothing, nothing)] * shape.num_layers, list(base) * repeats, watch)
    progress("repeated random tokens", total, total)
    echo, induction = (sums / (total - period)).flatten(2).tolist()
    return RepeatMasses(tuple(map(tuple, echo)), tuple(map(tuple, induction)))


def plain_tokens(model: Any) -> list[int]:
    """Ids of the model's vocabulary that stand for text, ascending.

    Special tokens are those of the configuration and, where the model's directory has a
    tokenizer.json, the added tokens marked special in it; ids beyond its vocabulary are padding.
    """
    config = model.config.get_text_config()
    marked = [getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
    special = {i for ids in marked for i in (ids if isinstance(ids, list) else [ids])}
    known = set(range(config.vocab_size))
    document = _tokenizer_document(model.name_or_path)
    if vocab := document.get("model", {}).get("vocab"):
        known &= set(vocab.values()) if isinstance(vocab, dict) else set(range(len(vocab)))
    added = document.get("added_tokens", [])
    return sorted(known - special - {token["id"] for token in added if token.get("special")})


def _tokenizer_document(model_path: str) -> dict[str, Any]:
    try:
        return read_json(Path(model_path) / "tokenizer.json", "--model-path", finite=False)
    except UsageError:
        return {}
