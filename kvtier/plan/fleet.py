"""The fleet that is simulated, in units that people use: rates of a replica, its cache, and the
scheduling and routing of requests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvtier.errors import UsageError
from kvtier.retention.shares.base import PAGE
from kvtier.tier.blobs.keys import SPAN_TOKENS

# A tier of so many tokens has room for any traffic.
UNBOUNDED = 1 << 40
STREAMING = ("never", "auto", "always")
"""The choices of prompts that are compressed while they are prefilled."""
ROUTINGS = ("affinity", "cache-aware", "least-loaded", "two-choices", "round-robin")
# The policies are first come first served, and longest prefix match.
SCHEDULE_POLICIES = ("fcfs", "lpm")


@dataclass(frozen=True)
class Rates:
    """The rates of a replica: the times of its passes and of its tier, in seconds.

    A prefill pass: prefill_base_s + prefill_request_s * requests that begin in it
                    + prefill_prompt_token_s * tokens of their prompts, cached or not, which are
                      sent, tokenized, matched and read
                    + prefill_token_s * new tokens
                    + prefill_pair_s * (new tokens x entries that each attends to)
    A decode step:  decode_base_s + decode_request_s * requests
                    + decode_token_s * tokens of full KV that they read

    tier_latency_s:      from asking the tier to its first byte
    tier_token_s:        moving a token's exact KV over the replica's link
    tier_shared_token_s: moving it over the tier's own link, which all replicas share
    tier_write_token_s:  writing it into the pool
    tier_spill_token_s:  moving a token that a turn has computed into the tier
    """

    prefill_base_s: float
    prefill_token_s: float
    prefill_pair_s: float
    decode_base_s: float
    decode_request_s: float
    decode_token_s: float
    prefill_request_s: float = 0.0
    prefill_prompt_token_s: float = 0.0
    tier_latency_s: float = 0.0
    tier_token_s: float = 0.0
    tier_shared_token_s: float = 0.0
    tier_write_token_s: float = 0.0
    tier_spill_token_s: float = 0.0


@dataclass(frozen=True)
class Windows:
    """The windows of a turn that every head keeps, in tokens: see kvtier.retention.locality."""

    sink: int = 4
    recent: int = 16
    branch_recent: int = 0
    recent_of: int = 128


@dataclass(frozen=True)
class Cache:
    """The cache of one replica.

    policy:         its name, one of the bench's
    slots:          slots of its pool
    compresses:     whether `retention` of a finished turn is kept
    page:           entries of a page of what is kept: more where it is coded
    compress_prefill: one of STREAMING
    ca_share:       share of the heads that keep that; the others keep one entry for all they drop
    tier_tokens:    tokens of exact KV that the tier holds for the whole fleet; 0: no tier
    tier_span_tokens: tokens of a blob there; a request that lacks fewer does not ask for them
    """

    policy: str
    slots: int
    compresses: bool = False
    retention: float = 1.0
    page: int = PAGE
    compress_prefill: str = "auto"
    ca_share: float = 1.0
    tier_tokens: int = 0
    tier_span_tokens: int = SPAN_TOKENS
    windows: Windows = field(default_factory=Windows)

    @property
    def kept_share(self) -> float:
        """The share of its entries that a finished turn keeps, but for windows."""
        return self.ca_share * self.retention if self.compresses else 1.0


@dataclass(frozen=True)
class FleetPlan:
    """A fleet of equal replicas.

    gpus_per_replica: accelerators of a replica, for counting and cost
    chunk_tokens:     most tokens of a prefill pass
    max_running:      most requests of a replica at once
    routing:          one of ROUTINGS
    routing_slack:    requests beyond those of the least loaded replica that cache-aware routing
                      puts up with
    schedule_policy:  one of SCHEDULE_POLICIES, SGLang's names of the orders of admission

    Raises UsageError naming the flag of a field that is out of its range.
    """

    replicas: int
    rates: Rates
    cache: Cache
    gpus_per_replica: int = 1
    chunk_tokens: int = 8192
    max_running: int = 64
    routing: str = "affinity"
    routing_slack: int = 8
    schedule_policy: str = "fcfs"

    def __post_init__(self) -> None:
        for name in ("replicas", "gpus_per_replica", "chunk_tokens", "max_running"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')}", "at least 1", getattr(self, name))

    def with_replicas(self, replicas: int) -> FleetPlan:
        """Return the same plan with another number of replicas."""
        return replace(self, replicas=replicas)
