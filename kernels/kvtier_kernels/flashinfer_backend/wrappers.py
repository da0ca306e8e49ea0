"""FlashInfer's wrappers, lent to plans.

A wrapper owns 8 MiB on the device and as much pinned memory, and is planned on the host, once for
every plan of a step. It belongs to one plan for as long as that
lives, then to another.

    plan of step n     plan() ── copy ── run ── run ── ...       of its layers
    plan of step n+1                                   plan() ── copy ── ...
                                                       └ waits for the copy of step n: the host
                                                         writes into the pinned memory it reads

What runs lies in stream order behind what ran: all work of one `Wrappers` is on one stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import flashinfer
import torch

from kvtier_kernels.flashinfer_backend.variant import jit_args

# Room for the parts of split KV; what SGLang gives FlashInfer.
WORKSPACE_BYTES = 384 << 20


class Kind(NamedTuple):
    """paged: over entries of the pool, else over new tokens, causally.
    votes: the types (query, KV) and head dimension that the variant is compiled for, or None."""

    paged: bool
    votes: tuple[torch.dtype, torch.dtype, int] | None = None


# A wrapper of FlashInfer's, from its kind and the workspace that all of them share.
Make = Callable[[Kind, torch.Tensor], Any]


def make_wrapper(kind: Kind, workspace: torch.Tensor) -> Any:
    """Entries are read by FA2, which splits long lists among the processors and knows variants;
    new tokens by what FlashInfer holds best for the device (FA3 on Hopper)."""
    if not kind.paged:
        return flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="auto")
    args = None if kind.votes is None else jit_args(*kind.votes)
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace, "NHD", backend="fa2", jit_args=args
    )


@dataclass
class Wrapper:
    """One wrapper, and the last copy that its planning made."""

    kind: Kind
    inner: Any
    copied: torch.cuda.Event | None = None

    def plan(self, **arguments: Any) -> None:
        """Plan anew; waits for the last plan's copy, which is long done but for a full stream."""
        if self.copied is not None:
            self.copied.synchronize()
        self.inner.plan(**arguments)
        if torch.cuda.is_available():
            self.copied = torch.cuda.current_stream().record_event()


class Wrappers:
    """The wrappers of one device. They may be given back from any thread (plans are collected)."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._free: dict[Kind, list[Wrapper]] = {}
        self._workspace: torch.Tensor | None = None

    def lend(self, kind: Kind, device: torch.device) -> Wrapper:
        free = self._free.setdefault(kind, [])
        if free:
            return free.pop()
        if self._workspace is None:
            self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return Wrapper(kind, self._make(kind, self._workspace))

    def give_back(self, lent: dict[Any, Wrapper]) -> None:
        """Take back the wrappers of a plan that is gone, among the free ones of their kinds. lent:
        the wrappers by any key."""
        for wrapper in lent.values():
            self._free[wrapper.kind].append(wrapper)
