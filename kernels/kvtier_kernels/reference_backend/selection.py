"""Selection and merging in PyTorch, on any device: a block of tokens at a time.

Homes of dropped entries are found by matrix products of a tile of entries and homes at a time. Only
the largest of a tile is looked for; which home that was is computed again for the tile that won,
because a maximum with its place takes twice as long as the product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn.functional import normalize

from kvtier_kernels.bins import UNMERGED, Bins
from kvtier_kernels.blocks import blocks
from kvtier_kernels.selection import SelectionKernels, Stretch

# The numbers of a tile of similarities that stays in a CPU's cache (4 MiB), and its homes.
_TILE_FLOATS, _TILE_HOMES = 1 << 20, 1024


class ReferenceSelection(SelectionKernels):
    """See the module docstring. `find_homes` asks tensors for values, so on a GPU it waits."""

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

    def find_homes(
        self,
        keys: torch.Tensor,
        dropped: torch.Tensor,
        homes: torch.Tensor,
        lengths: torch.Tensor,
        floor: float,
        target: torch.Tensor,
    ) -> None:
        heads, count, _ = homes.shape
        directions = _unit(homes).transpose(1, 2)
        tiles = list(_tiles(count, ~lengths.isfinite()))
        best = torch.full(dropped.shape, float("-inf"), device=keys.device)
        winner = torch.zeros_like(dropped)
        step = max(1, _TILE_FLOATS // (heads * min(count, _TILE_HOMES)))
        for start in range(0, dropped.shape[1], step):
            part = slice(start, start + step)
            own = _unit(torch.take_along_dim(keys, dropped[:, part, None], 1))
            for number, (tile, shut) in enumerate(tiles):
                top = _similarity(own, directions[..., tile], shut).amax(-1)
                better = top > best[:, part]
                best[:, part] = torch.where(better, top, best[:, part])
                winner[:, part].masked_fill_(better, number)
        # Rounding must not lift equal keys above a floor of 1.
        merges = best.clamp(max=1) > floor
        home = torch.full_like(dropped, UNMERGED)
        for number, (tile, shut) in enumerate(tiles):
            for head in range(heads):
                (mine,) = (merges[head] & (winner[head] == number)).nonzero(as_tuple=True)
                closed_here = None if shut is None else shut[head]
                for some in torch.split(mine, _TILE_FLOATS // _TILE_HOMES):
                    own = _unit(keys[head, dropped[head, some]])
                    alike = _similarity(own, directions[head, :, tile], closed_here)
                    home[head, some] = alike.argmax(-1) + tile.start
        target.scatter_(1, dropped, home)

    def bins(self, target: torch.Tensor, count: int) -> Bins:
        return Bins(target, count)


def _tiles(count: int, closed: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor | None]]:
    """Stretches of homes, and which of them are closed where any are."""
    for start in range(0, count, _TILE_HOMES):
        tile = slice(start, min(start + _TILE_HOMES, count))
        shut = closed[:, tile]
        yield tile, shut if bool(shut.any()) else None


def _similarity(
    own: torch.Tensor, directions: torch.Tensor, closed: torch.Tensor | None
) -> torch.Tensor:
    """Cosines `[..., entries, homes]`, -inf at closed homes `[..., homes]`."""
    alike = own @ directions
    return alike if closed is None else alike.masked_fill_(closed.unsqueeze(-2), float("-inf"))


def _unit(x: torch.Tensor) -> torch.Tensor:
    return normalize(x.float(), dim=-1)


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
