"""The plan and the environment of an engine that a benchmark or a test starts."""

from __future__ import annotations

import os
from collections.abc import Mapping

from kvtier.bench.options import parse_options
from kvtier.bench.planning import make_plans
from kvtier.bench.schema import Plan


def bench_plan(flags: Mapping[str, str]) -> Plan:
    """Return the plan that the bench would start by these flags of `python -m kvtier.bench`, of one
    policy."""
    _, plans = make_plans(parse_options([part for flag in flags.items() for part in flag]))
    return plans[0].plan


def ranks_on_a_cpu(ranks: int) -> dict[str, str]:
    """Return the environment that SGLang's ranks want on a CPU: cores, and without a compiler no
    traced all-reduce. Its own checker ends a server whose ranks part. It is empty for one rank."""
    if ranks == 1:
        return {}
    cores = os.cpu_count() or 1
    return {
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(f"{rank % cores}" for rank in range(ranks)),
        "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
