"""Attention to earlier copies: one forward over random tokens said several times (RazorAttention).

    repetition      0             1             2 (here)
    token        | A  B  C  D | A  B  C  D | A  b  C  D |    the query is the small b
    echo               B            B                        its earlier identical copies
    induction             C            C                     the tokens right behind those copies

A position's weight is `exp(q·k·scale - lse)`, so only the log-sum-exp of a row is needed besides
the few keys that count.  The log-sum-exp is streamed over blocks of keys, chunk by chunk of
queries; nothing is ever tokens × tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvtier.errors import UsageError
from kvtier.heads.model.config import shape_of
from kvtier.heads.profile import Matrix
from kvtier.heads.progress import Progress, no_progress
from kvtier.heads.reference.attention import attending
from kvtier.heads.reference.session import CHUNK_TOKENS, ClassCache
from kvtier.reading import read_json


class RepeatMasses(NamedTuple):
    """Attention mass per query head, `[layers][heads]` in [0, 1]: mean over the tokens of all
    repetitions but the first, each summed over its earlier copies."""

    echo: Matrix
    induction: Matrix


@dataclass
class _Layer:
    """The state of one layer: its KV, and the sums so far, `[kv_heads, group]` each."""

    cache: ClassCache
    echo: Tensor
    induction: Tensor


@torch.inference_mode()
def repeat_masses(
    model: Any,
    base: Sequence[int],
    repeats: int,
    chunk_tokens: int = CHUNK_TOKENS,
    progress: Progress = no_progress,
) -> RepeatMasses:
    """Run `base`, different tokens, `repeats` times over and see where each head looks.

    Raises UnsupportedModelError when the model's heads cannot be split.
    """
    shape, period = shape_of(model), len(base)
    ids = torch.tensor([list(base) * repeats], device=model.device)
    sums = torch.zeros(shape.num_kv_heads, shape.group_size, dtype=torch.float64)
    heads = tuple(range(shape.num_kv_heads))
    layers = [_Layer(ClassCache(heads), sums, sums) for _ in range(shape.num_layers)]
    first = 0

    def attend_layer(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        seen, rows = layers[layer], q[0].unflatten(0, (k.shape[1], -1))
        state = seen.cache.attend_state(rows, k[0], v[0], scale)
        keys = torch.cat([block.k for block in seen.cache.fresh], dim=1)
        lse = state.lse.view(rows.shape[:3])
        seen.echo = seen.echo + copy_mass(rows, keys, lse, first, period, 0, scale)
        seen.induction = seen.induction + copy_mass(rows, keys, lse, first, period, 1, scale)
        return state.out.reshape(q.shape)

    total = ids.shape[1]
    for first in range(0, total, chunk_tokens):
        progress("repeated random tokens", first, total)
        stop = min(first + chunk_tokens, total)
        positions = torch.arange(first, stop, device=ids.device)[None]
        with attending(model, attend_layer):
            model(ids[:, first:stop], position_ids=positions, use_cache=False, logits_to_keep=1)
    progress("repeated random tokens", total, total)
    count = total - period
    return RepeatMasses(
        echo=tuple(_row(layer.echo / count) for layer in layers),
        induction=tuple(_row(layer.induction / count) for layer in layers),
    )


def copy_mass(
    q: Tensor, keys: Tensor, lse: Tensor, first: int, period: int, behind: int, scale: float
) -> Tensor:
    """Attention mass of the rows on what stands `behind` tokens after their earlier copies.

    q:       `[kv_heads, group, rows, dim]`, the tokens from position `first` on
    keys:    `[kv_heads, tokens, dim]` of all tokens up to the last row
    lse:     `[kv_heads, group, rows]` of those rows over their whole past, natural log
    Returns float64 `[kv_heads, group]` on the CPU, summed over rows and copies.
    """
    stop = first + q.shape[2]
    found = torch.zeros(q.shape[:2], dtype=torch.float64)
    for distance in range(period, stop, period):
        begin = max(first, distance)  # earlier rows have no copy this far back
        rows = slice(begin - first, None)
        copies = keys[:, begin - distance + behind : stop - distance + behind]
        logits = (q[:, :, rows].float() * copies.unsqueeze(1).float()).sum(-1) * scale
        found += torch.exp(logits - lse[:, :, rows]).double().sum(-1).cpu()
    return found


def _row(values: Tensor) -> tuple[float, ...]:
    return tuple(values.flatten().tolist())


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
