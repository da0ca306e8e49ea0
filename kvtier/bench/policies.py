"""The policies the bench can compare, and what each means for the engine."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.errors import UnknownPolicyError
from kvtier.heads.profile import (
    HeadProfile,
    ModelShape,
    full_profile,
    random_profile,
    window_profile,
)

# The ending of a policy's name that keeps its KV in fp8, and SGLang's name of that.
FP8_SUFFIX = "-fp8"
FP8 = "fp8_e4m3"
# The ending of a policy's name that has a tier whatever the settings say of one.
TIER_SUFFIX = "-tier"
# One fixed draw: a control that changed with the workload would compare nothing.
RANDOM_HEADS_SEED = 0


@dataclass(frozen=True)
class Policy:
    """One way to serve the workload.

    kvtier_attention: our attention backend instead of SGLang's own
    splits_heads:     our radix cache and a head profile
    """

    name: str
    description: str
    kvtier_attention: bool
    splits_heads: bool

    @property
    def keeps(self) -> str:
        """The name of the policy that keeps the same of a context in --kv-dtype, without a tier."""
        return self.name.removesuffix(FP8_SUFFIX).removesuffix(TIER_SUFFIX)

    @property
    def has_tier(self) -> bool:
        """Return whether the policy is named for its tier."""
        return self.name.endswith(TIER_SUFFIX)

    @property
    def kv_dtype(self) -> str | None:
        """SGLang's name of what KV is kept in; None where --kv-dtype says."""
        return FP8 if self.name.endswith(FP8_SUFFIX) else None

    @property
    def needs_profile(self) -> bool:
        """Return whether the user's head profile decides what, or how much, is kept."""
        return self.keeps in ("kvtier", "random")

    @property
    def compacts(self) -> bool:
        """Return whether --quality and --retention are for this policy; the controls keep
        everything."""
        return self.keeps == "kvtier"

    def profile(self, shape: ModelShape, given: HeadProfile | None) -> HeadProfile:
        """The head profile in force; `given` is the user's, for the policy that needs one."""
        if self.name == "window":
            return window_profile(shape)
        if self.needs_profile:
            assert given is not None, "the profile is resolved before a policy asks for it"
            if self.name == "random":
                return random_profile(shape, given.num_ca_heads, RANDOM_HEADS_SEED)
            return given
        return full_profile(shape)


_ALL = (
    Policy("stock", "SGLang's own radix cache and attention", False, False),
    Policy("full", "SGLang's radix cache, kvtier's attention, every head keeps all", True, False),
    Policy("kvtier", "CA heads keep the context, the others sink + recent", True, True),
    Policy("random", "as many CA heads as kvtier has, drawn at random: the control", True, True),
    Policy("window", "no head keeps the context: the floor", True, True),
    Policy("full-fp8", "full, with KV of one byte a number", True, False),
    Policy("kvtier-fp8", "kvtier, with KV of one byte a number", True, True),
    Policy("kvtier-tier", "kvtier, with exact KV in a tier", True, True),
)
POLICIES = {policy.name: policy for policy in _ALL}
BASELINES = ("full", "stock")


def parse_policies(text: str) -> tuple[Policy, ...]:
    """A comma-separated list, in the order given. Raises UnknownPolicyError."""
    names = [name.strip() for name in text.split(",")]
    valid = f"a comma-separated choice of {', '.join(POLICIES)}"
    for name in names:
        if name not in POLICIES:
            raise UnknownPolicyError("--policies", valid, name or text)
    if len(set(names)) != len(names):
        raise UnknownPolicyError("--policies", valid + ", each once", text)
    return tuple(POLICIES[name] for name in names)
