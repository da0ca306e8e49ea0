"""Every kernel backend against dense float64 attention over the same ragged entries."""

import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from thorough import THOROUGH

from kvtier_kernels import (
    AttentionState,
    KernelUnavailableError,
    RaggedKV,
    available_kernels,
    get_kernels,
    merge_states,
)
from kvtier_kernels.fp8 import FP8_DTYPES, as_stored
from kvtier_kernels.triton_backend.attention import tiles

E4M3, E5M2 = FP8_DTYPES
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def runnable(name):
    """The backend's name, to be skipped where this machine lacks what it needs."""
    try:
        get_kernels(name)
    except KernelUnavailableError as error:
        return pytest.param(name, marks=pytest.mark.skip(reason=str(error)))
    return name


backends = pytest.mark.parametrize("name", [runnable(name) for name in available_kernels()])


@pytest.fixture(autouse=True)
def device():
    with torch.device(DEVICE):
        yield


def make_cache(heads, dim, dtype, *, slots=3000, layout="slot-major"):
    shape = (slots, heads, dim) if layout == "slot-major" else (heads, slots, dim)
    k, v = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    if layout == "head-major":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    return RaggedKV(k, v)


def oracle(q, k, v, visible):
    """float64: q [rows, heads, group, dim], k, v [entries, heads, dim], visible [rows, entries]."""
    logits = torch.einsum("rhgd,ehd->rhge", q.double(), k.double()) / math.sqrt(q.shape[-1])
    logits = logits.masked_fill(~visible[:, None, None, :], float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse[..., None])
    return torch.einsum("rhge,ehd->rhgd", weights, v.double()), lse


def assert_extends(kernels, kv, group, dtype, prefixes, news, *, slots=None, tolerance=TOLERANCE):
    """Extending of requests, each with so many prefix entries and new tokens. slots: of all
    entries, in order; random ones by default. Returns the plan."""
    if slots is None:
        slots = torch.randperm(len(kv.k) - 1)[: sum(prefixes)] + 1
    heads, dim = kv.k.shape[1:]
    q = torch.randn(sum(news), heads, group, dim).to(dtype)
    new = torch.randn(2, sum(news), heads, dim)
    # A cache of one byte a number has rounded what new tokens see of each other, too.
    rounded = as_stored(new, kv.k.dtype, 1.0) if kv.k.dtype in FP8_DTYPES else new
    k_new, v_new = rounded.to(dtype)
    k, v = kv.k.to(dtype), kv.v.to(dtype)
    indptr, q_indptr = ([0, *itertools.accumulate(each)] for each in (prefixes, news))
    plan = kernels.plan(slots, indptr)
    state = kernels.extend(q, k_new, v_new, q_indptr, kv, plan, dim**-0.5)
    limit = {"rtol": tolerance[dtype], "atol": tolerance[dtype]}
    for i, (n, m) in enumerate(zip(prefixes, news, strict=True)):
        own, part = slots[indptr[i] : indptr[i + 1]], slice(q_indptr[i], q_indptr[i + 1])
        keys, values = torch.cat([k[own], k_new[part]]), torch.cat([v[own], v_new[part]])
        visible = torch.arange(n + m)[None, :] <= (n + torch.arange(m))[:, None]
        o, lse = oracle(q[part], keys, values, visible)
        torch.testing.assert_close(state.o[part].double(), o, **limit)
        torch.testing.assert_close(state.lse[part].double(), lse, **limit)
    return plan


@backends
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "layout", "heads", "group", "dim"),
    [
        (torch.float32, torch.float32, "slot-major", 3, 2, 32),
        (torch.float32, torch.float32, "head-major", 2, 7, 128),
        (torch.bfloat16, torch.bfloat16, "slot-major", 2, 7, 128),
        (torch.bfloat16, torch.bfloat16, "head-major", 1, 1, 64),
        (torch.float16, torch.float16, "slot-major", 1, 16, 256),
        (torch.float16, torch.float16, "head-major", 3, 2, 32),
        (torch.float16, E4M3, "slot-major", 2, 4, 64),
        (torch.float16, E5M2, "slot-major", 2, 4, 64),
        (torch.float32, E4M3, "slot-major", 2, 4, 64),
        (torch.float32, E5M2, "slot-major", 2, 4, 64),
    ],
)
def test_extend_equals_dense_attention(name, dtype, kv_dtype, layout, heads, group, dim):
    """The lengths are mixed. A layout is but strides, so that no shape of a dtype comes up in
    both."""
    torch.manual_seed(heads * 100 + group)
    kv = make_cache(heads, dim, kv_dtype, layout=layout)
    assert_extends(get_kernels(name), kv, group, dtype, [0, 1, 130, 70], [20, 1, 5, 13])


@backends
@settings(max_examples=25 if THOROUGH else 4)
@given(
    prefixes=st.lists(st.integers(0, 200), min_size=1, max_size=3),
    news=st.lists(st.integers(1, 40), min_size=3, max_size=3),
    seed=st.integers(0, 1000),
)
# More of both than a tile has.
@example(prefixes=[130, 0], news=[70, 1, 1], seed=0)
def test_extend_equals_dense_attention_over_prefix_and_causal_tail(name, prefixes, news, seed):
    torch.manual_seed(seed)
    kv = make_cache(2, 32, torch.float32)
    assert_extends(get_kernels(name), kv, 3, torch.float32, prefixes, news[: len(prefixes)])


# In the interpreter very many entries take long: there it is no more than this.
MANY = 1 << 10


@backends
@pytest.mark.parametrize(
    ("prefixes", "news", "dim", "tile"),
    [([900], [1], 64, 64), ([890], [2], 64, 64), ([3, MANY, 0, 1, 257], [1, 2, 1, 1, 3], 64, 64),
     ([0, 40, 17], [3, 19, 5], 32, 16)],
    ids=["with a short last split", "with an empty last split", "beside others", "by small tiles"],
)  # fmt: skip
def test_a_prefix_is_cut_without_a_difference(monkeypatch, name, prefixes, news, dim, tile):
    """Splits spoil nothing for short and empty requests. The interpreter's tile is larger than a
    GPU's; with the GPU's, rows and entries of a request are in several tiles."""
    monkeypatch.setattr(tiles, "LEAST_SPLIT", 128)
    monkeypatch.setattr(tiles, "INTERPRETED_TILE", tile)
    if name != "triton" or THOROUGH or torch.cuda.is_available():
        prefixes = [1 << 17 if length == MANY else length for length in prefixes]
    torch.manual_seed(7)
    kv = make_cache(2, dim, torch.float32, slots=sum(prefixes) + 2)
    assert_extends(get_kernels(name), kv, 4, torch.float32, prefixes, news)


@backends
@pytest.mark.parametrize("layout", ["slot-major", "head-major"])
@pytest.mark.parametrize("dtype", [torch.float32, *FP8_DTYPES], ids=str)
def test_new_tokens_are_written_into_their_slots(name, layout, dtype):
    torch.manual_seed(5)
    kv = make_cache(3, 32, dtype, layout=layout)
    new = as_stored(torch.randn(25, 3, 64), dtype, 1.0)
    slots = torch.randperm(3000)[:25]
    expected = [side.float().clone() for side in kv]
    for side, wanted in zip(expected, new.split(32, -1), strict=True):
        side[slots] = wanted
    # Rows of one product, as a model has them.
    get_kernels(name).store(new[..., :32], new[..., 32:], kv, slots)
    assert all(torch.equal(side.float(), full) for side, full in zip(kv, expected, strict=True))


@backends
@settings(max_examples=20)
@given(rows=st.integers(1, 10), gaps=st.integers(0, 3), seed=st.integers(0, 1000))
def test_merging_states_in_a_backend_is_merging_states(name, rows, gaps, seed):
    torch.manual_seed(seed)
    shape = (rows, 2, 3, 48)
    a, b = (AttentionState(torch.randn(shape), 5 * torch.randn(shape[:-1])) for _ in range(2))
    for state, at in ((a, gaps), (b, 2 * gaps)):
        state.lse[:at] = float("-inf")
        state.o[:at] = 0
    got, expected = get_kernels(name).merge_states(a, b), merge_states(a, b)
    torch.testing.assert_close(got.o, expected.o, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.lse, expected.lse, rtol=1e-5, atol=1e-5)
