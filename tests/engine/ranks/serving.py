"""Servers of one rank and of several, and the head profiles that split between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compressing import uneven_profile
from engine_process import DEMO_MODEL, RUNNER, run_script
from tiered_engine import ENGINE

from benchmarks.common.engines import ranks_on_a_cpu
from kvtier.heads.profile import HeadProfile, load_profile


def serve(
    folder: Path, ranks: int, rounds: list[Any], env: dict[str, str], *, fault: str | None = None,
    **flags: Any,
) -> dict[str, Any]:  # fmt: skip
    """Run a server of so many ranks and return what it answers; see engine_runner.py and
    faulty_ranks.py."""
    plan = {"engine": {**ENGINE, "tp_size": ranks, **flags}, "rounds": rounds, "fault": fault}
    return run_script(RUNNER, folder, plan, env | ranks_on_a_cpu(ranks))


def demo_profile() -> HeadProfile:
    """Two CA heads on the first of two ranks, one on the second."""
    return load_profile(DEMO_MODEL / "head_profile.json")


def empty_rank() -> HeadProfile:
    """The demo model's heads without those of the second of two ranks."""
    profile = demo_profile()
    first = profile.shape.num_kv_heads // 2
    heads = tuple(tuple(head for head in layer if head < first) for layer in profile.ca_heads)
    return profile.model_copy(update={"ca_heads": heads, "scores": None})


# The profiles are named by how they split between two ranks: that of compressing.py has three CA
# heads on each.
PROFILES = {"even": uneven_profile, "uneven": demo_profile, "an empty rank": empty_rank}
