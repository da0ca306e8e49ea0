"""The prefix memories of one scheduler: opened when its model is there, read again when asked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvtier.heads.profile import ModelShape
from kvtier.heads.reference.rotation import KeyRotation
from kvtier.memory.card import Identity
from kvtier.memory.storage import PrefixMemory, check_may_be_served
from kvtier_kernels import AttentionKernels
from kvtier_sglang.memory.bank import MemoryBank
from kvtier_sglang.memory.passes import MemoryPasses
from kvtier_sglang.memory.requeueing import Requeueing
from kvtier_sglang.memory.source import MemorySource
from kvtier_sglang.metrics import MemoryMetrics, name_in_metrics

logger = logging.getLogger(__name__)


class Memories:
    """See the module docstring."""

    def __init__(
        self,
        source: MemorySource,
        runner: Any,
        rotations: Sequence[KeyRotation | None],
        kernels: AttentionKernels,
        shape: ModelShape,
        memory_of: Callable[[str], PrefixMemory | None],
    ) -> None:
        """Load what was at its source at the start. rotations: of the runner's layers; shape: of
        the whole model; memory_of: see MemoryBank. Raises MemoryFileError and
        MemoryMismatchError."""
        self._source, ranks = source, source.ranks
        self.bank = MemoryBank(
            rotations,
            dtype=runner.dtype,
            device=torch.device(runner.device),
            heads=shape.kv_heads_of_rank(ranks.rank, ranks.size),
            total=ranks.total,
            memory_of=memory_of,
        )
        args, metrics = runner.server_args, None
        # The model that serves, behind whatever prefix.
        self._served = Identity.of(args.model_path, str(runner.dtype).removeprefix("torch."), ())
        rows = runner.req_to_token_pool.req_to_token.shape[0]
        self.passes = MemoryPasses(self.bank, kernels, rows)
        if args.enable_metrics and ranks.is_first:
            metrics = MemoryMetrics(name_in_metrics(args))
        self.requeueing = Requeueing(self.bank, self.passes, metrics)
        self.apply(source.read(source.at_start, self._check))

    def readable(self) -> dict[str, PrefixMemory]:
        """Return what is at the source now, by digest, where it can be loaded into a server that
        runs; the same on every rank. Raises KvtierError."""
        self.bank.check_loads()
        return self._source.read(self._source.now(), self._check)

    def _check(self, memory: PrefixMemory) -> None:
        """Raises MemoryMismatchError for one that must not be served here."""
        memory.card.identity.check_serves(self._served.with_prefix(memory.prefix_ids))
        check_may_be_served(memory.card)

    def apply(self, found: Mapping[str, PrefixMemory]) -> None:
        """Serve these, and no others. Raises UsageError, see MemoryBank.load."""
        for memory in self.bank.served():
            if memory.digest not in found:
                self.bank.drop(memory.digest)
        loaded = {memory.digest for memory in self.bank.served()}
        for digest, memory in found.items():
            if digest not in loaded:
                self.bank.load(memory)
                logger.info("prefix memory %s: %d tokens", digest, len(memory.prefix_ids))
