"""The compression of prompts while they are prefilled, so that memory does not wait for the turn's
end, and a prompt may be larger than the pool.

    chunk 0 computed    [ 0 exact ]
    chunk 1 computed    [ 0 exact ][ 1 exact ]             then heads keep their share of chunk 0
    chunk 2 computed    [ 0 kept ][ 1 exact ][ 2 exact ]   computed over what is left of chunk 0

The newest chunk stays exact until the next one is computed, and the last two of a prompt until its
turn ends. What is compressed becomes a node of its own, as a turn would. What is computed over what
heads keep is not exact, so by default only a prompt streams that would not fit otherwise, and only
as far as that needs.

All of it runs in the scheduler's thread only.
"""

from __future__ import annotations

from typing import Any

from kvtier.config import PrefillCompression
from kvtier.pool_sizing import IN_FLIGHT_SHARE
from kvtier.retention.shares import PAGE
from kvtier_sglang.compression.compressor import Compressor
from kvtier_sglang.radix.node import KvNode
from kvtier_sglang.radix.tree import VariantRadixTree
from kvtier_sglang.radix.turn_end import compress_node
from kvtier_sglang.request_options import wants_exact


class Streaming:
    """The streaming of one tree's prompts, see the module docstring.

    when:         the prompts that stream.
    chunk_tokens: the tokens of a prefill pass; None where prompts are not cut.
    """

    def __init__(
        self,
        tree: VariantRadixTree,
        compressor: Compressor,
        when: PrefillCompression,
        chunk_tokens: int | None,
    ) -> None:
        self._tree, self._compressor, self._when = tree, compressor, when
        self._chunk = chunk_tokens or 0
        # The slots of a compressed chunk; all of its slots where only its own text will say.
        self._kept = compressor.chunk_slots(self._chunk) if self._chunk else 0

    @property
    def is_on(self) -> bool:
        """Return whether any prompt may stream."""
        if not self._chunk or self._compressor.selection is None:
            return False
        if self._chunk < self._compressor.rule.window:
            return False
        return self._when == "always" or (self._when == "auto" and self._kept < self._chunk)

    def slots(self, tokens: int) -> int:
        """Return the most slots that so many tokens of a prompt hold while they are prefilled."""
        if not self.is_on or tokens <= 2 * self._chunk:
            return tokens
        kept = -(-(tokens - 2 * self._chunk) // self._chunk)
        return min(2 * self._chunk + PAGE + kept * self._kept, tokens)

    @property
    def most_tokens(self) -> int:
        """The tokens of the longest prompt that an empty pool has room for."""
        size = self._tree.allocator.size
        room = size - 2 * self._chunk - PAGE
        if not self.is_on or room < 0 or self._kept == self._chunk:
            return size
        return max(size, 2 * self._chunk + room // self._kept * self._chunk)

    def admitted_with(self, req: Any, new_tokens: int, wanted: int, chunk: int | None) -> int:
        """Return how many slots a request needs that the pool has no room for with all of its new
        tokens exact; where it has to stream, mark it so. wanted: slots of those and of its answer,
        which it needs unless it streams. chunk: the most tokens of the pass that begins it; None:
        all."""
        if not self.is_on or chunk is None or new_tokens <= chunk or wants_exact(req):
            return wanted
        held = sum(node.num_slots for node in req.last_node.path())
        if self._when == "auto" and wanted < self._tree.allocator.size - held:
            # It waits for those that are in flight.
            return wanted
        req.kvtier_streams = True
        return wanted - new_tokens + self.slots(new_tokens)

    def chunk_ended(self, req: Any, node: KvNode) -> int | None:
        """Compress what is before the newest chunk of a request, which is `node` and which it has
        locked. Returns the position from which on the tokens before that chunk have other slots
        now; None where none has."""
        if not self.is_on or wants_exact(req) or not self._is_needed(req, node):
            return None
        changed, window = None, node.stop - self._compressor.rule.window
        while node.parent is not self._tree.root_node:
            node = node.parent
            # Nobody else reads it.
            if node.compressed or node.lock_ref != 1 or node.stop > window:
                continue
            node = compress_node(self._tree, node, self._compressor.end_chunk)
            self._tree.counters["streamed_chunks"] += 1
            changed = node.start
        return changed

    def _is_needed(self, req: Any, node: KvNode) -> bool:
        """Return whether a request compresses its chunks now. It does not once all is computed but
        for the token that it was answered: a pass may be under way that reads them."""
        left = len(req.full_untruncated_fill_ids) - node.stop
        if left <= 1 or self._when == "always":
            return left > 1
        if not getattr(req, "kvtier_streams", False):
            return False
        in_flight = self._tree.protected_size() + left + req.sampling_params.max_new_tokens
        return bool(in_flight > IN_FLIGHT_SHARE * self._tree.allocator.size)
