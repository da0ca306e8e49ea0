"""The kernel contract, second part: what selecting and merging entries ask of a backend.

Callers do not hold such a backend: they have tensors, in the engine, in the tier's service, in
calibration and in benchmarks. So they call the functions of `scores`, `prediction` and `merging`,
which ask `registry.selection_kernels` for the one of the tensors' device.

Layout: heads first, `[heads, tokens, dim]`, except where a prefill's tokens come first. Stateless:
any thread, any stream. On CUDA nothing may wait for the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvtier_kernels.bins import Bins


class Stretch(NamedTuple):
    """Neighbouring windows of one width: the rows [begin, end), a whole number of windows."""

    begin: int
    end: int
    width: int


class SelectionKernels(ABC):
    """One backend of the contract in this module's docstring. Arguments have been checked."""

    @abstractmethod
    def window_mass(
        self, q: torch.Tensor, k: torch.Tensor, stretches: Sequence[Stretch], scale: float
    ) -> torch.Tensor:
        """Non-causal attention that each token draws from its window, averaged over its group.

        q: `[tokens, heads, group, dim]`; k: `[tokens, heads, dim]`; stretches: in order, covering
        every token once. Returns float32 `[heads, tokens]`.
        """

    @abstractmethod
    def predicted_logits(
        self, q_window: torch.Tensor, keys: torch.Tensor, scale: float, offset: torch.Tensor
    ) -> torch.Tensor:
        """Log-sum-exp over the window of each query's logits and its offset.

        q_window: `[w, heads, group, dim]`; keys: `[heads, tokens, dim]`; offset: float32
        `[heads, group, w]`, natural log. Returns float32 `[heads, group, tokens]`, natural log.
        """

    @abstractmethod
    def window_lse(self, q_window: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
        """Log-sum-exp of each query of the window over all keys.

        q_window, keys: as above. Returns float32 `[w, heads, group]`, natural log.
        """

    @abstractmethod
    def find_homes(
        self,
        keys: torch.Tensor,
        dropped: torch.Tensor,
        homes: torch.Tensor,
        lengths: torch.Tensor,
        floor: float,
        target: torch.Tensor,
    ) -> None:
        """Write where each dropped entry goes: the kept one whose key is most like its own.

        keys:    `[heads, tokens, dim]`
        dropped: `[heads, n]` int64, indices of entries that are not kept
        homes:   `[heads, count, dim]`, the kept keys; lengths: `[heads, count]` float32, theirs;
                 where it is not finite, a key is not of numbers and takes no entry in
        floor:   an entry is UNMERGED unless its cosine is above this; 1 merges nothing
        target:  `[heads, tokens]` int64, of which the dropped entries' places are written: a
                 position in homes, the first of equal ones, or UNMERGED
        """

    @abstractmethod
    def bins(self, target: torch.Tensor, count: int) -> Bins:
        """Sums over the entries that share a target: see `Bins`."""

    def select(self, scores: torch.Tensor, count: int) -> torch.Tensor:
        """The `count` highest of every head in order of position.

        scores: `[heads, tokens]`. Returns int64 `[heads, count]`.
        """
        return torch.topk(scores, count, dim=-1, sorted=False).indices.sort(dim=-1).values
