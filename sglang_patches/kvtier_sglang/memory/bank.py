"""The prefix memories that a server has loaded, on its device, layer by layer.

    memory 0 | entries | kept KV |  memory 1 | entries | kept KV |      one `MemoryLayer` a layer
    request ──> index of its memory, -1 for none

A memory that is dropped answers the requests that it has; new ones do not get it. Its room is given
back when the cache is flushed, which SGLang does when no request is there.
Scheduler thread only (the forward pass runs in it).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from kvtier.errors import UsageError
from kvtier.heads.reference.rotation import KeyRotation
from kvtier.memory.storage import IN_MODEL_DTYPE, PrefixMemory
from kvtier_kernels.memory.base import PLACE_WIDTH, MemoryLayer

logger = logging.getLogger(__name__)

NONE = -1


class MemoryBank:
    """See the module docstring.

    rotations: per layer, how its queries are rotated; None where they are not.
    heads: the KV heads that this rank has; total: adds up what ranks have.
    memory_of: returns the memory that a request was matched behind; None for none.
    """

    def __init__(
        self,
        rotations: Sequence[KeyRotation | None],
        *,
        dtype: torch.dtype,
        device: torch.device,
        heads: range,
        total: Callable[[torch.Tensor], torch.Tensor],
        memory_of: Callable[[str], PrefixMemory | None],
    ) -> None:
        self.rotations = rotations
        self.total = total
        self.memory_of = memory_of
        self.counters: Counter[str] = Counter()
        self._dtype, self._device, self._heads = dtype, device, heads
        self._held: list[PrefixMemory] = []
        self._retired: set[str] = set()
        # True once the weights are others than memories were built from.
        self.is_outdated = False
        # True once CUDA graphs read what is loaded.
        self.is_recorded = False
        self.layers: list[MemoryLayer] = []

    def __len__(self) -> int:
        return len(self._held)

    # -- memories --

    def load(self, memory: PrefixMemory) -> None:
        """Raises UsageError for one that is loaded already, for a second one of its prefix, or
        after the weights have changed."""
        self.check_loads()
        for one in self.served():
            if one.prefix_ids == memory.prefix_ids:
                raise UsageError("memory", "a prefix that no other memory has", memory.digest)
        known = [one for one in self._held if one.digest == memory.digest]
        self._retired.discard(memory.digest)
        if not known:
            self._held.append(memory)
            self._stack()

    def check_loads(self) -> None:
        """Raises UsageError where none can be loaded."""
        if self.is_outdated:
            raise UsageError("memory", "the weights that memories are built from", "others")
        if self.is_recorded:
            raise UsageError("memory", "no CUDA graphs, which remember those before", "some")

    def drop(self, digest: str) -> None:
        """Raises UsageError for one that is not loaded."""
        if digest not in {one.digest for one in self.served()}:
            raise UsageError("memory", "one that is loaded", digest)
        self._retired.add(digest)

    def weights_change(self) -> None:
        """Retire the loaded memories, which were built from the weights before: no further request
        gets them, and none is loaded any more."""
        self.is_outdated = True
        for one in self.served():
            self.drop(one.digest)
            logger.warning(
                "the weights change: prefix memory %s, which was built from those before, answers "
                "no further request",
                one.digest,
            )

    def cache_flushed(self) -> None:
        """No request is there, running or waiting: what was dropped is given back."""
        if self._retired:
            self._held, self._retired = self.served(), set()
            self._stack()

    def served(self) -> list[PrefixMemory]:
        """Return the memories that new requests get."""
        return [one for one in self._held if one.digest not in self._retired]

    def _stack(self) -> None:
        if self._device.type == "cuda":
            # A pass that reads what is replaced may be under way in another stream.
            torch.cuda.synchronize(self._device)
        mine = [memory.of_heads(self._heads).layers for memory in self._held]
        self.layers = [
            stacked(layers, self._dtype, self._device) for layers in zip(*mine, strict=True)
        ]

    def report(self) -> dict[str, Any]:
        """Return the loaded memories, their bytes and the counters, for the server's internal
        state."""
        return {
            "loaded": [
                {"digest": one.digest, "prefix_tokens": len(one.prefix_ids)}
                for one in self.served()
            ],
            "bytes": sum(x.numel() * x.element_size() for layer in self.layers for x in layer),
            **self.counters,
        }

    # -- requests --

    def of_prompt(self, ids: Sequence[int]) -> PrefixMemory | None:
        """The longest prefix that a prompt begins with, and has a token behind."""
        found = None
        for memory in self.served():
            length = len(memory.prefix_ids)
            longer = found is None or length > len(found.prefix_ids)
            if longer and len(ids) > length and tuple(ids[:length]) == memory.prefix_ids:
                found = memory
        return found

    def named(self, digest: str) -> PrefixMemory | None:
        """A memory that requests are answered from; None where it was dropped."""
        return next((one for one in self.served() if one.digest == digest), None)

    def index_of(self, rid: str) -> int:
        """Return where a request's memory is in the layers; NONE for none."""
        memory = self.memory_of(rid)
        if memory is None:
            return NONE
        return [one.digest for one in self._held].index(memory.digest)


def stacked(layers: Sequence[MemoryLayer], dtype: torch.dtype, device: torch.device) -> MemoryLayer:
    """The same layer of several memories, N = 1 each, as one; narrower lookups are padded with
    directions that no query has."""
    width = max(layer.projection.shape[1] for layer in layers)
    tensors = {}
    for name in MemoryLayer._fields:
        parts = [getattr(layer, name) for layer in layers]
        if name == "projection":
            parts = [pad(x, (0, 0, 0, 0, 0, 0, 0, width - x.shape[1])) for x in parts]
        elif name == "keys":
            # Their places come last.
            both = [x.split([x.shape[1] - PLACE_WIDTH, PLACE_WIDTH], 1) for x in parts]
            parts = [torch.cat([pad(x, (0, width - x.shape[1])), at], 1) for x, at in both]
        elif name in ("key_indptr", "kept_indptr"):
            # The bounds of parts that lie behind one another, from their own.
            counts = torch.cat([bounds.diff() for bounds in parts])
            parts = [pad(counts.cumsum(0), (1, 0)).int()]
        tensors[name] = torch.cat(parts).to(device, dtype if name in IN_MODEL_DTYPE else None)
    return MemoryLayer(**tensors)
