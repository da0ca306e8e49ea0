"""SGLang and kvtier as one archive, for a GPU machine that has torch and no network.

    make gpu-pack                                            here: out/gpu-pack.tar.gz, some 50 MiB
    tar xzf gpu-pack.tar.gz && . gpu-pack/environment.sh     there, beside a checkout
    make gpu-check

There, torch, Triton, transformers, numpy and a C compiler are taken for granted. The pack has
wheels of the versions in constraints.txt, unpacked, for the Python asked for. SGLang comes without
what serves no language model. kvtier comes with its entry points, behind which the checkout's own
code is found first. A stub stands for sglang-kernel, whose binary wants the newest torch
(gpu/pack_stub.py says what that leaves out); PyTorch computes what a Llama computes by it. Where
sglang-kernel can be installed, do that instead: `pip install kvtier[sglang,tier]`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks.common.benchmark import ROOT, Arguments

OUT = ROOT / "out" / "gpu-pack.tar.gz"
STUB = ROOT / "benchmarks" / "gpu" / "pack_stub.py"
PLATFORMS = ("2_35", "2_34", "2_31", "2_28", "2_27", "2_24", "2_17", "2014", "1")
PACKAGES = Path(__file__).with_name("pack.txt")
# The parts of SGLang that are left out: pictures and films, and its own tests.
TRIMMED = ("multimodal_gen", "test", "benchmark")
ENVIRONMENT = """\
# For bash, sourced in a checkout: `. gpu-pack/environment.sh`
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
checkout=$PWD:$PWD/kernels:$PWD/services:$PWD/sglang_patches
export PYTHONPATH=$checkout:$here/site${PYTHONPATH:+:$PYTHONPATH}
export SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1
export SGLANG_FORCE_FUSED_OP_BACKEND=torch
export SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python
export HF_HUB_OFFLINE=1
python3 -W ignore -m compileall -q -j 0 "$here/site" || true
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    arguments = Arguments("gpu.pack", __doc__)
    arguments.add("--out", type=Path, default=OUT, metavar="FILE", help="(%(default)s)")
    arguments.add("--python", default="3.12", help="of that machine (%(default)s)")
    options = arguments.parse(argv)
    with tempfile.TemporaryDirectory(prefix="kvtier-pack-") as name:
        pack = Path(name) / "gpu-pack"
        site = pack / "site"
        install(site, options.python)
        trim(site / "sglang")
        add_stub(site)
        (pack / "environment.sh").write_text(ENVIRONMENT)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(options.out, "w:gz") as archive:
            archive.add(pack, arcname=pack.name)
    print(f"{options.out}: {options.out.stat().st_size / 2**20:.1f} MiB")
    return 0


def install(site: Path, python: str) -> None:
    """Everything but kvtier for that Python, as it is on Linux x86-64; kvtier is plain Python."""
    platforms = [f"--platform=manylinux_{one}_x86_64" for one in PLATFORMS if "_" in one]
    platforms += [f"--platform=manylinux{one}_x86_64" for one in PLATFORMS if "_" not in one]
    foreign = ["--python-version", python, "--implementation", "cp", "--only-binary=:all:"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile",
           "--disable-pip-version-check", "--target", str(site)]  # fmt: skip
    constraints = ["-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *foreign, *platforms, *constraints, "-r", str(PACKAGES)], check=True)
    subprocess.run([*pip, "--upgrade", str(ROOT)], check=True)


def trim(sglang: Path) -> None:
    for name in TRIMMED:
        shutil.rmtree(sglang / name, ignore_errors=True)
    # Binaries are such as a tree in Rust, built for one torch.
    for binary in sglang.rglob("*.so"):
        binary.unlink()


def add_stub(site: Path) -> None:
    """The stub, and the one module of sglang-kernel that is plain Python and is used."""
    found = find_spec("sgl_kernel")
    if found is None or found.origin is None:
        raise SystemExit("benchmarks.gpu.pack: sglang-kernel is not installed here (make setup)")
    target = site / "sgl_kernel"
    target.mkdir()
    shutil.copy(STUB, target / "__init__.py")
    shutil.copy(Path(found.origin).parent / "scalar_type.py", target)


if __name__ == "__main__":
    sys.exit(main())
