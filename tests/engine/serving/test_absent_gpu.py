"""A server on CUDA says what one on a CPU says; where there is no GPU, over one that is not there.

The absent GPU takes SGLang's CUDA branches and shows that what only they call is called rightly:
what CUDA graphs captured is called again. A real one also shows the order of streams and graphs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_process import CLEAN_ENVIRONMENT, DEMO_MODEL, run_engine
from sessions import said_in, side_by_side
from thorough import THOROUGH
from tierd.live_tier import live_tier
from tiered_engine import ENGINE

from benchmarks.gpu.pack import add_stub

HERE = Path(__file__).parent / "absent_gpu"
# Triton's interpreter takes seconds for each.
SESSIONS = 3 if THOROUGH else 2
# A pack's environment.sh sets these.
WITHOUT_ITS_KERNELS = {
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    "SGLANG_FORCE_FUSED_OP_BACKEND": "torch",
}
ON_CPU = {"KVTIER_FORCE_CPU": "1", "CUDA_VISIBLE_DEVICES": ""}
SETTINGS = {
    "KVTIER_HEAD_PROFILE": str(DEMO_MODEL / "head_profile.json"),
    # Short enough that the turns below drop half of what lies between.
    "KVTIER_LOCALITY_SINK_TOKENS": "32",
    "KVTIER_LOCALITY_RECENT_TOKENS": "64",
    "KVTIER_LOCALITY_BRANCH_RECENT_TOKENS": "24",
    "KVTIER_RETENTION": "0.5",
    "KVTIER_TIER_SPAN_TOKENS": "64",
    "KVTIER_REFRESH": "turn",
    "KVTIER_MERGE": "keepkv",
}


def serve(folder: Path, device: str, tier: str, environment: dict[str, str]) -> dict[str, Any]:
    """Return what a server says in two turns of some sessions."""
    engine = {
        **ENGINE,
        "device": device,
        "chunked_prefill_size": 128,
        "max_total_tokens": 2000,
        "max_running_requests": 4,
        # Smaller batches are padded to it. On a CPU there are no graphs.
        "cuda_graph_bs_decode": [4],
        "disable_cuda_graph": device == "cpu",
    }
    prompts = [
        [1, *(100 + (i * k) % 150 for i in range(160 + 20 * k))] for k in range(1, SESSIONS + 1)
    ]
    rounds = side_by_side([[prompt, [2, 120, 130]] for prompt in prompts], 4)
    own = {**SETTINGS, "KVTIER_TIER": tier, "KVTIER_TIER_NAMESPACE": device}
    return run_engine(folder, engine, rounds, own | environment)


@pytest.mark.slow
@pytest.mark.engine
def test_a_server_on_cuda_says_what_one_on_a_cpu_says(tmp_path: Path) -> None:
    replays = tmp_path / "replays"
    there = torch.cuda.is_available()
    with live_tier(tmp_path, "--memory", "256m") as tier:
        cuda = {} if there else absent_gpu(tmp_path, replays)
        both = [
            serve(tmp_path, device, tier.address, environment)
            for device, environment in (("cuda", cuda), ("cpu", ON_CPU))
        ]
    on_cuda, on_cpu = (said_in(out, SESSIONS) for out in both)
    assert on_cuda == on_cpu
    cached = [[one["cached_tokens"] for one in out["rounds"][1]] for out in both]
    assert cached[0] == cached[1]
    assert all(cached[0])
    for out in both:
        # The beginning of turns' slots decides how much of a span is whole bundles; passes that
        # overlap take a slot earlier.
        assert out["state"]["compacted_tokens"] > 100
        assert out["state"]["tier"]["refreshed_turns"] == SESSIONS
    if not there:
        # Two turns of four tokens, the first of each by prefill.
        assert set(replays.read_text().split()) == {"4"}
        assert len(replays.read_text().split()) >= 6


def absent_gpu(folder: Path, replays: Path) -> dict[str, str]:
    """The environment of a process that believes in a GPU. replays: where it notes those of its
    graphs."""
    add_stub(folder)
    return WITHOUT_ITS_KERNELS | {
        "PYTHONPATH": os.pathsep.join([str(HERE), str(folder), CLEAN_ENVIRONMENT["PYTHONPATH"]]),
        "TRITON_INTERPRET": "1",
        "ABSENT_GPU_REPLAYS": str(replays),
    }
