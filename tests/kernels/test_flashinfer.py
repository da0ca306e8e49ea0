"""The FlashInfer backend without a GPU: its tables, its votes, its logarithms, its errors.

Its kernels are replaced by `flashinfer_host`, which says what of them stays real.
"""

import gc
import os
import shutil
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_equivalence import E4M3, assert_extends, make_cache
from test_lists import assert_exact, assert_grows, make_problem
from thorough import COMPILED, THOROUGH

from kvtier_kernels import KernelUnavailableError, RaggedKV, get_kernels
from kvtier_kernels.flashinfer_backend import check_compiler

flashinfer = pytest.importorskip("flashinfer")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 4e-3}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    from flashinfer_host import build

    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    return build(tmp_path_factory.mktemp("flashinfer"))


def make_kernels(library, made):
    """The backend, over wrappers of the host, which are added to `made`."""
    from flashinfer_host import HostWrapper

    from kvtier_kernels.flashinfer_backend.kernels import FlashInferKernels

    def make(kind, workspace):
        made.append(HostWrapper(library, kind))
        return made[-1]

    return FlashInferKernels(make)


@without_gpu
@settings(max_examples=20 if THOROUGH else 10)
@given(
    prefixes=st.lists(st.integers(0, 90), min_size=1, max_size=3),
    news=st.lists(st.integers(1, 6), min_size=3, max_size=3),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    shape=st.sampled_from([(2, 4, 64), (3, 1, 128), (1, 7, 64)]),
    layout=st.sampled_from(["slot-major", "head-major"]),
    fp8=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_extend_equals_dense_attention(library, prefixes, news, dtype, shape, layout, fp8, seed):
    torch.manual_seed(seed)
    (heads, group, dim), made = shape, []
    kv = make_cache(heads, dim, E4M3 if fp8 else dtype, slots=400, layout=layout)
    assert_extends(
        make_kernels(library, made), kv, group, dtype, prefixes, news[: len(prefixes)],
        tolerance=TOLERANCE,
    )  # fmt: skip
    assert made


@without_gpu
@pytest.mark.parametrize("votes", [None, (), (4,)], ids=["no votes", "per entry", "per head"])
@pytest.mark.parametrize("kv_dtype", [torch.float16, E4M3])
def test_lists_are_attended_to_exactly(library, votes, kv_dtype):
    made = []
    kernels = make_kernels(library, made).lists
    assert_exact(kernels, make_problem(kv_dtype, votes=votes), 4, torch.float16, [0, 9, 30])
    assert_grows(kernels, make_problem(kv_dtype, votes=votes), torch.float16, asked=(0, 1))
    assert made


@without_gpu
def test_what_flashinfer_cannot_do_is_served_all_the_same(library):
    """Float32, dimensions that it does not know, KV in two layouts, slots of 132 bytes, dimensions
    that do not lie together, and the rows of several tokens as one group with votes of four
    heads."""
    made = []
    kernels = make_kernels(library, made)
    half = make_cache(2, 64, torch.float16, slots=40)
    for kv in (
        make_cache(2, 64, torch.float32, slots=40),
        make_cache(2, 32, torch.float16, slots=40),
        RaggedKV(half.k, half.v.transpose(0, 1).contiguous().transpose(0, 1)),
        RaggedKV(*(torch.randn(40, 2, 66).half()[..., :64] for _ in "kv")),
        RaggedKV(*(torch.randn(40, 64, 2).half().transpose(1, 2) for _ in "kv")),
    ):
        assert_extends(kernels, kv, 4, kv.k.dtype, [30], [9], tolerance=TOLERANCE)
    for dtype, group in ((torch.float32, 4), (torch.float16, 12)):
        problem = make_problem(dtype, votes=(4,))
        assert_exact(kernels.lists, problem, group, dtype, [0, 0, 0], layers=[1])
    assert not made


@without_gpu
def test_layers_share_what_was_planned_and_steps_the_wrappers(library):
    made = []
    kernels = make_kernels(library, made)
    kv, q = make_cache(2, 64, torch.float16, slots=400), torch.randn(3, 2, 4, 64).half()
    k_new, v_new = torch.randn(2, 3, 2, 64).half()

    def extend(plan):
        kernels.extend(q, k_new, v_new, [0, 1, 3], kv, plan, 0.125)

    for _ in range(3):
        plan = kernels.plan(torch.arange(1, 31), [0, 10, 30])
        for _ in range(2):
            extend(plan)
        del plan
        gc.collect()
    # One for the prefix and one for new tokens, planned once a step.
    assert [wrapper.planned for wrapper in made] == [3, 3]
    first, second = (kernels.plan(torch.arange(1, 31), [0, 10, 30]) for _ in range(2))
    for plan in (first, second):
        extend(plan)
    # Two plans that live at a time share none.
    assert len(made) == 4
    assert first.wrappers.keys() == second.wrappers.keys()
    assert not {id(w) for w in first.wrappers.values()} & {id(w) for w in second.wrappers.values()}


@without_gpu
def test_a_machine_without_a_gpu_is_told_so():
    with pytest.raises(KernelUnavailableError, match="'flashinfer' needs a CUDA device"):
        get_kernels("flashinfer")


@pytest.mark.parametrize("missing", ["nvcc", "ninja"])
def test_a_machine_that_cannot_compile_is_told_what_it_lacks(missing, monkeypatch, tmp_path):
    from flashinfer.jit import cpp_ext

    monkeypatch.setattr(cpp_ext, "get_cuda_path", lambda: str(tmp_path))
    if missing == "ninja":
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvcc").touch()
        monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelUnavailableError, match=missing):
        check_compiler()


# FlashInfer's generator writes the module and names the commands. Run are those of the kernels
# without a mask, which decoding and a prefix call, and of the host code.
COMPILE = """
import shlex, subprocess, sys, torch
from pathlib import Path
from flashinfer.jit.attention import gen_customize_batch_prefill_module
from kvtier_kernels.flashinfer_backend.variant import jit_args
arguments = jit_args(torch.bfloat16, getattr(torch, sys.argv[1]), 128)
for entry in gen_customize_batch_prefill_module("fa2", *arguments).get_compile_commands():
    if Path(entry["file"]).name in sys.argv[2:]:
        Path(entry["directory"]).mkdir(parents=True, exist_ok=True)
        subprocess.run(shlex.split(entry["command"]), cwd=entry["directory"], check=True)
        print(entry["file"])
"""
KERNEL = "batch_prefill_paged_kernel_mask_0.cu"
OTHERS = (
    "batch_prefill_ragged_kernel_mask_0.cu", "batch_prefill.cu", "batch_prefill_jit_binding.cu",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not (THOROUGH or COMPILED), reason="takes nvcc a minute: TESTS_COMPILED=1")
@pytest.mark.parametrize("kv", ["float8_e4m3fn", "bfloat16", "float8_e5m2"])
def test_attention_with_votes_compiles_for_hopper(kv, tmp_path):
    if not THOROUGH and kv != "float8_e4m3fn":
        pytest.skip("all variants are the same code but for the type of KV")
    try:
        check_compiler()
    except KernelUnavailableError as error:
        pytest.skip(str(error))
    # The speed of the code does not matter; nvcc has the flag since 12.8.
    flags = {} if THOROUGH else {"FLASHINFER_EXTRA_CUDAFLAGS": "--Ofast-compile=max"}
    own = {"FLASHINFER_CUDA_ARCH_LIST": "9.0a", "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
    files = [KERNEL, *(OTHERS if THOROUGH else ())]
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, kv, *files],
        capture_output=True, text=True, env=os.environ | flags | own, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(".cu") == len(files)
