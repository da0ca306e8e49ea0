"""The choice of the memory that a request is answered from.

A request whose prompt begins with a memory's prefix gets an extra key with the memory's digest, so
its whole context is in a tree of its own (radix/prefix_nodes.py): nothing that was computed behind
a memory is taken for what was computed behind the exact prefix, nor the other way round.
"""

from __future__ import annotations

from typing import Any

from kvtier.memory.storage import PrefixMemory
from kvtier_sglang.memory.bank import MemoryBank
from kvtier_sglang.request_options import asks_exactly
from kvtier_sglang.tier.scopes import with_memory, without_memory

# In a request's `custom_params`: false, and it is answered from the exact prefix.
WANTS = "kvtier_memory"


def assign(bank: MemoryBank, req: Any) -> None:
    """Give a new request the extra key of its memory, if there is one that it may be answered
    with."""
    if not len(bank) or req.lora_id is not None or req.input_embeds is not None:
        return
    custom = req.sampling_params.custom_params
    if asks_exactly(req) or (custom or {}).get(WANTS) is False:
        bank.counters["opted_out"] += 1
        return
    memory = bank.of_prompt(req.origin_input_ids)
    if memory is None or _asks_of_prefix(req, memory):
        return
    req.extra_key = with_memory(req.extra_key, memory.digest)


def leave(req: Any) -> None:
    """Answer a request from the exact prefix from now on."""
    req.extra_key = without_memory(req.extra_key)


def _asks_of_prefix(req: Any, memory: PrefixMemory) -> bool:
    """Return whether a request wants log-probabilities of tokens that nobody computes."""
    return req.return_logprob and 0 <= req.logprob_start_len < len(memory.prefix_ids)


__all__ = ["WANTS", "assign", "leave"]
