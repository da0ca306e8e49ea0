"""Long samples fit a small machine: the whole command's peak memory, imports included."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from thorough import THOROUGH

from kvtier.heads.profile import load_profile

DEMO = Path(__file__).parents[2] / "models" / "kvtier-demo"
LENGTH, LIMIT_BYTES = ("32k", 4 << 30) if THOROUGH else ("16k", 3 << 29)
# The peak of this process alone; what wait4 says may be that of the process it was forked from.
COMMAND = """
import sys
from pathlib import Path
from kvtier.cli import main
code = main(sys.argv[1:])
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print("peak KiB:", status["VmHWM"].split()[0])
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_long_samples_fit_in_a_small_machine(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    arguments = [
        "calibrate", "heads", "--model-path", str(DEMO), "--share", "0.25",
        "--len", LENGTH, "--samples", "2", "--out", str(out), "--quiet",
    ]  # fmt: skip
    command = [sys.executable, "-c", COMMAND, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert load_profile(out).costs[0].context_tokens == int(LENGTH[:-1]) << 10
    peak_bytes = int(done.stdout.rpartition("peak KiB: ")[2]) * 1024
    print(f"peak resident memory: {peak_bytes / 2**30:.2f} GiB")
    assert peak_bytes < LIMIT_BYTES
