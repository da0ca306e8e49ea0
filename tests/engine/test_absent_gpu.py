"""SGLang's CUDA branches over a GPU that is not there: what only they call is called rightly.

Decoding goes through SGLang's CUDA graphs, padded, what was captured being called again. A device's
order of things and its memory are left to `make gpu-check`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_process import DEMO_MODEL
from tierd.live_tier import live_tier

from benchmarks.gpu_pack import add_stub

HERE = Path(__file__).parent / "absent_gpu"
# As in a pack's environment.sh.
WITHOUT_ITS_KERNELS = {
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    "SGLANG_FORCE_FUSED_OP_BACKEND": "torch",
}


def serve(device: str, tier: str, environment: dict[str, str]) -> dict[str, object]:
    own = {
        "KVTIER_HEAD_PROFILE": str(DEMO_MODEL / "head_profile.json"),
        # Short enough that the turns below drop half of what lies between.
        "KVTIER_SINK_TOKENS": "32",
        "KVTIER_RECENT_TOKENS": "64",
        "KVTIER_BRANCH_RECENT_TOKENS": "24",
        "KVTIER_RETENTION": "0.5",
        "KVTIER_TIER": tier,
        "KVTIER_TIER_NAMESPACE": device,
        "KVTIER_TIER_SPAN_TOKENS": "64",
        "KVTIER_REFRESH": "turn",
        "KVTIER_MERGE": "beta",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "serve.py"), str(DEMO_MODEL), device],
        env={**os.environ, **own, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"answers"')]
    assert lines, (done.stdout + done.stderr)[-6000:]
    found: dict[str, object] = json.loads(lines[-1])
    return found


@pytest.mark.engine
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_server_on_cuda_says_what_one_on_a_cpu_says(tmp_path: Path) -> None:
    add_stub(tmp_path)
    replays = tmp_path / "replays"
    believing = {
        "PYTHONPATH": os.pathsep.join([str(HERE), str(tmp_path)]),
        "TRITON_INTERPRET": "1",
        "ABSENT_GPU_REPLAYS": str(replays),
    }
    with live_tier(tmp_path, "--memory", "256m") as tier:
        on_cuda = serve("cuda", tier.address, WITHOUT_ITS_KERNELS | believing)
        on_cpu = serve("cpu", tier.address, {})
    assert on_cuda == on_cpu
    assert on_cuda["integrity"] == []
    assert all(on_cuda["cached"])
    assert on_cuda["dropped_tokens"] > 300
    assert on_cuda["refreshed_turns"] == 3
    # Two turns of six tokens, the first of each by prefill.
    assert set(replays.read_text().split()) == {"4"}
    assert len(replays.read_text().split()) >= 10
