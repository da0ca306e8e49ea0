"""The prefixes that this server has computed and holds no more, as hashes: they were evicted or
dropped.

    evicted node      [ 130 ...... 192 ....... 256 ... 270 | answer ... 300 ]
    remembered                      x           x       x                x

Each border is a hash of all tokens up to there. There is one at whole multiples of GRAIN, at the
last token but one of the turn's prompt (as far as the same prompt is looked up), and at the node's
end. A request whose prompt has one of them beyond what is cached was computed here up to that
place. Where it leaves what was evicted, the tokens behind the last border count as new, fewer than
GRAIN.

Nothing is looked up of a prompt that is cached, and nothing is hashed before the first eviction.
Extra keys and cache salts go into the hashes, which are of this process alone.

All of it runs in the scheduler's thread only.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from sglang.srt.mem_cache.radix_cache import RadixKey

from kvtier_sglang.radix.index import prefix_hashes, tokens_of
from kvtier_sglang.radix.node import KvNode

GRAIN = 64
# So many borders are about 20 MB of hashes, of 16 million tokens: several times the contexts that a
# GPU's pool holds. It would take a pool as many times as large to hit older ones.
MOST_BORDERS = 1 << 18


class Record(NamedTuple):
    """A node that is gone: why, the session that it was of, and where the prompt of its turn
    ended."""

    reason: str
    session: str | None
    prompt_stop: int


class Gone:
    """The borders of nodes that are gone, see the module docstring. most_borders: the most of all
    nodes together; the oldest nodes are forgotten."""

    def __init__(self, most_borders: int = MOST_BORDERS) -> None:
        self._known: dict[int, Record] = {}
        # The oldest one comes first.
        self._nodes: deque[tuple[Record, list[int]]] = deque()
        self._most, self._borders = most_borders, 0

    def __len__(self) -> int:
        """Return the number of borders that are remembered."""
        return self._borders

    def add(self, node: KvNode, reason: str) -> None:
        """Remember a node of the tree that is gone, and still names its parent."""
        hashes = prefix_hashes(tokens_of(node.key), node.start, hash_up_to(node.parent, node.key))
        node.prefix_hash = int(hashes[-1])
        borders: list[int] = hashes[-(node.start + 1) % GRAIN :: GRAIN].tolist()
        for stop in (node.prompt_stop - 1, node.stop):
            if node.start < stop <= node.stop and stop % GRAIN:
                borders.append(int(hashes[stop - node.start - 1]))
        record = Record(reason, node.session, node.prompt_stop)
        self._known.update(dict.fromkeys(borders, record))
        self._nodes.append((record, borders))
        self._borders += len(borders)
        while self._borders > self._most:
            oldest, hashes_of_it = self._nodes.popleft()
            self._borders -= len(hashes_of_it)
            for one in hashes_of_it:
                # A border that was evicted again since is a newer record's.
                if self._known.get(one) is oldest:
                    del self._known[one]

    def reach(self, key: RadixKey, held: KvNode, begin: int) -> tuple[int, Record | None]:
        """Return how many leading tokens of a key were computed here, if more than `begin`, and the
        record of the node that had the last of them; else `begin` and None. held: a node that the
        key goes through, and that ends at `begin` or before."""
        if not self._known or begin >= len(key):
            return begin, None
        tokens = tokens_of(key)[held.stop :]
        found = prefix_hashes(tokens, held.stop, hash_up_to(held, key))
        hashes: list[int] = found[begin - held.stop :].tolist()
        for behind in range(len(hashes), 0, -1):
            record = self._known.get(hashes[behind - 1])
            if record is not None:
                return begin + behind, record
        return begin, None


def hash_up_to(node: KvNode, key: RadixKey) -> int:
    """Return the hash of all tokens up to a node's end, which the nodes of its path remember. key:
    any key of the same namespace."""
    unknown = []
    while node.parent is not None and node.prefix_hash is None:
        unknown.append(node)
        node = node.parent
    space = hash((key.extra_key, key.cache_salt)) % (1 << 64)
    value = space if node.parent is None else node.prefix_hash
    assert value is not None, "a node that was hashed"
    for one in reversed(unknown):
        value = one.prefix_hash = int(prefix_hashes(tokens_of(one.key), one.start, value)[-1])
    return value
