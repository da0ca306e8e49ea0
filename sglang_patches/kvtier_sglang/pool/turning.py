"""Keys at other positions: rotated by as much as they move, which is all that a position is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier.heads.reference.rotation import KeyRotation
from kvtier_kernels.fp8 import narrowed, put, take, widened
from kvtier_kernels.scores import turn
from kvtier_sglang.pool.kv_pool import HeadPagedKVPool


class KeyTurner:
    """Turns keys of a pool. rotations: per layer, how its keys are rotated; None: not at all."""

    def __init__(self, pool: HeadPagedKVPool, rotations: Sequence[KeyRotation | None]) -> None:
        self._pool, self._rotations = pool, rotations

    def slots(self, slots: torch.Tensor, shift: int) -> None:
        """Turn the keys in these slots, int64 `[tokens]`, to where tokens stand that are so many
        positions further on."""
        for index, (k, _) in enumerate(self._pool.kv):
            keys = take(k, 0, slots)
            put(k, slots, self._of_layer(index, keys.flatten(0, 1), shift).view(keys.shape))

    def entries(self, keys: torch.Tensor, counts: Sequence[int], shift: int) -> torch.Tensor:
        """The same of keys `[entries, dim]`, of which the pool's columns have so many each."""
        heads = self._pool.head_num
        sizes = [sum(counts[at : at + heads]) for at in range(0, len(counts), heads)]
        layers = torch.split(keys, sizes)
        return torch.cat([self._of_layer(*layer, shift) for layer in enumerate(layers)])

    def _of_layer(self, index: int, keys: torch.Tensor, shift: int) -> torch.Tensor:
        rotation = self._rotations[index]
        if rotation is None or not shift:
            return keys
        by = rotation.at(torch.tensor([abs(shift)], device=keys.device))
        return narrowed(turn(widened(keys)[None], by, back=shift < 0)[0], keys.dtype)
