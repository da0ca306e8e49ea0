"""The lookup of the entry of its memory that a token's queries are nearest to."""

from __future__ import annotations

import triton
import triton.language as tl

PI = tl.constexpr(3.141592653589793)
HALF_ROOT = tl.constexpr(0.7071067811865476)


@triton.jit
def cos_and_sin(angle):
    """Return the cosine and the sine of an angle from -pi to pi, by the series of half of it, which
    are short. The library's own functions want memory of the thread's for larger angles than come
    here."""
    half = angle * 0.5
    x = half * half
    cos = 1 - x / 2 * (1 - x / 12 * (1 - x / 30 * (1 - x / 56 * (1 - x / 90 * (1 - x / 132)))))
    sin = half * (1 - x / 6 * (1 - x / 20 * (1 - x / 42 * (1 - x / 72 * (1 - x / 110)))))
    return cos * cos - sin * sin, 2 * sin * cos


@triton.jit
def key_of(x, c, behind, weight, RANK: tl.constexpr, SLOW: tl.constexpr, FAST: tl.constexpr):
    """The key [columns] that `memory.base.lookup_keys` makes of a token.

    x: its RANK projected numbers, and zeros; c: the columns; behind: how far behind the prefix it
    stands; weight: how much that counts.

        columns   0 ... RANK - 1 | RANK      RANK + 1  RANK + 2  RANK + 3 | others
                  x / |x|        | cos slow  sin slow  cos fast  sin fast | 0
    """
    direction = x / tl.maximum(tl.sqrt(tl.sum(x * x, 0)), 1e-12)
    share = tl.minimum(tl.maximum(behind.to(tl.float32) / SLOW, 0.0), 1.0)
    # Nothing is left of whole turns, so that the angle is exact far away, too.
    turn = (behind % (2 * FAST) + 2 * FAST) % (2 * FAST)
    turn = tl.where(turn < FAST, turn, turn - 2 * FAST).to(tl.float32) / FAST
    slow_cos, slow_sin = cos_and_sin(share * PI)
    fast_cos, fast_sin = cos_and_sin(turn * PI)
    place = tl.where(c == RANK, slow_cos, 0.0)
    place = tl.where(c == RANK + 1, slow_sin, place)
    place = tl.where(c == RANK + 2, fast_cos, place)
    place = tl.where(c == RANK + 3, fast_sin, place)
    return (direction + place * (weight * HALF_ROOT)) / tl.sqrt(1.0 + weight * weight)


@triton.jit(do_not_specialize=["stride_x_token"])
def nearest_entry(
    x,
    positions,
    ids,
    keys,
    key_indptr,
    place_weight,
    nearness,
    prefix_tokens,
    entry,
    cosine,
    stride_x_token,
    stride_x_memory,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOW: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """x [tokens, memories, RANK], keys [entries, WIDTH], contiguous -> entry, -1 where none
    answers, and the nearest one's cosine, -inf where there is none.

    Each row of a tile remembers the best that passed it, and where, so that nothing is compared
    across rows before the end. Of equal ones the first wins. Grid (tokens,).
    """
    token = tl.program_id(0).to(tl.int64)
    memory = tl.load(ids + token).to(tl.int64)
    winner, top = -1, float("-inf")
    if memory >= 0:
        c, place = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_E)
        own = tl.load(
            x + token * stride_x_token + memory * stride_x_memory + c, mask=c < RANK, other=0.0
        )
        behind = tl.load(positions + token) - tl.load(prefix_tokens + memory)
        weight = tl.load(place_weight + memory)
        own = key_of(own, c, behind, weight, RANK, SLOW, FAST)
        begin = tl.load(key_indptr + memory)
        count = tl.load(key_indptr + memory + 1) - begin
        keys += begin.to(tl.int64) * WIDTH
        best = tl.full([BLOCK_E], float("-inf"), tl.float32)
        where = tl.zeros([BLOCK_E], tl.int32)
        for first in tl.range(0, count, BLOCK_E, num_stages=3):
            n = first + place
            inside = n < count
            theirs = tl.load(
                keys + n[:, None] * WIDTH + c[None, :],
                mask=inside[:, None] & (c < WIDTH)[None, :],
                other=0.0,
            )
            alike = tl.sum(theirs.to(tl.float32) * own[None, :], 1)
            better = inside & (alike > best)
            best = tl.where(better, alike, best)
            where = tl.where(better, n, where)
        top = tl.max(best, 0)
        near_enough = (count > 0) & (top >= tl.load(nearness + memory))
        nearest = begin + tl.min(tl.where(best == top, where, count), 0)
        winner = tl.where(near_enough, nearest, -1)
    tl.store(entry + token, winner)
    tl.store(cosine + token, top)
