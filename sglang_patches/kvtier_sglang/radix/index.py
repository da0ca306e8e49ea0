"""Runs of a request's tokens that the tree holds behind other tokens: what stood behind a text that
was edited, moved, or taken out.

    in the tree    [ system | clock 9:41 | turn 1 | turn 2 | turn 3           ]
    a request      [ system | clock 9:57 | turn 1 | note   | turn 3 | turn 4  ]
                                         └─ run ─┘          └ run ─┘

A window of tokens is known by its hash, wherever it stands: a hash by which one window in SAMPLED
is remembered picks the same ones of both. What it finds is compared token by token and extended to
both sides. Requests find only what is in their own namespace: the same extra key and cache salt.

Scheduler thread only.
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
# A power of two.
SAMPLED = 32
# Of those that begin alike, so many are compared, the newest ones.
MOST_COMPARED = 4
# Of the hashes that are remembered, by so many of their bits, whether there may be one: most of a
# request's are not looked at further.
FILTER_BITS = 20
_BASE, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(32)

Tokens = NDArray[np.int64]
Namespace = tuple[str | None, str | None]


class Run(NamedTuple):
    """Tokens [begin, stop) of a request that end a path of the tree, or stand within it.

    node: the last of that path's nodes that has some of them
    shift: how much further on they stand in the request
    """

    begin: int
    stop: int
    node: KvNode
    shift: int


class TokenIndex:
    """Where windows of tokens stand in a tree, or stood. most_tokens: of all nodes; the newest ones
    are remembered then, and of nodes that say the same the newest."""

    def __init__(self, most_tokens: float = math.inf) -> None:
        # By namespace and hash: a node in which a window ends, and the position where it begins.
        self._places: dict[Namespace, dict[int, list[tuple[KvNode, int]]]] = defaultdict(dict)
        # By its id, in the order in which they came: a node, and its windows' hashes.
        self._nodes: dict[int, tuple[KvNode, NDArray[np.uint64]]] = {}
        self._most_tokens, self._tokens = most_tokens, 0
        self._filter = np.zeros(1 << FILTER_BITS, dtype=np.uint32)
        # How often anything changed.
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
        """A node hangs in the tree, or did."""
        self.version += 1
        before = _tokens_before(node, WINDOW - 1)
        tokens = np.concatenate([before, tokens_of(node.key)])
        if tokens.size < WINDOW:
            return
        starts, hashes = sampled(tokens)
        # Of windows that are alike the first: a text may be one token over and over.
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
        """A node hangs there no more, or is about to change."""
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
        """Runs of at least so many of the tokens key[begin:], first to last; none overlap."""
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
    """All tokens up to a node's end."""
    tokens = np.concatenate([_tokens_before(node, node.start), tokens_of(node.key)])
    return RadixKey(
        array("q", tokens.tobytes()), node.key.extra_key, cache_salt=node.key.cache_salt
    )


def _extended(
    tokens: Tokens, begin: int, here: int, node: KvNode, at: int, paths: dict[int, Tokens]
) -> Run:
    """The run around tokens[here:], not before `begin`, that the path of a node has at `at`."""
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
    """int64 `[tokens]`, shared with the key where it has no limit."""
    found: Tokens = np.frombuffer(key.raw_token_ids(), dtype=np.int64)
    return found


def sampled(tokens: Tokens) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Where the windows begin that are remembered, of at least WINDOW tokens, and their hashes."""
    sums = prefix_hashes(tokens)
    _, inverse = _powers(1 << (int(tokens.size).bit_length()))
    windows = np.empty(sums.size - WINDOW + 1, dtype=np.uint64)
    windows[0] = sums[WINDOW - 1]
    np.subtract(sums[WINDOW:], sums[:-WINDOW], out=windows[1:])
    windows *= inverse[: windows.size]
    picked = np.flatnonzero(windows <= np.uint64(((1 << 64) - 1) // SAMPLED))
    return picked, windows[picked]


def prefix_hashes(tokens: Tokens, begin: int = 0, before: int = 0) -> NDArray[np.uint64]:
    """Of each token the hash of all up to it: uint64 `[tokens]`. begin: the position of the first;
    before: the hash of those before it."""
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
    """The powers of the hash's base, and those of its inverse, modulo 2 to the 64th."""
    base, found = int(_BASE), []
    for factor in (base, pow(base, -1, 1 << 64)):
        powers = np.full(count, factor, dtype=np.uint64)
        powers[0] = 1
        found.append(np.multiply.accumulate(powers))
    return found[0], found[1]


def _filtered(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Where the filter has them: by bits that do not say which ones are picked."""
    mixed = (hashes ^ (hashes >> _SHIFT)) & np.uint64((1 << FILTER_BITS) - 1)
    return mixed.view(np.int64)


def _tokens_before(node: KvNode, most: int) -> Tokens:
    """At most so many tokens before a node, of its path."""
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
    """How many of the first tokens are the same."""
    size, begin, stop = min(a.size, b.size), 0, 512
    while begin < size:
        differ = a[begin : min(stop, size)] != b[begin : min(stop, size)]
        if differ.any():
            return begin + int(differ.argmax())
        begin, stop = stop, 2 * stop
    return size


def _namespace(key: RadixKey) -> Namespace:
    return key.extra_key, key.cache_salt


__all__ = ["WINDOW", "Run", "TokenIndex", "path_key", "prefix_hashes", "sampled", "tokens_of"]
