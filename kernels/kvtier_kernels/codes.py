"""Coded pages: more entries of one KV head in a page's memory, at a few bits a number.

    a page of keys      codes [entries, dim * bits / 8]   bytes, see `_packed`
                        scale [dim], offset [dim]         float16, of every channel over the entries
    a page of values    codes [entries, dim * bits / 8]
                        scale [entries, groups], offset [entries, groups]
                                                          float16, of an entry's `dim / groups`

A number is offset + scale * code. Keys and values are rotated first (`rotated`), so that no channel
stands out; queries are rotated as keys are, which leaves products as they were, and what values
weigh is rotated back. A page is as large as one of `PAGE_CELLS` entries of two bytes a number; of a
pool with larger ones the rest of it is not used.

What matters of a key's error is what queries see of it. Where their second moment is known, the
error of each number is passed on to the numbers after it, so that queries see least of the sum
(`feedback`).

Sources: KIVI (arXiv 2402.02750) for channels of keys and tokens of values, QuaRot (arXiv
2404.00456) for the rotation, GPTQ (arXiv 2210.17323) for the feedback, there of weights.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from kvtier_kernels.lists import PAGE_CELLS

# The number of bits of a word that hold the number of entries of its coded page.
CODED_ENTRY_BITS = 6
# The bit planes of a code, keyed by its number of bits, low bits first: each plane is packed by
# itself. GROUP is how many numbers of a value share a scale.
PLANES = {8: (8,), 4: (4,), 3: (2, 1)}
GROUP = {8: 64, 4: 64, 3: 32}
# Every channel's energy is raised by this share of the mean energy of the queries.
DAMPING = 0.1
# Channels of a key whose errors are passed on to the others at once.
ROUNDED_AT_ONCE = 16
_STORED_BYTES = 2
_SCALE_BYTES = 2 * torch.float16.itemsize


class CodedShape(NamedTuple):
    """The layout of a coded page.

    bits:    of a code
    dim:     numbers of a key or value
    entries: that a page holds, at most
    groups:  of an entry's values, with a scale each
    """

    bits: int
    dim: int
    entries: int
    groups: int

    @property
    def entry_bytes(self) -> int:
        """The bytes of one key's codes, or of one value's."""
        return self.dim * self.bits // 8

    @property
    def side_bytes(self) -> int:
        """The bytes of a page's keys with their scales, or of its values with theirs, whichever is
        more."""
        scales = max(self.dim, self.entries * self.groups)
        return self.entries * self.entry_bytes + _SCALE_BYTES * scales


@cache
def coded_shape(bits: int, dim: int) -> CodedShape:
    """The layout that holds most entries. Raises ValueError where there is none."""
    if bits not in PLANES:
        raise ValueError(f"bits: expected one of {', '.join(map(str, PLANES))}, got {bits}")
    if dim % 8 or dim < 8:
        raise ValueError(f"dim: expected a multiple of 8, got {dim}")
    groups = max(1, dim // GROUP[bits])
    page, codes = PAGE_CELLS * dim * _STORED_BYTES, dim * bits // 8
    by_keys = (page - _SCALE_BYTES * dim) // codes
    by_values = page // (codes + _SCALE_BYTES * groups)
    most = (1 << CODED_ENTRY_BITS) - 1
    return CodedShape(bits, dim, min(by_keys, by_values, most), groups)


@cache
def rotation(dim: int, device: torch.device) -> torch.Tensor:
    """Float32 `[dim, dim]`, its own inverse: a Hadamard matrix of the largest power of two that
    divides `dim`, once for each such part of a head."""
    part = dim & -dim
    matrix = torch.ones(1, 1, device="cpu")
    while len(matrix) < part:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    every = torch.kron(torch.eye(dim // part, device="cpu"), matrix / part**0.5)
    return every.to(device)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x `[..., dim]` rotated, in its dtype; twice is x again."""
    return (x.float() @ rotation(x.shape[-1], x.device)).to(x.dtype)


def feedback(queries: torch.Tensor) -> torch.Tensor:
    """Return the weights by which the later numbers of a key (columns) make up for the error of a
    number (row): float32 `[..., dim, dim]`, of rotated keys, ones on the diagonal and zeros below.

    queries: `[..., dim, dim]`, the mean of q qᵀ over a KV head's queries, not rotated
    """
    turn = rotation(queries.shape[-1], queries.device).double()
    seen = turn @ queries.double() @ turn
    mean = seen.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-12)[..., None, None]
    seen = seen + DAMPING * mean * torch.eye(len(turn), dtype=seen.dtype, device=seen.device)
    upper: torch.Tensor = torch.linalg.cholesky(torch.linalg.inv(seen), upper=True)
    return (upper / upper.diagonal(dim1=-2, dim2=-1)[..., None]).float()


def encode(
    k: torch.Tensor,
    v: torch.Tensor,
    counts: torch.Tensor,
    bits: int,
    fed_back: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of entries as coded pages: uint8 `[pages, side_bytes]` each.

    k, v:     `[pages, entries, dim]`, not rotated; what is behind a page's count does not matter
    counts:   `[pages]`, entries of each page, at least 1
    fed_back: `feedback` of some heads, `[heads, dim, dim]`, and whose each page is, int64
              `[pages]`; None: each number is rounded by itself
    """
    shape = coded_shape(bits, k.shape[-1])
    there = (torch.arange(shape.entries, device=k.device) < counts[:, None])[:, :, None]
    keys, values = rotated(k.float()), rotated(v.float()).view(*v.shape[:2], shape.groups, -1)
    least = torch.where(there, keys, torch.inf).amin(1, keepdim=True)
    most = torch.where(there, keys, -torch.inf).amax(1, keepdim=True)
    of_keys = _coded(keys, least, most, there, shape, fed_back)
    of_values = _coded(
        values, values.amin(-1, keepdim=True), values.amax(-1, keepdim=True), there[..., None],
        shape,
    )  # fmt: skip
    return of_keys, of_values


def _coded(
    x: torch.Tensor,
    least: torch.Tensor,
    most: torch.Tensor,
    there: torch.Tensor,
    shape: CodedShape,
    fed_back: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """One side's pages. x: [pages, entries, ...]. least, most: of the numbers that share a scale.
    there: which entries there are. fed_back: see `encode`; of keys."""
    levels = (1 << shape.bits) - 1
    offset = least.half().float()
    # The scale is rounded up, so that the largest number has a code.
    scale = ((most - offset) / levels * (1 + 2**-10)).clamp_min(0).half().float()
    step = scale.clamp_min(2**-24)
    if fed_back is None:
        codes = ((x - offset) / step).round().clamp(0, levels)
    else:
        codes = _rounded_in_turn(x, offset, step, levels, *fed_back)
    codes = torch.where(there, codes, 0).to(torch.uint8).flatten(2)
    scales = torch.stack([scale, offset], 1).half().flatten(1).view(torch.uint8)
    page = torch.cat([_packed(codes, shape).flatten(1), scales], 1)
    return torch.nn.functional.pad(page, (0, shape.side_bytes - page.shape[1]))


def _rounded_in_turn(
    x: torch.Tensor,
    offset: torch.Tensor,
    step: torch.Tensor,
    levels: int,
    passed_on: torch.Tensor,
    head: torch.Tensor,
) -> torch.Tensor:
    """Codes of keys [pages, entries, dim], a channel at a time: what one loses, later ones make up
    for, those of its block at once, the others when the block ends. offset, step: [pages, 1, dim].
    passed_on, head: see `encode`."""
    dim = x.shape[-1]
    left, codes = x.transpose(1, 2).contiguous(), x.new_empty(len(x), dim, x.shape[1])
    offset, step = offset.transpose(1, 2), step.transpose(1, 2)
    for begin in range(0, dim, ROUNDED_AT_ONCE):
        stop = min(begin + ROUNDED_AT_ONCE, dim)
        rows = passed_on[head, begin:stop, begin:]
        for channel in range(begin, stop):
            number, code, least = left[:, channel], codes[:, channel], offset[:, channel]
            torch.sub(number, least, out=code).div_(step[:, channel]).round_().clamp_(0, levels)
            number.sub_(least).addcmul_(code, step[:, channel], value=-1)
            row = rows[:, channel - begin, channel + 1 - begin : stop - begin, None]
            left[:, channel + 1 : stop].baddbmm_(row, number[:, None], alpha=-1)
        lost = left[:, begin:stop]
        left[:, stop:].baddbmm_(rows[:, :, stop - begin :].transpose(1, 2), lost, alpha=-1)
    return codes.transpose(1, 2)


def _packed(codes: torch.Tensor, shape: CodedShape) -> torch.Tensor:
    """uint8 [..., dim] below 2**bits -> [..., entry_bytes]: plane by plane. In a plane of `width`
    bits number j is in byte j % n, bits j // n * width and on, where n is the plane's bytes."""
    planes, shift = [], 0
    for width in PLANES[shape.bits]:
        plane = (codes >> shift) & ((1 << width) - 1)
        parts = plane.view(*plane.shape[:-1], 8 // width, -1).unbind(-2)
        packed = parts[0]
        for place, part in enumerate(parts[1:], 1):
            packed = packed | part << place * width
        planes.append(packed)
        shift += width
    return torch.cat(planes, -1)


def _unpacked(packed: torch.Tensor, shape: CodedShape) -> torch.Tensor:
    """The codes again."""
    codes, shift, begin = None, 0, 0
    for width in PLANES[shape.bits]:
        stop = begin + shape.dim * width // 8
        plane = packed[..., begin:stop]
        mask = (1 << width) - 1
        parts = [plane >> place * width & mask for place in range(8 // width)]
        mine = torch.cat(parts, -1) << shift
        codes = mine if codes is None else codes | mine
        shift, begin = shift + width, stop
    assert codes is not None, "no planes"
    return codes


def decode(
    k: torch.Tensor, v: torch.Tensor, shape: CodedShape, *, rotate: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 `[pages, entries, dim]` each, of coded pages as `encode` gives them; what is behind a
    page's count means nothing. rotate: back to what they were before they were coded."""
    keys = _decoded(k, shape, 1, shape.dim).flatten(2)
    values = _decoded(v, shape, shape.entries, shape.groups).flatten(2)
    return (rotated(keys), rotated(values)) if rotate else (keys, values)


def decoded_entries(
    sides: tuple[torch.Tensor, torch.Tensor],
    words: torch.Tensor,
    shape: CodedShape,
    *,
    rotate: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 `[entries, dim]` each, of the coded pages that these words name, in their order.

    sides: keys and values of all pages, uint8 `[pages, bytes]`. words: int64. rotate: see `decode`.
    """
    page, count = words >> CODED_ENTRY_BITS, words & ((1 << CODED_ENTRY_BITS) - 1)
    k, v = decode(sides[0][page], sides[1][page], shape, rotate=rotate)
    there = torch.arange(shape.entries, device=words.device) < count[:, None]
    return k[there], v[there]


def recoded(
    k: torch.Tensor, v: torch.Tensor, bits: int, fed_back: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[heads, tokens, dim]` as their codes have them, each head's tokens in pages
    in this order. fed_back: `feedback` of these heads; None: each number is rounded by itself."""
    heads, tokens, dim = k.shape
    if not tokens:
        return k, v
    shape = coded_shape(bits, dim)
    pages = -(-tokens // shape.entries)
    filled = [torch.nn.functional.pad(x, (0, 0, 0, pages * shape.entries - tokens)) for x in (k, v)]
    counts = torch.full((pages,), shape.entries, device=k.device)
    counts[-1] = tokens - (pages - 1) * shape.entries
    keys, values = (x.reshape(heads * pages, shape.entries, dim) for x in filled)
    head = torch.arange(heads, device=k.device).repeat_interleave(pages)
    passed_on = None if fed_back is None else (fed_back, head)
    coded = encode(keys, values, counts.repeat(heads), bits, passed_on)
    every = decode(*coded, shape)
    found = [x.reshape(heads, -1, dim)[:, :tokens].to(k.dtype) for x in every]
    return found[0], found[1]


def _decoded(page: torch.Tensor, shape: CodedShape, rows: int, width: int) -> torch.Tensor:
    """float32 [pages, entries, width, dim / width]. rows, width: of its scales."""
    stop = shape.entries * shape.entry_bytes
    packed = page[:, :stop].reshape(len(page), shape.entries, shape.entry_bytes)
    codes = _unpacked(packed, shape).float()
    codes = codes.view(len(page), shape.entries, width, shape.dim // width)
    stored = page[:, stop : stop + rows * width * _SCALE_BYTES].contiguous().view(torch.float16)
    scale, offset = stored.float().view(len(page), 2, rows, width, 1).unbind(1)
    return offset + scale * codes
