"""The pack for a GPU without a network: the stub, the environment, what is left out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.common.benchmark import ROOT
from benchmarks.gpu import pack as gpu_pack

USES_THE_STUB = """
import sgl_kernel, sgl_kernel.anything.below
from sgl_kernel import rmsnorm
from sgl_kernel.scalar_type import scalar_types
from sglang.kernels.ops.gemm.cutedsl_dual_gemm import can_use_dual_gemm
assert not can_use_dual_gemm(1, two=2)
str(scalar_types.uint4b8)
for call in (rmsnorm, sgl_kernel.anything.below.silu):
    try:
        call(1)
    except RuntimeError as error:
        print(error)
"""


def test_the_stub_has_every_name_and_the_scalar_types_and_says_which_was_called(
    tmp_path: Path,
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    gpu_pack.add_stub(site)
    for package in ("sglang", "sglang/kernels", "sglang/kernels/ops", "sglang/kernels/ops/gemm"):
        (site / package).mkdir()
        (site / package / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, "-c", USES_THE_STUB],
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout.splitlines()
    assert [line.split(":")[0] for line in said] == [
        "sgl_kernel.rmsnorm",
        "sgl_kernel.anything.below.silu",
    ], done.stderr


def test_sourcing_the_environment_finds_the_pack_and_keeps_the_callers_path(tmp_path: Path) -> None:
    pack = tmp_path / "a pack"
    (pack / "site").mkdir(parents=True)
    (pack / "environment.sh").write_text(gpu_pack.ENVIRONMENT)
    script = '. "$0"/environment.sh; echo "$PYTHONPATH"; echo $SGLANG_FORCE_FUSED_OP_BACKEND'
    done = subprocess.run(
        ["bash", "-c", script, str(pack)],
        env={"PYTHONPATH": "/mine", "PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    path, backend = done.stdout.splitlines()[:2]
    code = [f"{tmp_path}{folder}" for folder in ("", "/kernels", "/services", "/sglang_patches")]
    assert path.split(":") == [*code, f"{pack}/site", "/mine"]
    assert backend == "torch"


def test_sglang_is_packed_without_binaries_and_what_serves_no_language_model(
    tmp_path: Path,
) -> None:
    for name in ("srt/a.py", "srt/mem/tree.so", "multimodal_gen/b.py", "test/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    gpu_pack.trim(tmp_path)
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.*")] == ["srt/a.py"]


def test_every_packed_version_is_pinned() -> None:
    def plain(text: str) -> list[str]:
        lines = text.lower().replace("_", "-").splitlines()
        return [line.partition("==")[0] for line in lines if line and not line.startswith("#")]

    packed = plain(gpu_pack.PACKAGES.read_text())
    assert "sglang" in packed
    assert set(packed) <= set(plain((ROOT / "constraints.txt").read_text()))


IMPORTED = """
import sys
import benchmarks.gpu.serving, benchmarks.gpu.serving_worker
from importlib.metadata import packages_distributions
found = packages_distributions()
imported = [name for name, module in sys.modules.items() if getattr(module, "__file__", None)]
for name in {name.partition(".")[0] for name in imported}:
    print(*found.get(name, []), sep="\\n")
"""
# The packages of the GPU machine itself, or of any Python.
TAKEN_FOR_GRANTED = {"torch", "triton", "transformers", "numpy", "setuptools", "kvtier"}


def test_what_the_serving_benchmark_imports_is_packed_or_taken_for_granted() -> None:
    command = [sys.executable, "-c", IMPORTED]
    # The process would import coverage where that is measured.
    environment = {k: v for k, v in os.environ.items() if k != "COVERAGE_PROCESS_START"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    imported = {line.lower().replace("_", "-") for line in done.stdout.split()}
    packed = gpu_pack.PACKAGES.read_text().lower().replace("_", "-").splitlines()
    assert "pydantic" in imported
    assert imported - TAKEN_FOR_GRANTED <= set(packed)
