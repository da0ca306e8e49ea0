"""Where a tensor is not zero."""

from __future__ import annotations

import torch


def positions_of(x: torch.Tensor) -> torch.Tensor:
    """Ascending indices `[found]` int64 at which x `[n]` is not zero, on its device.

    On a CPU NumPy finds them, which takes it less time than PyTorch.
    """
    if x.device.type == "cpu":
        mask = x if x.dtype == torch.bool else x != 0
        return torch.from_numpy(mask.numpy().nonzero()[0])
    return torch.nonzero(x).flatten()


__all__ = ["positions_of"]
