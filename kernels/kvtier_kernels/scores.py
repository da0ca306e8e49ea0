"""Scores of a context's entries, from its keys and queries alone.

    leverage        how far a key sticks out of the others:  diag(X (XᵀX)⁻¹ Xᵀ), X centred keys
    difference      how far a key's direction is from the mean direction (KeyDiff)
    window mass     how much attention a key draws when the causal mask is dropped:
                    column sums of softmax(Q Kᵀ / √d) inside windows of neighbouring tokens

Higher = keep. Window mass and the choice of the best are a kernel backend's, the others batched
matrix products where the tensors are; nothing is ever context × context. Sources: Compactor,
§3.2-3.4; Park et al., "KeyDiff", 2025. Stateless.

Layout: heads first, `[heads, tokens, dim]`, because every score is per head over tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import normalize

from kvtier_kernels.blocks import blocks, long_product
from kvtier_kernels.registry import selection_kernels
from kvtier_kernels.selection import Stretch

# Added to the diagonal of a Gram matrix, as shares of its mean: the first that makes it definite.
# float32 products know its smallest eigenvalues no better.
_RIDGES = (1e-6, 1e-4, 1e-2)


class Rotation(NamedTuple):
    """The rotation that keys were given, from which `unrotate` undoes it.

    cos, sin: `[tokens, rotary_dim / 2]`, as they were applied.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False


def leverage_scores(keys: torch.Tensor, rotation: Rotation | None = None) -> torch.Tensor:
    """Statistical leverage of each key among its head's keys, in [0, 1] but for rounding.

    keys:     `[heads, tokens, dim]`; any float dtype
    rotation: how keys were rotated; None for keys before rotation
    Returns float32 `[heads, tokens]`. Directions that no key has (a singular Gram matrix) count
    for nothing; a head with a key that is not of numbers gets NaN. Works in blocks: a few times
    64 MiB beside the keys, however many there are. On CUDA nothing waits for the device.

    The paper sketches the keys to k = 48 columns to save an SVD. The dim x dim Gram matrix needs
    no SVD, and a sketch narrower than the keys loses the order: against the exact scores its rank
    correlation is 0.86 for Gaussian keys of dim 64 and 0.6 for dim 128.
    """
    heads, tokens, dim = keys.shape
    parts = list(blocks(tokens, heads * dim))
    gram = torch.zeros(heads, dim, dim, dtype=torch.float64, device=keys.device)
    total = torch.zeros(heads, 1, dim, dtype=torch.float64, device=keys.device)
    # Centred by what is known after the first block, and by the rest afterwards.
    around = torch.zeros(heads, 1, dim, device=keys.device)
    for part in parts:
        x = _before_rotation(keys, part, rotation)
        if part.start == 0:
            around = x.mean(1, keepdim=True)
        x = x - around
        gram += long_product(x.transpose(1, 2), x)
        total += x.sum(1, keepdim=True)
    mean = total / tokens
    whiten = _whitening(gram - tokens * mean.transpose(1, 2) @ mean)
    scores = torch.empty(heads, tokens, device=keys.device)
    for part in reversed(parts):
        # The last block is still at hand: what fits one is read once.
        if part is not parts[-1]:
            x = _before_rotation(keys, part, rotation) - around
        scores[:, part] = ((x - mean.float()) @ whiten).square_().sum(-1)
    return scores


def key_difference(keys: torch.Tensor, rotation: Rotation | None = None) -> torch.Tensor:
    """−cos(k, mean of the normalised keys) of each head's keys, in [-1, 1] but for rounding.

    keys:     `[heads, tokens, dim]`; any float dtype
    rotation: how keys were rotated, to compare them as they were before; None: as they are
    Returns float32 `[heads, tokens]`. Works in blocks, like `leverage_scores`.
    """
    heads, tokens, dim = keys.shape
    parts = list(blocks(tokens, heads * dim))
    total = torch.zeros(heads, 1, dim, device=keys.device)
    for part in parts:
        directions = normalize(_before_rotation(keys, part, rotation), dim=-1)
        total += directions.sum(1, keepdim=True)
    mean = normalize(total, dim=-1)
    scores = torch.empty(heads, tokens, device=keys.device)
    for part in reversed(parts):
        # The last block is still at hand, as in `leverage_scores`.
        if part is not parts[-1]:
            directions = normalize(_before_rotation(keys, part, rotation), dim=-1)
        scores[:, part] = -(directions * mean).sum(-1)
    return scores


def _before_rotation(keys: torch.Tensor, part: slice, rotation: Rotation | None) -> torch.Tensor:
    """Return a part of the keys before rotation, in float32."""
    if rotation is None:
        return keys[:, part].float()
    cos, sin, interleaved = rotation
    return unrotate(keys[:, part], cos[part], sin[part], interleaved=interleaved)


def _whitening(gram: torch.Tensor) -> torch.Tensor:
    """W with |xW|² = xᵀ (G + ridge)⁻¹ x: float32 `[heads, dim, dim]`, NaN where G is no numbers.

    With G + ridge = L Lᵀ, W is L⁻ᵀ. The host never asks whether a ridge was enough: all are tried,
    and each head takes its first good one.
    """
    dim = gram.shape[-1]
    eye = torch.eye(dim, dtype=gram.dtype, device=gram.device)
    mean = gram.diagonal(dim1=1, dim2=2).mean(-1).clamp_min(torch.finfo(torch.float32).tiny)
    ridges = [share * mean.view(-1, 1, 1) * eye for share in _RIDGES]
    factors, failed = torch.linalg.cholesky_ex(torch.stack([gram + ridge for ridge in ridges]))
    inverses = torch.linalg.solve_triangular(factors, eye.expand_as(factors), upper=False)
    whiten = torch.full_like(gram, torch.nan)
    for inverse, failure in zip(reversed(inverses), reversed(failed), strict=True):
        whiten = torch.where((failure == 0).view(-1, 1, 1), inverse.transpose(1, 2), whiten)
    return whiten.float()


def window_mass(
    q: torch.Tensor,
    k: torch.Tensor,
    q_indptr: Sequence[int],
    q_start: Sequence[int],
    scale: float,
    window_tokens: int,
) -> torch.Tensor:
    """Non-causal attention that each new token draws from its window, averaged over its group.

    q:        `[tokens, heads, group, dim]`, rotated; k: `[tokens, heads, dim]`, rotated.
    q_indptr: request i owns the rows q_indptr[i]:q_indptr[i + 1]
    q_start:  position of each request's first row; windows begin at multiples of `window_tokens`
              in the context, so a prefill cut at such multiples scores as if it were not cut.
    Returns float32 `[heads, tokens]`: a column sum, 1 on average within a window.
    """
    stretches = list(_stretches(q_indptr, q_start, window_tokens))
    return selection_kernels(q.device).window_mass(q, k, stretches, scale)


def select(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` best tokens of every head in order of position: int64 `[heads, count]`.

    scores: `[heads, tokens]`
    """
    return selection_kernels(scores.device).select(scores, count)


def _stretches(
    q_indptr: Sequence[int], q_start: Sequence[int], window_tokens: int
) -> Iterator[Stretch]:
    for index, position in enumerate(q_start):
        begin, end = q_indptr[index], q_indptr[index + 1]
        first = min(begin + -position % window_tokens, end)
        whole = (end - first) // window_tokens * window_tokens
        for start, stop, width in (
            (begin, first, first - begin),
            (first, first + whole, window_tokens),
            (first + whole, end, end - first - whole),
        ):
            if stop > start:
                yield Stretch(start, stop, width)


def unrotate(
    keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """Undo the rotary embedding of cached keys.

    keys:        `[heads, tokens, dim]`, rotated
    cos, sin:    `[tokens, rotary_dim / 2]` as they were applied: a factor that they carry (YaRN's
                 attention scaling) is undone with them
    interleaved: pairs are neighbours (GPT-J) instead of halves (NeoX)
    Returns float32 `[heads, tokens, dim]`; dimensions past rotary_dim are copied.
    """
    keys = keys.float()
    rotary_dim = 2 * cos.shape[-1]
    turned, rest = keys[..., :rotary_dim], keys[..., rotary_dim:]
    norm = cos.float().square() + sin.float().square()
    cos, sin = cos.float() / norm, sin.float() / norm
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        back = torch.stack((a * cos + b * sin, b * cos - a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        back = torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)
    return torch.cat((back, rest), dim=-1)


def turn(keys: torch.Tensor, by: Rotation, *, back: bool = False) -> torch.Tensor:
    """Rotated keys `[heads, tokens, dim]` at other positions, in their dtype. by: of as many
    positions as they move on, or back; a factor that it carries is theirs already."""
    norm = (by.cos.float().square() + by.sin.float().square()).sqrt()
    cos, sin = by.cos.float() / norm, by.sin.float() / norm
    turned = unrotate(keys, cos, sin if back else -sin, interleaved=by.interleaved)
    return turned.to(keys.dtype)
