"""The FlashInfer backend without a GPU: its tables, its votes, its logarithms, its errors.

Its kernels are replaced by `flashinfer_host`, which says what of them stays real.
"""

import gc
import itertools
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from list_problems import HEADS, LAYERS, make_problem
from thorough import COMPILED, THOROUGH

from kvtier_kernels import KernelUnavailableError, RaggedKV, get_kernels
from kvtier_kernels.flashinfer_backend import tables
from kvtier_kernels.flashinfer_backend.limits import fits, is_aligned
from kvtier_kernels.flashinfer_backend.variant import run_arguments

flashinfer = pytest.importorskip("flashinfer")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    from flashinfer_host import build

    return build(tmp_path_factory.mktemp("flashinfer"))


@pytest.fixture
def made():
    return []


@pytest.fixture
def kernels(library, made):
    """The backend, over wrappers of the host; `made` lists those."""
    from flashinfer_host import HostWrapper

    from kvtier_kernels.flashinfer_backend.kernels import FlashInferKernels

    def make(kind, workspace):
        made.append(HostWrapper(library, kind))
        return made[-1]

    return FlashInferKernels(make)


def make_cache(heads, dim, dtype, *, slots=400, head_major=False):
    shape = (heads, slots, dim) if head_major else (slots, heads, dim)
    k, v = torch.randn(2, *shape).to(dtype).unbind()
    return (k.transpose(0, 1), v.transpose(0, 1)) if head_major else (k, v)


def assert_states_equal(got, expected, dtype):
    tolerance = TOLERANCE[dtype]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance)


@needs_compiler
@without_gpu
@settings(max_examples=20 if THOROUGH else 10)
@given(
    prefixes=st.lists(st.integers(0, 90), min_size=1, max_size=3),
    news=st.lists(st.integers(1, 6), min_size=3, max_size=3),
    dtype=st.sampled_from(list(TOLERANCE)),
    shape=st.sampled_from([(2, 4, 64), (3, 1, 128), (1, 7, 64)]),
    head_major=st.booleans(),
    fp8=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_extend_is_the_references(library, prefixes, news, dtype, shape, head_major, fp8, seed):
    from flashinfer_host import HostWrapper

    from kvtier_kernels.flashinfer_backend.kernels import FlashInferKernels

    torch.manual_seed(seed)
    kernels = FlashInferKernels(lambda kind, workspace: HostWrapper(library, kind))
    heads, group, dim = shape
    k, v = make_cache(heads, dim, torch.float8_e4m3fn if fp8 else dtype, head_major=head_major)
    indptr = [0, *itertools.accumulate(prefixes)]
    q_indptr = [0, *itertools.accumulate(news[: len(prefixes)])]
    slots = torch.randperm(399)[: indptr[-1]] + 1
    q = torch.randn(q_indptr[-1], heads, group, dim).to(dtype)
    k_new, v_new = torch.randn(2, q_indptr[-1], heads, dim).to(dtype)
    new = (q, k_new, v_new)
    assert fits(q, RaggedKV(k, v))
    got = kernels.extend(*new, q_indptr, RaggedKV(k, v), kernels.plan(slots, indptr), 0.125)
    reference = get_kernels("reference")
    exact, plan = RaggedKV(k.float(), v.float()), reference.plan(slots, indptr)
    expected = reference.extend(*(x.float() for x in new), q_indptr, exact, plan, 0.125)
    assert_states_equal(got, expected, dtype)


@needs_compiler
@without_gpu
def test_layers_share_what_was_planned_and_steps_the_wrappers(kernels, made):
    kv, q = RaggedKV(*make_cache(2, 64, torch.float16)), torch.randn(3, 2, 4, 64).half()
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


@needs_compiler
@without_gpu
def test_what_flashinfer_cannot_do_is_served_all_the_same(kernels, made):
    reference = get_kernels("reference")
    slots, indptr = torch.arange(1, 31), [0, 30]
    for dim, dtype in ((64, torch.float32), (32, torch.float16)):
        kv = RaggedKV(*make_cache(2, dim, dtype))
        q = torch.randn(9, 2, 4, dim).to(dtype)
        k_new, v_new = torch.randn(2, 9, 2, dim).to(dtype)
        plan, known = kernels.plan(slots, indptr), reference.plan(slots, indptr)
        got = kernels.extend(q, k_new, v_new, [0, 9], kv, plan, 0.1)
        expected = reference.extend(q, k_new, v_new, [0, 9], kv, known, 0.1)
        assert_states_equal(got, expected, torch.float16)
    assert not made


@needs_compiler
@without_gpu
@pytest.mark.parametrize("votes", [None, (), (4,)], ids=["no votes", "per entry", "per head"])
@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.float8_e4m3fn])
def test_lists_are_the_references(kernels, made, votes, kv_dtype):
    """The plan is filled again while they grow."""
    problem, reference = make_problem(kv_dtype, votes=votes), get_kernels("reference").lists
    exact = problem.kv._replace(k=problem.kv.k.float(), v=problem.kv.v.float())
    news, plan = [0, 9, 30], None
    indptr, q = [0, 0, 9, 39], torch.randn(39, HEADS, 4, 64).half()
    for _ in range(2):
        asked = problem.tables, problem.rows, problem.dense, LAYERS, HEADS
        plan, expected = kernels.lists.plan(*asked, into=plan), reference.plan(*asked)
        for layer in range(LAYERS):
            some = q[: len(news)]
            got = kernels.lists.decode(some, problem.kv, plan, layer, 0.2)
            wanted = reference.decode(some.float(), exact, expected, layer, 0.2)
            assert_states_equal(got, wanted, torch.float16)
            got = kernels.lists.extend(q, indptr, problem.kv, plan, layer, 0.2)
            wanted = reference.extend(q.float(), indptr, exact, expected, layer, 0.2)
            assert_states_equal(got, wanted, torch.float16)
        problem.grow()
    assert made


@needs_compiler
@without_gpu
def test_lists_that_flashinfer_cannot_read_are_served_all_the_same(kernels, made):
    """Float32, and the rows of several tokens as one group with votes of four heads."""
    for dtype, group in ((torch.float32, 4), (torch.float16, 12)):
        problem, reference = make_problem(dtype, votes=(4,)), get_kernels("reference").lists
        exact = problem.kv._replace(k=problem.kv.k.float(), v=problem.kv.v.float())
        asked = problem.tables, problem.rows, problem.dense, LAYERS, HEADS
        q = torch.randn(3, HEADS, group, 64).to(dtype)
        got = kernels.lists.decode(q, problem.kv, kernels.lists.plan(*asked), 1, 0.2)
        wanted = reference.decode(q.float(), exact, reference.plan(*asked), 1, 0.2)
        assert_states_equal(got, wanted, torch.float16)
    assert not made


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_pages_are_entries_and_rows_without_any_are_known(lengths):
    bounds = [0, *itertools.accumulate(lengths)]
    pages = tables.pages_of(bounds)
    assert pages.indptr.tolist() == bounds
    # FlashInfer's two ways to count: (pages - 1) * page_size + last, and 0 where there are none.
    assert [max(n - 1, 0) + last for n, last in zip(lengths, pages.last_page_len, strict=True)] == (
        lengths
    )
    q_indptr = [0, *itertools.accumulate(range(1, len(lengths) + 1))]
    owners = [i for i in range(len(lengths)) for _ in range(i + 1)]
    expected = [row for row, owner in enumerate(owners) if lengths[owner] == 0]
    assert tables.rows_without_entries(bounds, q_indptr) == expected


def test_a_log_sum_exp_in_base_two_becomes_natural():
    logits = torch.randn(5, 40) * 3
    base_two = torch.log2(torch.exp2(logits * math.log2(math.e)).sum(-1))
    torch.testing.assert_close(tables.natural(base_two), torch.logsumexp(logits, -1))
    assert tables.natural(torch.tensor([float("-inf")])).item() == float("-inf")


def test_votes_are_found_where_the_variant_looks_for_them():
    slots, indptr = torch.arange(9), torch.tensor([0, 9])
    for votes in (torch.randn(9, 6), torch.randn(6, 9).T):
        passed, _, _, *strides, _ = run_arguments(votes, slots, indptr, 1.0)
        assert torch.equal(torch.as_strided(passed, (9, 6), strides), votes)
    one = torch.randn(18)[::2]
    passed, _, _, *strides, _ = run_arguments(one, slots, indptr, 1.0)
    assert torch.equal(torch.as_strided(passed, (9, 6), strides), one[:, None].expand(9, 6))


def test_kv_is_taken_where_it_lies_or_not_at_all():
    q = torch.randn(1, 2, 4, 64).half()
    k, v = make_cache(2, 64, torch.float16)
    assert fits(q, RaggedKV(k, v))
    assert fits(q, RaggedKV(k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)))
    assert fits(q, RaggedKV(*make_cache(2, 64, torch.float16, head_major=True)))
    assert not fits(q, RaggedKV(k, v.bfloat16()))
    assert not fits(q, RaggedKV(k.bfloat16(), v.bfloat16()))
    assert not fits(q.float(), RaggedKV(k.float(), v.float()))
    # One head-major, one slot-major; a slot of 132 bytes; dims that do not lie together.
    assert not fits(q, RaggedKV(k, v.transpose(0, 1).contiguous().transpose(0, 1)))
    assert not is_aligned(torch.zeros(9, 2, 66, dtype=torch.float16)[..., :64])
    assert not is_aligned(torch.zeros(9, 64, 2, dtype=torch.float16).transpose(1, 2))


@without_gpu
def test_a_machine_without_a_gpu_is_told_so():
    with pytest.raises(KernelUnavailableError, match="'flashinfer' needs a CUDA device"):
        get_kernels("flashinfer")


@pytest.mark.parametrize("missing", ["nvcc", "ninja"])
def test_a_machine_that_cannot_compile_is_told_what_it_lacks(missing, monkeypatch, tmp_path):
    from flashinfer.jit import cpp_ext

    from kvtier_kernels.flashinfer_backend import machine

    monkeypatch.setattr(cpp_ext, "get_cuda_path", lambda: str(tmp_path))
    if missing == "ninja":
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvcc").touch()
        monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelUnavailableError, match=missing):
        machine.check_compiler()


@pytest.mark.slow
@pytest.mark.skipif(not (THOROUGH or COMPILED), reason="takes nvcc a minute: TESTS_COMPILED=1")
def test_attention_with_votes_compiles_for_hopper(tmp_path):
    from kvtier_kernels.flashinfer_backend.machine import check_compiler

    try:
        check_compiler()
    except KernelUnavailableError as error:
        pytest.skip(str(error))
    # All variants are the same code but for the type of KV.
    kernel = "batch_prefill_paged_kernel_mask_0.cu"
    one = [] if THOROUGH else ["--kv", "float8_e4m3fn", "--file", kernel]
    # The speed of the code does not matter; nvcc has the flag since 12.8.
    flags = {} if THOROUGH else {"FLASHINFER_EXTRA_CUDAFLAGS": "--Ofast-compile=max"}
    done = subprocess.run(
        [sys.executable, "-m", "kvtier_kernels.flashinfer_backend.ahead", *one],
        capture_output=True,
        text=True,
        env=os.environ | flags | {"FLASHINFER_WORKSPACE_BASE": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert kernel in done.stdout
