"""Long contexts in blocks, so that intermediate results stay small beside the context itself."""

from __future__ import annotations

from collections.abc import Iterator

import torch

# Floats of one block of intermediate results (64 MiB).
_BLOCK_FLOATS = 16 << 20
# Tokens of a matrix product of their own in `long_product`.
_CHUNK_TOKENS = 2048


def blocks(tokens: int, floats_per_token: int) -> Iterator[slice]:
    """Slices of `tokens` whose intermediate results fit a block; at least one token each."""
    step = max(1, _BLOCK_FLOATS // max(1, floats_per_token))
    for start in range(0, tokens, step):
        yield slice(start, min(start + step, tokens))


def long_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a `[heads, rows, tokens]` @ b `[heads, tokens, columns]`: float64 `[heads, rows, columns]`.

    For few heads, rows and columns and many tokens: their chunks are products of their own, which
    keeps all of a GPU busy where one product per head would not, and only sums of chunks are in
    float64, which no consumer GPU multiplies well.
    """
    whole = b.shape[1] // _CHUNK_TOKENS * _CHUNK_TOKENS
    out = (a[..., whole:] @ b[:, whole:]).double()
    if whole:
        heads, rows, columns = out.shape
        left = a[..., :whole].reshape(heads, rows, -1, _CHUNK_TOKENS).transpose(1, 2)
        right = b[:, :whole].reshape(heads, -1, _CHUNK_TOKENS, columns)
        out += (left @ right).sum(1, dtype=torch.float64)
    return out
