"""The head-split KV pool: one slot space per head class.

Per layer the KV heads fall into two classes, context-anchored (CA) and locality. Each class
has its own buffers and its own slots; how many heads a class has may differ per layer, from
none to all, and the slot of a token is the same in every layer.

    CA slot space        [0 .. ca_size]        slot 0 is SGLang's padding slot
    locality slot space  [0 .. locality_size]  slot 0 likewise

SGLang knows CA slots only. `KVWriteLoc.swa_loc`, which carries "the other pool's slot" for
sliding-window models, carries the locality slot here.

Physical layout on a CPU is [heads, slots, dim], which streams 3-7 times faster through
matrix products than [slots, heads, dim] (measured at 128k x 4 heads x 32); so it is where heads
have pages of their own. Else accelerators use [slots, heads, dim]. Callers always see
[slots, heads, dim].

An fp8 cache holds bytes, as SGLang's own pools do, in stored units (kvtier_kernels.fp8).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.memory_pool import KVCache, KVWriteLoc, unwrap_write_loc

from kvtier.errors import StartupError
from kvtier.heads.profile import HeadProfile
from kvtier.pool_sizing import SlotBytes, packed_bytes, score_bytes, vote_bytes
from kvtier.retention.shares import PAGE
from kvtier_kernels import AttentionKernels, HeadMap, RaggedKV
from kvtier_kernels.fp8 import put, raw, take
from kvtier_sglang.pool.packed import Cells, PackedSpans
from kvtier_sglang.pool.scales import KvScales


class ClassBuffers(NamedTuple):
    """One head class of one layer.

    head_map: which of the layer's KV heads.
    k, v:     [slots, heads, dim] views, whatever the physical layout, to compute with.
    """

    head_map: HeadMap
    k: torch.Tensor
    v: torch.Tensor

    @property
    def sides(self) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v to move entries in: the same memory, of fp8 its bytes."""
        return raw(self.k), raw(self.v)

    @property
    def heads(self) -> tuple[int, ...]:
        """Ascending KV head indices of the class."""
        return self.head_map.heads

    @property
    def head_ids(self) -> torch.Tensor:
        """[heads] int64, the same where the buffers are."""
        return self.head_map.ids

    def select(self, x: torch.Tensor) -> torch.Tensor:
        """This class's heads of x [tokens, all KV heads, ...]; a view where they are adjacent."""
        return self.head_map.select(x)


class HeadSplitKVPool(KVCache):
    """Buffers of both classes for all layers of one rank.

    Owns the memory and the slot tables that attention reads; the allocator writes the tables.

    locality_of: [ca_size + 1] int64, the locality slot of a CA slot, 0 where it has none.
    settled:     [ca_size + 1] bool, whether the CA slot's turn has ended and was compressed.
    log_votes:   [locality_size + 1] float32, 0 for a token, ln N for a compensation entry.
    scales:      what its numbers stand for; those of the model, once it is known.

    What selection will want to know of a CA slot, written during prefill (with a `state_width`):

    state:       per layer [CA heads * state_width, ca_size + 1] float32, what the token scorer
                 observed of the token; 0 for a generated token. None where all tokens are kept.
    nll:         [ca_size + 1] float32, how surprising the token after it was, nats; NaN where it
                 was not asked.

    What entries stand for that tokens were merged into, where `merges`:

    ca_votes:    per layer [ca_size + 1, CA heads, group] float32, log-votes. None without merging.
    ca_voted:    [ca_size + 1] float32, 1 where any layer has votes.

    packed:      spans of which heads keep different numbers of entries, where `packs`; else None.
                 With `compensates`, entries of theirs may stand for several tokens.
    """

    def __init__(
        self,
        ca_size: int,
        locality_size: int,
        *,
        profile: HeadProfile,
        dtype: torch.dtype,
        device: str,
        start_layer: int,
        page_size: int = 1,
        state_width: int | None = None,
        merges: bool = False,
        packs: bool = False,
        compensates: bool = False,
    ) -> None:
        shape = profile.shape
        super().__init__(
            ca_size,
            page_size,
            dtype,
            shape.num_layers,
            device,
            False,
            start_layer,
            start_layer + shape.num_layers - 1,
        )
        self.profile = profile
        self.scales = KvScales([None] * shape.num_layers)
        self.locality_size = locality_size
        self.head_num = shape.num_kv_heads
        self.head_dim = shape.head_dim
        self.v_head_dim = shape.head_dim
        # Where heads keep different numbers of entries, a head's entries lie in pages of its own.
        by_head = packs or device == "cpu"
        self.ca, cells = self._buffers(ca_size, profile.ca_heads, by_head=by_head)
        every = range(shape.num_layers)
        self.locality, locality_cells = self._buffers(
            locality_size, [profile.locality_heads(layer) for layer in every], by_head=by_head
        )
        self._cells = cells, locality_cells
        self.packed: PackedSpans | None = None
        if packs:
            column_cells = cells.k.shape[0] // cells.bases.numel()
            slots = ca_size + page_size
            votes = shape.group_size if merges else int(compensates)
            self.packed = PackedSpans(slots, cells, column_cells, votes)
        self.locality_of = torch.zeros(ca_size + 1, dtype=torch.int64, device=device)
        self.settled = torch.zeros(ca_size + 1, dtype=torch.bool, device=device)
        self.log_votes = torch.zeros(locality_size + 1, dtype=torch.float32, device=device)
        self.state: list[torch.Tensor] | None = None
        self.state_width = state_width
        self.nll = torch.empty(0)
        if state_width is not None:
            rows = [len(layer) * state_width for layer in profile.ca_heads]
            # In one piece, so that forgetting is one operation.
            self._every_state = torch.zeros((sum(rows), ca_size + 1), device=device)
            self.state = list(torch.split(self._every_state, rows))
            self.nll = torch.full((ca_size + 1,), torch.nan, device=device)
        self.group = shape.group_size
        self.ca_votes: list[torch.Tensor] | None = None
        self.ca_voted = torch.empty(0, device=device)
        if merges and not packs:
            self.ca_votes = [
                torch.zeros((ca_size + 1, len(heads), self.group), device=device)
                for heads in profile.ca_heads
            ]
            self.ca_voted = torch.zeros(ca_size + 1, dtype=torch.float32, device=device)
        self._finalize_allocation_log(ca_size)

    def _buffers(
        self, size: int, layers: Sequence[tuple[int, ...]], *, by_head: bool
    ) -> tuple[list[ClassBuffers], Cells]:
        """The buffers of one class, layer by layer, and their memory as cells.

        layers: the class's heads of each layer.
        """
        dim, every = self.head_dim, sum(map(len, layers))
        # Pages of a head begin at multiples of their size, wherever its cells begin.
        slots = -(-(size + self.page_size) // PAGE) * PAGE
        sides = [
            torch.zeros((every * slots, dim), dtype=self.store_dtype, device=self.device).view(
                self.dtype
            )
            for _ in range(2)
        ]
        buffers: list[ClassBuffers] = []
        bases: list[int] = []
        strides: list[int] = []
        for heads in layers:
            count, first = len(heads), len(bases)
            views = [side[first * slots : (first + count) * slots] for side in sides]
            if by_head:
                views = [view.view(count, slots, dim).transpose(0, 1) for view in views]
                bases += [(first + head) * slots for head in range(count)]
                strides += [1] * count
            else:
                views = [view.view(slots, count, dim) for view in views]
                bases += [first * slots + head for head in range(count)]
                strides += [count] * count
            index = torch.tensor(heads, dtype=torch.int64, device=self.device)
            buffers.append(ClassBuffers(HeadMap(heads, index), views[0], views[1]))
        return buffers, Cells(sides[0], sides[1], bases, strides)

    @property
    def layers(self) -> range:
        """The model's layers that are here."""
        return range(self.start_layer, self.start_layer + self.layer_num)

    @property
    def splits_heads(self) -> bool:
        """Whether any head is a locality head."""
        return any(buffers.heads for buffers in self.locality)

    @property
    def slot_bytes(self) -> SlotBytes:
        """Bytes one slot of each class occupies over all layers, from the real buffers."""
        width = self.state_width
        scores = 0 if width is None else score_bytes(self.profile, width)
        if self.ca_votes is not None:
            scores += vote_bytes(self.profile)
        if self.packed is not None:
            scores += packed_bytes(self.profile, self.packed.votes)
        return SlotBytes(
            ca=_bytes_per_slot(self.ca) + scores, locality=_bytes_per_slot(self.locality)
        )

    def get_kv_size_bytes(self) -> tuple[int, int]:
        every = [*self.ca, *self.locality]
        k = sum(b.k.numel() * b.k.element_size() for b in every)
        v = sum(b.v.numel() * b.v.element_size() for b in every)
        return k, v

    def store(
        self,
        kernels: AttentionKernels,
        index: int,
        at: KVWriteLoc,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """Store new tokens k, v [tokens, KV heads, dim] of the pool's `index`-th layer in both
        classes. at: their CA slots and, where the layer has locality heads, those as well."""
        ca_slots, locality_slots, _ = unwrap_write_loc(at)
        for buffers, slots in (
            (self.ca[index], ca_slots),
            (self.locality[index], locality_slots),
        ):
            if buffers.heads:
                assert slots is not None, "locality slots were not resolved for this batch"
                kernels.store(k, v, RaggedKV(buffers.k, buffers.v), slots, buffers.head_map)

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy what CA slots hold, and their locality slots, to others: SGLang puts drafts that
        were accepted where their positions are."""
        images = self.locality_of[tgt_loc], self.locality_of[src_loc]
        every = slice(None)
        for cells, (target, source) in zip(self._cells, ((tgt_loc, src_loc), images), strict=True):
            into, held = cells.of(every, target), cells.of(every, source)
            for side in (raw(cells.k), raw(cells.v)):
                # The right-hand side is a copy, so overlapping slots are no danger.
                side[into] = side[held]

    def compensate(self, dropped: torch.Tensor, into: int) -> None:
        """Write the compensation entry of `dropped` locality slots into slot `into`.

        k = mean(k), v = mean(v) per layer and head (RazorAttention), weighted by votes so that
        entries can be folded again; votes add up. `into` may be one of the dropped slots.
        """
        votes = self.log_votes[dropped].exp()
        total = votes.sum()
        weights = (votes / total).unsqueeze(0)
        to = dropped.new_full((1,), into)
        for buffers in self.locality:
            # Head by head, so that the gather stays small for a 128k span.
            for head in range(len(buffers.heads)):
                for side in (buffers.k, buffers.v):
                    column = side[:, head]
                    put(column, to, weights @ take(column, 0, dropped).float())
        self.log_votes[into] = total.log()

    def forget_scores(self, ca_slots: torch.Tensor) -> None:
        """Slots handed out anew know nothing of the tokens they will hold."""
        if self.state is not None:
            self.nll.index_fill_(0, ca_slots, torch.nan)
            self._every_state.index_fill_(1, ca_slots, 0.0)

    def set_votes(self, index: int, ca_slots: torch.Tensor, log_votes: torch.Tensor) -> None:
        """Votes of entries in the pool's `index`-th layer: `[slots, CA heads, group]`."""
        assert self.ca_votes is not None, "a pool without votes"
        self.ca_votes[index][ca_slots] = log_votes.float()
        self.ca_voted.index_fill_(0, ca_slots, 1.0)

    def mask(self, ca_slots: torch.Tensor) -> None:
        """Entries that stand for nothing yet: no query sees them in any layer."""
        assert self.ca_votes is not None, "a pool without votes"
        for votes in self.ca_votes:
            votes.index_fill_(0, ca_slots, float("-inf"))
        self.ca_voted.index_fill_(0, ca_slots, 1.0)

    def forget_votes(self, ca_slots: torch.Tensor) -> None:
        """Slots on their way back to the free list stand for one token each again."""
        if self.ca_votes is not None:
            self.ca_voted.index_fill_(0, ca_slots, 0.0)
            for votes in self.ca_votes:
                votes.index_fill_(0, ca_slots, 0.0)

    # SGLang's single-buffer accessors have no meaning for two slot spaces.

    def set_kv_buffer(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a head-split pool has no single KV buffer; use .store")

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        raise RuntimeError("a head-split pool has no single key buffer; use .ca and .locality")

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        raise RuntimeError("a head-split pool has no single value buffer; use .ca and .locality")

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        raise RuntimeError("a head-split pool has no single KV buffer; use .ca and .locality")


def head_split_pool(model_runner: Any) -> HeadSplitKVPool:
    """A model runner's pool. Raises StartupError for one that is not kvtier's."""
    pool = model_runner.token_to_kv_pool
    if not isinstance(pool, HeadSplitKVPool):
        raise StartupError(
            f"attention backend kvtier: expected a HeadSplitKVPool, got "
            f"{type(pool).__name__}; the pool hook did not take"
        )
    return pool


def _bytes_per_slot(layers: list[ClassBuffers]) -> int:
    return sum(len(b.heads) * (b.k.shape[-1] + b.v.shape[-1]) * b.k.element_size() for b in layers)


__all__ = ["ClassBuffers", "HeadSplitKVPool", "head_split_pool"]
