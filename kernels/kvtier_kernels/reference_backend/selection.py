"""Selection and merging in PyTorch, on any device: a block of tokens at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier_kernels.bins import Bins
from kvtier_kernels.blocks import blocks
from kvtier_kernels.reference_backend.homes import Homes
from kvtier_kernels.selection import Stretch


class ReferenceSelection(Homes):
    """See the module docstring."""

    def window_mass(
        self, q: torch.Tensor, k: torch.Tensor, stretches: Sequence[Stretch], scale: float
    ) -> torch.Tensor:
        mass = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
        for begin, end, width in stretches:
            rows = slice(begin, end)
            mass[:, rows] = _equal_windows(q[rows], k[rows], scale, width)
        return mass

    def predicted_logits(
        self, q_window: torch.Tensor, keys: torch.Tensor, scale: float, offset: torch.Tensor
    ) -> torch.Tensor:
        window, heads, group, _ = q_window.shape
        out = torch.empty(heads, group, keys.shape[1], dtype=torch.float32, device=keys.device)
        for part in blocks(keys.shape[1], heads * group * window):
            logits = _logits(q_window, keys[:, part], scale)
            out[..., part] = torch.logsumexp(logits + offset.unsqueeze(-1), dim=2)
        return out

    def window_lse(self, q_window: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
        window, heads, group, _ = q_window.shape
        total = torch.full((heads, group, window), float("-inf"), device=keys.device)
        for part in blocks(keys.shape[1], heads * group * window):
            logits = _logits(q_window, keys[:, part], scale)
            total = torch.logaddexp(total, torch.logsumexp(logits, dim=-1))
        return total.permute(2, 0, 1)

    def bins(self, target: torch.Tensor, count: int) -> Bins:
        return Bins(target, count)


def _equal_windows(q: torch.Tensor, k: torch.Tensor, scale: float, width: int) -> torch.Tensor:
    """`window_mass` of tokens that fill their windows of `width` exactly."""
    tokens, heads, group, dim = q.shape
    windows = tokens // width
    out = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    for part in blocks(windows, heads * group * width * width):
        count = part.stop - part.start
        rows = slice(part.start * width, part.stop * width)
        keys = k[rows].view(count, width, heads, dim).permute(0, 2, 3, 1)
        queries = q[rows].view(count, width, heads, group, dim).permute(0, 2, 3, 1, 4)
        logits = queries.reshape(count, heads, group * width, dim) @ keys
        weights = torch.softmax(logits.float() * scale, dim=-1)
        # [windows, heads, width] -> [heads, windows * width]
        out[:, rows] = (weights.sum(-2) / group).transpose(0, 1).reshape(heads, -1)
    return out


def _logits(q_window: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """`[heads, group, w, tokens]` in float32."""
    window, heads, group, dim = q_window.shape
    rows = (q_window.float() * scale).permute(1, 2, 0, 3).reshape(heads, group * window, dim)
    logits = torch.bmm(rows, keys.float().transpose(1, 2))
    return logits.view(heads, group, window, -1)


__all__ = ["ReferenceSelection"]
