"""Plans that CUDA graphs record: made on the device, inside the graph, at the same addresses.

    capture   room(batch size)            before: the plans' memory, kept for as long as the graph
              fill(forward batch)         inside: recorded, with the layers that read the plans
    replay    room(batch size)            before: it is there
              (the graph fills them from the engine's own tables)

Every batch size has plans of its own over slot tables that all share, as one graph replays at a
time. Their size is the most that a batch may hold: 4 bytes x requests x context, per head class.
Used by the forward thread only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvtier_kernels import AttentionKernels
from kvtier_sglang.attention.lists import RequestLists
from kvtier_sglang.pool.kv_pool import HeadSplitKVPool

SLOT_DTYPE = torch.int32


def room_bytes(requests: int, context: int, classes: int) -> int:
    """Bytes of the slot tables for batches of up to so many requests of so many tokens."""
    return classes * requests * context * SLOT_DTYPE.itemsize


class GraphPlans(NamedTuple):
    """Plans of one batch size; locality is None when no layer has locality heads. Over lists there
    are none here: attention/lists.py has them."""

    ca: Any | None
    locality: Any | None


class DecodeGraphs:
    """See the module docstring.

    table: `[requests, tokens]`, the engine's token slots per request. lists: where heads may keep
    different numbers of entries, what requests read instead.
    """

    def __init__(
        self,
        kernels: AttentionKernels,
        pool: HeadSplitKVPool,
        table: torch.Tensor,
        max_requests: int,
        lists: RequestLists | None = None,
    ) -> None:
        self.lists = lists
        self.kernels = kernels
        self.pool = pool
        self.table = table
        classes = 2 if pool.splits_heads else 1
        shape = (classes, max_requests * table.shape[1] if lists is None else 0)
        self._slots = torch.zeros(shape, dtype=SLOT_DTYPE, device=table.device)
        self._plans: dict[int, GraphPlans] = {}

    def room(self, requests: int) -> GraphPlans:
        """The plans of that batch size. Not to be called first while a graph is captured."""
        if self.lists is not None:
            return GraphPlans(None, None)
        if requests not in self._plans:
            ca = self._empty(0, requests, voted=self.pool.ca_votes is not None)
            locality = self._empty(1, requests, voted=True) if self.pool.splits_heads else None
            self._plans[requests] = GraphPlans(ca, locality)
        return self._plans[requests]

    def _empty(self, index: int, requests: int, *, voted: bool) -> Any:
        slots = self._slots[index, : requests * self.table.shape[1]]
        return self.kernels.empty_plan(slots, requests, voted=voted)

    def fill(self, forward_batch: Any) -> Any:
        """Plan a decoding batch anew, asking nothing of the host. Returns the plan over lists,
        where there are any.

        forward_batch: its req_pool_indices and seq_lens (the newest token included), `[requests]`.
        """
        requests = forward_batch.req_pool_indices
        if self.lists is not None:
            newest = forward_batch.out_cache_loc
            return self.lists.recorded(requests, forward_batch.seq_lens, newest)
        plans = self.room(requests.numel())
        images = (None, self.pool.locality_of)
        for plan, image in zip(plans, images, strict=True):
            if plan is not None:
                self.kernels.plan_on_device(
                    self.table,
                    requests,
                    forward_batch.seq_lens,
                    self.table.shape[1],
                    image,
                    into=plan,
                )
        return None


def graph_bytes(configurator: Any, classes: int) -> int:
    """What recording decoding will take on top of what SGLang sets aside for graphs."""
    from sglang.srt.runtime_context import get_exec

    if not str(configurator.device).startswith("cuda"):
        return 0
    decode = get_exec().graph.cuda_graph_config.decode
    if decode.backend == "disabled":
        return 0
    requests = max(decode.bs or [decode.max_bs or 0])
    return room_bytes(requests, configurator.model_config.context_len, classes)


__all__ = ["DecodeGraphs", "GraphPlans", "graph_bytes", "room_bytes"]
