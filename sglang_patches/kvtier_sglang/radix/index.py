"""The runs of a request's tokens that the tree holds behind other tokens: they stood behind a text
that was edited, moved, or taken out.

    in the tree    [ system | clock 9:41 | turn 1 | turn 2 | turn 3           ]
    a request      [ system | clock 9:57 | turn 1 | note   | turn 3 | turn 4  ]
                                         └─ run ─┘          └ run ─┘

A window of tokens is known by its hash, wherever it stands. One window in SAMPLED is remembered;
its hash decides that, so the same ones are picked of the tree and of a request. A window that is
found is compared token by token and extended to both sides. Requests find only what is in their own
namespace: the same extra key and cache salt.

All of it runs in the scheduler's thread only.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvtier_sglang.radix.node import KvNode

WINDOW = 64
# One window in so many is remembered: a power of two.
SAMPLED = 32
# So many places of one hash are compared, the newest ones.
MOST_COMPARED = 4
# A filter tells by so many bits of a hash whether it may be one that is remembered: most of a
# request's hashes are not looked at further.
FILTER_BITS = 20
_BASE, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(32)

Tokens = NDArray[np.int64]
Namespace = tuple[str | None, str | None]


class Run(NamedTuple):
    """The tokens [begin, stop) of a request that end a path of the tree, or stand within it.

    node: the last of that path's nodes that has some of them
    shift: the number of positions that they stand further on in the request
    """

    begin: int
    stop: int
    node: KvNode
    shift: int


class TokenIndex:
    """The places where windows of tokens stand in a tree, or stood. most_tokens: the most of all
    nodes together. With such a limit the newest nodes are remembered, and of nodes that say the
    same the newest alone."""

    def __init__(self, most_tokens: float = math.inf) -> None:
        # The nodes in which windows end, and where they begin, by namespace and hash.
        self._places: dict[Namespace, dict[int, list[tuple[KvNode, int]]]] = defaultdict(dict)
        # Nodes by their ids, in the order in which they came, with their windows' hashes.
        self._nodes: dict[int, tuple[KvNode, NDArray[np.uint64]]] = {}
        self._most_tokens, self._tokens = most_tokens, 0
        self._filter = np.zeros(1 << FILTER_BITS, dtype=np.uint32)
        # It counts the changes so far.
        self.version = 0

    def clear(self) -> None:
        self._places.clear()
        self._nodes.clear()
        self._tokens = 0
        self._filter[:] = 0
        self.version += 1

    def __contains__(self, node: KvNode) -> bool:
        return node.id in self._nodes

    def add(self, node: KvNode) -> None:
        """Remember the windows of a node that hangs in the tree, or did."""
        self.version += 1
        before = _tokens_before(node, WINDOW - 1)
        tokens = np.concatenate([before, tokens_of(node.key)])
        if tokens.size < WINDOW:
            return
        starts, hashes = sampled(tokens)
        # The first of windows that are alike will do: a text may be one token over and over.
        hashes, first_of = np.unique(hashes, return_index=True)
        starts = starts[first_of]
        space, first = _namespace(node.key), node.start - before.size
        places = self._places[space]
        if self._most_tokens < math.inf and hashes.size:
            for one, at in list(places.get(int(hashes[0]), ())):
                if at == first + starts[0] and _say_the_same(one, node):
                    self.remove(one)
            places = self._places[space]
        for start, value in zip(starts.tolist(), hashes.tolist(), strict=True):
            places.setdefault(value, []).append((node, first + start))
        self._nodes[node.id] = node, hashes
        np.add.at(self._filter, _filtered(hashes), 1)
        self._tokens += len(node.key)
        while self._tokens > self._most_tokens:
            self.remove(next(iter(self._nodes.values()))[0])

    def remove(self, node: KvNode) -> None:
        """Forget a node that hangs there no more, or is about to change."""
        self.version += 1
        if node not in self:
            return
        _, hashes = self._nodes.pop(node.id)
        self._tokens -= len(node.key)
        space = _namespace(node.key)
        np.subtract.at(self._filter, _filtered(hashes), 1)
        places = self._places[space]
        for value in hashes.tolist():
            left = [place for place in places.get(value, ()) if place[0] is not node]
            if left:
                places[value] = left
            else:
                places.pop(value, None)
        if not places:
            del self._places[space]

    def runs(self, key: RadixKey, begin: int, least: int) -> list[Run]:
        """Return the runs of at least so many of the tokens key[begin:], first to last; none
        overlap."""
        places = self._places.get(_namespace(key))
        tokens = tokens_of(key)
        if places is None or tokens.size - begin < max(least, WINDOW):
            return []
        starts, hashes = sampled(tokens[begin:])
        likely = np.flatnonzero(self._filter[_filtered(hashes)])
        starts, hashes = starts[likely] + begin, hashes[likely]
        found: list[Run] = []
        # Windows that were looked at in vain: there may be many that are alike.
        vain: set[int] = set()
        paths: dict[int, Tokens] = {}
        for here, value in zip(starts.tolist(), hashes.tolist(), strict=True):
            if here < begin or value in vain or value not in places:
                continue
            candidates = [
                _extended(tokens, begin, here, node, at, paths)
                for node, at in places[value][-MOST_COMPARED:]
            ]
            longest = max(candidates, key=lambda run: (run.stop - run.begin, -run.node.turns))
            if longest.stop - longest.begin >= least:
                found.append(longest)
                begin = longest.stop
            else:
                vain.add(value)
        return found


def _say_the_same(one: KvNode, other: KvNode) -> bool:
    spans = (one.start, one.stop), (other.start, other.stop)
    return spans[0] == spans[1] and path_key(one).match(path_key(other)) == other.stop


def path_key(node: KvNode) -> RadixKey:
    """Return the key of all tokens up to a node's end."""
    tokens = np.concatenate([_tokens_before(node, node.start), tokens_of(node.key)])
    return RadixKey(
        array("q", tokens.tobytes()), node.key.extra_key, cache_salt=node.key.cache_salt
    )


def _extended(
    tokens: Tokens, begin: int, here: int, node: KvNode, at: int, paths: dict[int, Tokens]
) -> Run:
    """Return the run around tokens[here:], not before `begin`, that a node's path has at `at`."""
    if node.id not in paths:
        paths[node.id] = tokens_of(path_key(node))
    path = paths[node.id]
    back = _alike(path[:at][::-1], tokens[begin:here][::-1])
    on = _alike(path[at:], tokens[here:])
    stop, shift = here + on, here - at
    while at + on == node.stop:
        # The path goes on in whichever child has more of it.
        child, more = None, 0
        for one in node.children.values():
            alike = _alike(tokens_of(one.key), tokens[stop:])
            if alike > more:
                child, more = one, alike
        if child is None:
            break
        node, on, stop = child, on + more, stop + more
    return Run(here - back, stop, node, shift)


def tokens_of(key: RadixKey) -> Tokens:
    """Return a key's tokens, int64 `[tokens]`, shared with the key where it has no limit."""
    found: Tokens = np.frombuffer(key.raw_token_ids(), dtype=np.int64)
    return found


def sampled(tokens: Tokens) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return where the windows that are remembered begin, and their hashes. tokens: at least WINDOW
    of them."""
    sums = prefix_hashes(tokens)
    _, inverse = _powers(1 << (int(tokens.size).bit_length()))
    windows = np.empty(sums.size - WINDOW + 1, dtype=np.uint64)
    windows[0] = sums[WINDOW - 1]
    np.subtract(sums[WINDOW:], sums[:-WINDOW], out=windows[1:])
    windows *= inverse[: windows.size]
    picked = np.flatnonzero(windows <= np.uint64(((1 << 64) - 1) // SAMPLED))
    return picked, windows[picked]


def prefix_hashes(tokens: Tokens, begin: int = 0, before: int = 0) -> NDArray[np.uint64]:
    """Return for each token the hash of all up to it: uint64 `[tokens]`. begin: the position of the
    first; before: the hash of those before it."""
    powers, _ = _powers(1 << (int(begin + tokens.size).bit_length()))
    # A token 0 counts, too.
    mixed = tokens.view(np.uint64) + np.uint64(1)
    mixed *= _MIX
    mixed ^= mixed >> _SHIFT
    mixed *= powers[begin : begin + mixed.size]
    np.cumsum(mixed, out=mixed)
    mixed += np.uint64(before)
    return mixed


@lru_cache(maxsize=32)
def _powers(count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the powers of the hash's base, and those of its inverse, modulo 2 to the 64th."""
    base, found = int(_BASE), []
    for factor in (base, pow(base, -1, 1 << 64)):
        powers = np.full(count, factor, dtype=np.uint64)
        powers[0] = 1
        found.append(np.multiply.accumulate(powers))
    return found[0], found[1]


def _filtered(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the places of hashes in the filter, by bits that do not decide which windows are
    remembered."""
    mixed = (hashes ^ (hashes >> _SHIFT)) & np.uint64((1 << FILTER_BITS) - 1)
    return mixed.view(np.int64)


def _tokens_before(node: KvNode, most: int) -> Tokens:
    """Return the newest tokens of a node's path before it, at most so many."""
    parts: list[Tokens] = []
    for one in _above(node):
        if most <= 0:
            break
        tokens = tokens_of(one.key)
        parts.append(tokens[max(0, tokens.size - most) :])
        most -= parts[-1].size
    return np.concatenate([np.empty(0, np.int64), *reversed(parts)])


def _above(node: KvNode) -> Iterator[KvNode]:
    path = node.path()
    next(path)
    return path


def _alike(a: Tokens, b: Tokens) -> int:
    """Return how many of the first tokens are the same."""
    size, begin, stop = min(a.size, b.size), 0, 512
    while begin < size:
        differ = a[begin : min(stop, size)] != b[begin : min(stop, size)]
        if differ.any():
            return begin + int(differ.argmax())
        begin, stop = stop, 2 * stop
    return size


def _namespace(key: RadixKey) -> Namespace:
    return key.extra_key, key.cache_salt
