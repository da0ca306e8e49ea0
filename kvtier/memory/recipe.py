"""How a memory is made."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.errors import UsageError


@dataclass(frozen=True)
class Recipe:
    """See the module docstring.

    entries:       attention states per layer, M; 0: kept KV alone
    key_width:     numbers that a query is projected to for a lookup, R
    place_weight:  how much the place behind the prefix counts in a lookup
    kept_tokens:   tokens of the prefix that a KV head keeps, for queries that no entry is near to
    exact_heads:   share of all KV heads that entries serve worst: they do not look up
    exact_tokens:  tokens of the prefix that each of those keeps; None: all
    gate:          share of the judging traces' queries that count as too far from every entry
    least_members: entries that stand for fewer queries are left out
    """

    entries: int = 256
    key_width: int = 64
    place_weight: float = 0.1
    kept_tokens: int = 128
    exact_heads: float = 0.25
    exact_tokens: int | None = 512
    gate: float = 0.1
    least_members: int = 1

    def __post_init__(self) -> None:
        least = {"entries": 0, "key_width": 1, "kept_tokens": 0, "least_members": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise UsageError(f"--{_flag(name)}", f"at least {bound}", getattr(self, name))
        for name in ("exact_heads", "gate"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"--{_flag(name)}", "0 to 1", getattr(self, name))
        if self.place_weight < 0:
            raise UsageError("--place-weight", "at least 0", self.place_weight)
        if self.exact_tokens is not None and self.exact_tokens < 1:
            raise UsageError("--exact-tokens", "at least 1", self.exact_tokens)
        if not self.entries and not self.kept_tokens:
            raise UsageError("--kept-tokens", "at least 1 without entries", self.kept_tokens)


def _flag(name: str) -> str:
    return "no-store-queries" if name == "least_members" else name.replace("_", "-")


__all__ = ["Recipe"]
