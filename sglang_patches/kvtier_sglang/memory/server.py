"""The prefix memories of one scheduler: opened when its model is there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvtier.memory.storage import PrefixMemory, check_may_be_served, directories, load
from kvtier_kernels import AttentionKernels
from kvtier_sglang.compression.selection import find_rotary
from kvtier_sglang.memory.assigning import assign
from kvtier_sglang.memory.bank import MemoryBank
from kvtier_sglang.memory.passes import MemoryPasses
from kvtier_sglang.memory.requeueing import Requeueing
from kvtier_sglang.pool.kv_pool import HeadSplitKVPool
from kvtier_sglang.ranks import Ranks

logger = logging.getLogger(__name__)


class Memories:
    """See the module docstring."""

    def __init__(self, bank: MemoryBank, passes: MemoryPasses) -> None:
        self.bank = bank
        self.passes = passes
        self._requeueing = Requeueing(bank, passes)

    @classmethod
    def open(
        cls,
        folder: Path,
        runner: Any,
        pool: HeadSplitKVPool,
        kernels: AttentionKernels,
        ranks: Ranks,
        heads: range,
    ) -> Memories:
        """Load a memory's directory, or all that are in one. heads: this rank's, of the model's KV
        heads. Raises MemoryFileError and MemoryMismatchError."""
        bank = MemoryBank(
            find_rotary(runner.model, pool.layers),
            dtype=runner.dtype,
            device=torch.device(runner.device),
            heads=heads,
            total=ranks.total,
        )
        for directory in directories(folder):
            memory = load(directory)
            check_served(memory, runner)
            bank.load(memory)
            logger.info(
                "prefix memory %s: %d tokens, from %s",
                memory.digest,
                len(memory.prefix_ids),
                directory,
            )
        rows = runner.req_to_token_pool.req_to_token.shape[0]
        return cls(bank, MemoryPasses(bank, kernels, rows))

    def scope_request(self, req: Any) -> None:
        """A new request, as SGLang's constructor and kvtier's scopes leave it."""
        assign(self.bank, req)

    def process(
        self, original: Callable[..., None], scheduler: Any, batch: Any, result: Any
    ) -> None:
        """See Requeueing.process."""
        self._requeueing.process(original, scheduler, batch, result)


def check_served(memory: PrefixMemory, runner: Any) -> None:
    """Raises MemoryMismatchError for a memory that this model must not be served with."""
    card = memory.card
    dtype = str(runner.dtype).removeprefix("torch.")
    card.identity.check_serves(runner.server_args.model_path, dtype, memory.prefix_ids)
    check_may_be_served(card)


__all__ = ["Memories", "check_served"]
