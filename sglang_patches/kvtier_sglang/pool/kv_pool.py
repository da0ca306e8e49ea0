"""The KV pool: a slot for each token, and pages of one head for what is left of finished turns.

A token has a slot, which is the same in every layer and head: SGLang knows slots only, and slot 0
is its padding slot. The memory of one KV head of one layer, a *column*, lies together, so that
pages of 16 entries of it can be given to whatever head needs them (pool/packed.py). It also streams
3-7 times faster through a CPU's matrix products than [slots, heads, dim] (measured at 128k x 4
heads x 32). `LayerKV` shows it as [slots, heads, dim].

An fp8 cache holds bytes, as SGLang's own pools do, in stored units (kvtier_kernels.fp8).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.memory_pool import KVCache

from kvtier.errors import StartupError
from kvtier.heads.profile import ModelShape
from kvtier.pool_sizing import slot_bytes
from kvtier.retention.shares import PAGE
from kvtier_kernels import CellKV
from kvtier_kernels.fp8 import raw
from kvtier_sglang.pool.packed import Cells, PackedSpans, most_pages
from kvtier_sglang.pool.scales import KvScales


class LayerKV(NamedTuple):
    """One layer: k, v [slots, heads, dim] views, to compute with."""

    k: torch.Tensor
    v: torch.Tensor

    @property
    def sides(self) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v to move entries in: the same memory, of fp8 its bytes."""
        return raw(self.k), raw(self.v)


class HeadPagedKVPool(KVCache):
    """The buffers of all layers of one rank.

    kv:     per layer its views of them.
    scales: what its numbers stand for; those of the model, once it is known.
    packed: spans of which heads keep different numbers of entries, where turns are compressed; else
            None. votes: what an entry of theirs may have, see PackedSpans.

    full_layers: which of the layers attend to everything; the others have a window.

    moved:  rows of requests that have other slots than when their prefill was planned, of which
            attention does not know yet.

    What selection will want to know of a token, written during prefill (with a `state_width`):

    state:  per layer [heads * state_width, size + 1] float32, what the token scorer observed of
            the token; 0 for a generated token. None where all tokens are kept.
    nll:    [size + 1] float32, how surprising the token after it was, nats; NaN where it was not
            asked.
    """

    def __init__(
        self,
        size: int,
        *,
        shape: ModelShape,
        dtype: torch.dtype,
        device: str,
        start_layer: int = 0,
        state_width: int | None = None,
        packs: bool = False,
        votes: int = 0,
        bits: int | None = None,
    ) -> None:
        """shape: of this rank's part of the model. bits: of the codes that turns are compressed to;
        None where entries stay as they are. Raises StartupError for more slots than packed spans
        can name."""
        layers, heads = shape.num_layers, shape.num_kv_heads
        last = start_layer + layers - 1
        super().__init__(size, 1, dtype, layers, device, False, start_layer, last)
        self.shape = shape
        self.scales = KvScales([None] * layers)
        self.head_num, self.group = heads, shape.group_size
        self.head_dim = self.v_head_dim = shape.head_dim
        # Pages of a head begin at multiples of their size, wherever its cells begin.
        slots = -(-(size + 1) // PAGE) * PAGE
        most = most_pages(coded=bits is not None) // (layers * heads) * PAGE
        if packs and slots > most:
            raise StartupError(
                f"--max-total-tokens: expected at most {most - 1} beside a share or a head profile "
                f"(more with more ranks, --tp-size), got {size}"
            )
        cells = layers * heads * slots, shape.head_dim
        k, v = (
            torch.zeros(cells, dtype=self.store_dtype, device=device).view(dtype) for _ in range(2)
        )
        by_layer = (side.view(layers, heads, slots, -1).transpose(1, 2) for side in (k, v))
        self.kv = [LayerKV(*sides) for sides in zip(*by_layer, strict=True)]
        self._cells = Cells(k, v, slots)
        self.packed = PackedSpans(size + 1, self._cells, votes, bits) if packs else None
        self.full_layers: tuple[int, ...] = tuple(range(layers))
        self.moved: set[int] = set()
        self.state: list[torch.Tensor] | None = None
        self.state_width = state_width
        self.nll = torch.empty(0)
        if state_width is not None:
            # In one piece, so that forgetting is one operation.
            rows = heads * state_width
            self._every_state = torch.zeros((layers, rows, size + 1), device=device)
            self.state = list(self._every_state)
            self.nll = torch.full((size + 1,), torch.nan, device=device)
        self._finalize_allocation_log(size)

    @property
    def layers(self) -> range:
        """The model's layers that are here."""
        return range(self.start_layer, self.start_layer + self.layer_num)

    @property
    def slot_bytes(self) -> int:
        """Bytes that one slot occupies over all layers."""
        votes = None if self.packed is None else self.packed.votes
        width = self.state_width
        return slot_bytes(self.shape, self.store_dtype.itemsize, state_width=width, votes=votes)

    @property
    def kept_page(self) -> int:
        """Entries of a page of what heads keep."""
        return PAGE if self.packed is None else self.packed.page

    def held_entries(self, slots: int) -> int:
        """Entries of what heads keep that so many slots hold, of each head on average that keeps
        any."""
        pages = slots // PAGE * self.layer_num // len(self.full_layers)
        return self.kept_page * pages

    def get_kv_size_bytes(self) -> tuple[int, int]:
        k, v = (side.numel() * side.element_size() for side in (self._cells.k, self._cells.v))
        return k, v

    @property
    def cells(self) -> CellKV:
        """All entries, for attention over lists."""
        votes = None if self.packed is None else self.packed.log_votes
        if votes is not None and votes.shape[1] == 1:
            votes = votes[:, 0]
        return CellKV(self._cells.k, self._cells.v, self._cells.column_cells, votes)

    @property
    def coded_cells(self) -> CellKV | None:
        """The same for lists of coded pages; None where nothing is coded."""
        if self.packed is None or self.packed.coded is None:
            return None
        cells = self._cells
        return CellKV(cells.k, cells.v, cells.column_cells, bits=self.packed.coded.bits)

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy what slots hold to others: SGLang puts drafts that were accepted where their
        positions are."""
        for layer in self.kv:
            for side in layer.sides:
                # The right-hand side is a copy, so overlapping slots are no danger.
                side[tgt_loc] = side[src_loc]

    def forget_scores(self, slots: torch.Tensor) -> None:
        """Slots handed out anew know nothing of the tokens they will hold."""
        if self.state is not None:
            self.nll.index_fill_(0, slots, torch.nan)
            self._every_state.index_fill_(2, slots, 0.0)

    # SGLang's single-buffer accessors do not know pages of one head.

    def set_kv_buffer(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("kvtier's pool is written by .store, and read through .kv")

    get_key_buffer = get_value_buffer = get_kv_buffer = set_kv_buffer


def kvtier_pool(model_runner: Any) -> HeadPagedKVPool:
    """A model runner's pool. Raises StartupError for one that is not kvtier's."""
    pool = model_runner.token_to_kv_pool
    if not isinstance(pool, HeadPagedKVPool):
        raise StartupError(
            f"attention backend kvtier: expected a HeadPagedKVPool, got "
            f"{type(pool).__name__}; the pool hook did not take"
        )
    return pool
