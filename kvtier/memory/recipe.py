"""The recipe of a memory."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.errors import UsageError


@dataclass(frozen=True)
class Recipe:
    """See the module docstring.

    kept_share:    share of the prefix's KV that is kept, by the heads that attend to it most
    entries:       queries that stand for all, per layer that looks up, M
    state_heads:   share of all KV heads that are answered by attention states, those that states
                   serve best; 0: entries only tell which requests are like the traces
    key_width:     numbers that a query is projected to for a lookup, R
    place_weight:  how much the place behind the prefix counts in a lookup
    gate:          share of the judging traces' queries that count as too far from every entry
    least_members: entries that stand for fewer queries are left out
    """

    kept_share: float = 0.2
    entries: int = 64
    state_heads: float = 0.0
    key_width: int = 64
    place_weight: float = 0.1
    gate: float = 0.1
    least_members: int = 1

    def __post_init__(self) -> None:
        for name in ("entries", "key_width", "least_members"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{_flag(name)}", "at least 1", getattr(self, name))
        for name in ("kept_share", "state_heads", "gate"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"--{_flag(name)}", "0 to 1", getattr(self, name))
        if self.place_weight < 0:
            raise UsageError("--place-weight", "at least 0", self.place_weight)
        if not self.state_heads and not self.kept_share:
            raise UsageError("--kept-share", "more than 0 without states", self.kept_share)


def _flag(name: str) -> str:
    return "no-store-queries" if name == "least_members" else name.replace("_", "-")
