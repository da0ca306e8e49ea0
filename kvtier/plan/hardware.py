"""Rates and budgets of a replica, from stated figures of a model and of accelerators.

    prefill   2 FLOPs per parameter and token, 4 per layer, query head, head dimension and pair of
              tokens (QK and PV), at a share `flops_used` of the peak
    decode    a step reads all weights once and each request's KV, at a share `bandwidth_used` of
              the peak, and takes `step_overhead_s` for launches and collectives whatever it reads
    budget    the share `memory_used` of the memory, less the weights

Everything is divided over the accelerators of a replica (tensor parallel). Figures are the vendors'
and the models' own; the shares are assumptions that `kvtier plan` writes with its answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.errors import UsageError
from kvtier.plan.fleet import Rates


@dataclass(frozen=True)
class Accelerator:
    """The figures of one device: memory, its peak bandwidth, and dense 16-bit FLOPs per second.
    source: where they are from."""

    memory_bytes: float
    bandwidth_bytes_per_s: float
    flops: float
    source: str


@dataclass(frozen=True)
class ModelShape:
    """The figures of a model that decide its cost. source: where they are from."""

    parameters: float
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    source: str

    def kv_bytes(self, dtype_bytes: float) -> float:
        """Return the bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype_bytes


@dataclass(frozen=True)
class Assumptions:
    """The assumptions, which no data sheet states.

    flops_used:      share of the peak while prefilling
    bandwidth_used:  share of the peak while decoding
    memory_used:     share of the memory for weights and KV (SGLang's --mem-fraction-static)
    step_overhead_s: time of a pass beyond computing and reading
    weight_bytes, kv_dtype_bytes: bytes of a parameter, and of a number in KV
    tier_bytes_per_s: bandwidth from the tier into one replica
    tier_shared_bytes_per_s: bandwidth out of the tier in all
    tier_latency_s:  time from asking to the first byte
    """

    flops_used: float = 0.45
    bandwidth_used: float = 0.7
    memory_used: float = 0.88
    step_overhead_s: float = 0.004
    weight_bytes: float = 2.0
    kv_dtype_bytes: float = 2.0
    tier_bytes_per_s: float = 20e9
    tier_shared_bytes_per_s: float = 400e9
    tier_latency_s: float = 0.005


ACCELERATORS = {
    "h100": Accelerator(80e9, 3.35e12, 989e12, "NVIDIA H100 SXM data sheet"),
    "h200": Accelerator(141e9, 4.8e12, 989e12, "NVIDIA H200 SXM data sheet"),
    "a100": Accelerator(80e9, 2.039e12, 312e12, "NVIDIA A100 80GB SXM data sheet"),
}
MODELS = {
    "llama-3-8b": ModelShape(8.03e9, 32, 32, 8, 128, "Llama-3.1-8B's config.json"),
    "llama-3-70b": ModelShape(70.6e9, 80, 64, 8, 128, "Llama-3.1-70B's config.json"),
}


@dataclass(frozen=True)
class Replica:
    """A replica: a model over `tp` accelerators."""

    accelerator: Accelerator
    model: ModelShape
    tp: int
    assumed: Assumptions = field(default_factory=Assumptions)

    @property
    def kv_token_bytes(self) -> float:
        """Return the bytes of one token's full KV, over all accelerators."""
        return self.model.kv_bytes(self.assumed.kv_dtype_bytes)

    @property
    def kv_budget_bytes(self) -> float:
        """Return the bytes for KV, over all accelerators. Raises UsageError where the weights do
        not fit."""
        whole = self.assumed.memory_used * self.accelerator.memory_bytes * self.tp
        left = whole - self.model.parameters * self.assumed.weight_bytes
        if left <= 0:
            raise UsageError("--tp", "enough accelerators for the weights", self.tp)
        return left

    def rates(self) -> Rates:
        """Return the replica's rates, as the module docstring says."""
        assumed, model = self.assumed, self.model
        flops = self.accelerator.flops * self.tp * assumed.flops_used
        read = self.accelerator.bandwidth_bytes_per_s * self.tp * assumed.bandwidth_used
        pair_flops = 4 * model.layers * model.query_heads * model.head_dim
        token_s = 2 * model.parameters / flops
        return Rates(
            prefill_base_s=assumed.step_overhead_s,
            prefill_token_s=token_s,
            prefill_pair_s=pair_flops / flops,
            decode_base_s=model.parameters * assumed.weight_bytes / read + assumed.step_overhead_s,
            decode_request_s=token_s,
            decode_token_s=self.kv_token_bytes / read,
            tier_latency_s=assumed.tier_latency_s,
            tier_token_s=self.kv_token_bytes / assumed.tier_bytes_per_s,
            tier_shared_token_s=self.kv_token_bytes / assumed.tier_shared_bytes_per_s,
            tier_write_token_s=0.0,
            tier_spill_token_s=self.kv_token_bytes / assumed.tier_bytes_per_s,
        )


def find_replica(gpu: str, model: str, tp: int, assumed: Assumptions) -> Replica:
    """Return the replica of an accelerator and a model, by their names. Raises UsageError for a
    name that is not known."""
    if gpu not in ACCELERATORS:
        raise UsageError("--gpu", f"one of {', '.join(ACCELERATORS)}", gpu)
    if model not in MODELS:
        raise UsageError("--model", f"one of {', '.join(MODELS)}", model)
    return Replica(ACCELERATORS[gpu], MODELS[model], tp, assumed)
