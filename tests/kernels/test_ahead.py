"""The Triton kernels compile for a GPU, without one, and their loops keep to the registers."""

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_every_variant_compiles_and_no_loop_spills(capability):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "kvtier_kernels.triton_backend.ahead", str(capability)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "extend_blocks" in done.stdout
