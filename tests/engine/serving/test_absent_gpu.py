"""A server on CUDA says what one on a CPU says; where there is no GPU, over one that is not there.

The absent GPU takes SGLang's CUDA branches and shows that what only they call is called rightly:
what CUDA graphs captured is called again. A real one also shows the order of streams and graphs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_process import DEMO_MODEL, PATIENT
from thorough import THOROUGH
from tierd.live_tier import live_tier
from waiting import SAFETY_S

from benchmarks.gpu.pack import add_stub

HERE = Path(__file__).parent / "absent_gpu"
# Triton's interpreter takes seconds for each.
SESSIONS = 3 if THOROUGH else 2
FORKING = str(Path(__file__).parents[2] / "forking")
# A pack's environment.sh sets these.
WITHOUT_ITS_KERNELS = {
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    "SGLANG_FORCE_FUSED_OP_BACKEND": "torch",
}
ON_CPU = {"KVTIER_FORCE_CPU": "1", "CUDA_VISIBLE_DEVICES": ""}


def serve(
    device: str, tier: str, environment: dict[str, str], namespace: str = "cuda"
) -> dict[str, Any]:
    own = {
        "KVTIER_HEAD_PROFILE": str(DEMO_MODEL / "head_profile.json"),
        # Short enough that the turns below drop half of what lies between.
        "KVTIER_LOCALITY_SINK_TOKENS": "32",
        "KVTIER_LOCALITY_RECENT_TOKENS": "64",
        "KVTIER_LOCALITY_BRANCH_RECENT_TOKENS": "24",
        "KVTIER_RETENTION": "0.5",
        "KVTIER_TIER": tier,
        "KVTIER_TIER_NAMESPACE": namespace,
        "KVTIER_TIER_SPAN_TOKENS": "64",
        **PATIENT,
        "KVTIER_REFRESH": "turn",
        "KVTIER_MERGE": "keepkv",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "serve.py"), str(DEMO_MODEL), device, str(SESSIONS)],
        env={**os.environ, **own, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=SAFETY_S,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"answers"')]
    assert lines, (done.stdout + done.stderr)[-6000:]
    found: dict[str, Any] = json.loads(lines[-1])
    return found


@pytest.mark.slow
@pytest.mark.engine
def test_a_server_on_cuda_says_what_one_on_a_cpu_says(tmp_path: Path) -> None:
    replays = tmp_path / "replays"
    there = torch.cuda.is_available()
    with live_tier(tmp_path, "--memory", "256m") as tier:
        on_cuda = serve("cuda", tier.address, {} if there else absent_gpu(tmp_path, replays))
        on_cpu = serve("cpu", tier.address, ON_CPU, "cpu")
    # The beginning of turns' slots decides how much of a span is whole bundles; passes that overlap
    # take a slot earlier.
    assert min(one.pop("compacted_tokens") for one in (on_cuda, on_cpu)) > 100
    assert on_cuda == on_cpu
    assert on_cuda["integrity"] == []
    assert all(on_cuda["cached"])
    assert on_cuda["refreshed_turns"] == SESSIONS
    if not there:
        # Two turns of four tokens, the first of each by prefill.
        assert set(replays.read_text().split()) == {"4"}
        assert len(replays.read_text().split()) >= 6


def absent_gpu(folder: Path, replays: Path) -> dict[str, str]:
    """The environment of a process that believes in a GPU. replays: where it notes those of its
    graphs."""
    add_stub(folder)
    return WITHOUT_ITS_KERNELS | {
        "PYTHONPATH": os.pathsep.join([str(HERE), str(folder), FORKING]),
        "TRITON_INTERPRET": "1",
        "ABSENT_GPU_REPLAYS": str(replays),
    }
