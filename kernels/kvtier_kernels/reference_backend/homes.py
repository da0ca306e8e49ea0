"""Homes of dropped entries, found by matrix products of a tile of entries and homes at a time.

Only the largest of a tile is looked for; which home that was is computed again for the tile that
won, because a maximum with its place takes twice as long as the product.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from kvtier_kernels.bins import UNMERGED
from kvtier_kernels.selection import SelectionKernels

# The numbers of a tile of similarities that stays in a CPU's cache (4 MiB), and its homes.
_TILE_FLOATS, _TILE_HOMES = 1 << 20, 1024


class Homes(SelectionKernels):
    """`find_homes` in tiles. It asks tensors for values, so on a GPU it waits."""

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
    return functional.normalize(x.float(), dim=-1)


__all__ = ["Homes"]
