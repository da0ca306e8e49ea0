"""A step's parts, from names of kernels that an H200 ran and from a trace that is made up."""

from __future__ import annotations

import gzip
import json

import pytest

from benchmarks.gpu.step_parts import (
    ATTENTION,
    ELEMENTWISE,
    IDLE,
    PRODUCTS,
    STORING,
    Ran,
    kind_of,
    lines,
    parts_of,
    read_trace,
)

# The kernels of a profile of both policies there, with torch 2.11 and CUDA 13, and names of ours.
RECORDED = {
    ATTENTION: [
        "decode_units", "merge_parts", "extend_blocks", "count_kept",
        "attend_stretch", "merge_lists", "deal_pages",
    ],
    PRODUCTS: [
        "nvjet_sm90_tst_128x8_64x12_2x1_v_bz_TNT",
        "nvjet_sm90_tst_128x8_64x12_2x1_v_bz_splitK_TNT",
        "nvjet_sm90_tst_256x8_64x6_2x1_v_bz_TNT",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_",
    ],
    STORING: [
        "store_entries",
        "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native"
        "::index_put_kernel_impl<at::native::OpaqueType<2> >(at::TensorIterator&, c10::",
    ],
    ELEMENTWISE: [
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<at::native::(anony",
        "void at::native::(anonymous namespace)::indexSelectSmallIndex<float, long, unsigned int, ",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<fl",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::Tens"
        "orIteratorBase&)::{lambda()#3}, at::native::memory::StoreWithCast<1> >",
        "void at::native::vectorized_elementwise_kernel<4, at::native::rsqrt_kernel_cuda(at::Tenso",
        "rms_norm", "silu_and_mul", "rotate_halves", "Memcpy DtoD (Device -> Device)",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for kind, names in RECORDED.items() for name in names]
)
def test_kernels_are_sorted_by_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def step(at: float) -> list[Ran]:
    """100 us: two products with a sum between them, attention of two streams of which 10 us
    overlap, 5 us after the last product that belong to the next step, and 25 us of nothing."""
    return [
        Ran("nvjet_a", at, at + 20),
        Ran("splitKreduce", at + 20, at + 22),
        Ran("decode_units", at + 22, at + 42),
        Ran("decode_units", at + 32, at + 52),
        Ran("store_entries", at + 52, at + 55),
        Ran("nvjet_b", at + 60, at + 70),
        Ran("argmax", at + 70, at + 75),
    ]


def test_parts_of_whole_steps_add_up_to_a_step() -> None:
    # The trace has a prefill that still ran, and three steps.
    ran = [Ran("nvjet_p", -30, -20), *(one for k in range(3) for one in step(100 * k))]
    found = parts_of(ran, products=2)
    assert (found["steps"], found["step_ms"]) == (2, pytest.approx(0.1))
    us = {part: 1000 * ms for part, ms in found["parts_ms"].items()}
    assert us == {
        ATTENTION: pytest.approx(30), PRODUCTS: pytest.approx(32), STORING: pytest.approx(3),
        ELEMENTWISE: pytest.approx(5), IDLE: pytest.approx(30),
    }  # fmt: skip
    assert found["kernels"] == 7
    assert found["longest"][0] == {
        "name": "decode_units", "ms": pytest.approx(0.04), "launches": pytest.approx(2),
    }  # fmt: skip


def test_where_no_two_steps_were_seen_there_are_no_parts() -> None:
    assert parts_of([], products=2) == {"steps": 0}
    assert parts_of(step(0), products=2) == {"steps": 0}
    assert lines({"full": {"failed": "x"}, "kvtier": {"step": {"steps": 0}}}) == [
        "no step of decoding was seen on a device"
    ]


def test_a_trace_has_what_ran_on_the_device_in_order(tmp_path) -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": "b", "ts": 7, "dur": 2},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2},
        {"ph": "X", "cat": "gpu_memcpy", "name": "a", "ts": 3, "dur": 1},
        {"ph": "M", "name": "process_name"},
    ]
    file = tmp_path / "x.trace.json.gz"
    with gzip.open(file, "wt") as stream:
        json.dump({"traceEvents": events}, stream)
    assert read_trace(file) == [Ran("a", 3, 4), Ran("b", 7, 9)]


def test_the_table_has_a_column_for_each_policy() -> None:
    ran = [one for k in range(3) for one in step(100 * k)]
    seen = {"step": parts_of(ran, products=2), "tpot_s": 0.0123}
    table = lines({"full": seen, "kvtier": {"failed": "no room"}, "adaptive": seen})
    assert table[0].split()[-2:] == ["full", "adaptive"]
    (time,) = [line for line in table if line.startswith("time per token")]
    assert time.split()[-2:] == ["12.30", "12.30"]
