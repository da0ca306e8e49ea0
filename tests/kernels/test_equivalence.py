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
from kvtier_kernels.triton_backend.attention import tiles

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


@pytest.fixture
def short_splits(monkeypatch):
    """Have the Triton backend cut a prefix that its interpreter is done with soon."""
    monkeypatch.setattr(tiles, "LEAST_SPLIT", 128)


def make_cache(heads, dim, dtype, *, slots=3000, layout="slot-major"):
    shape = (slots, heads, dim) if layout == "slot-major" else (heads, slots, dim)
    k, v = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    if layout == "head-major":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    return k, v


def oracle(q, k, v, visible):
    """float64: q [rows, heads, group, dim], k, v [entries, heads, dim], visible [rows, entries]."""
    logits = torch.einsum("rhgd,ehd->rhge", q.double(), k.double()) / math.sqrt(q.shape[-1])
    logits = logits.masked_fill(~visible[:, None, None, :], float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse[..., None])
    return torch.einsum("rhge,ehd->rhgd", weights, v.double()), lse


def assert_close(state, o, lse, dtype):
    torch.testing.assert_close(state.o.double(), o, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(
        state.lse.double(), lse, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


def assert_extends(kernels, q, k_new, v_new, kv, slots, prefixes, news):
    """Extending of requests, each with so many prefix entries and new tokens.

    kv: its k and v count as q's dtype has them; slots: of all entries, in order.
    """
    dtype, scale = q.dtype, q.shape[-1] ** -0.5
    k, v = kv.k.to(dtype), kv.v.to(dtype)
    indptr, q_indptr = ([0, *itertools.accumulate(each)] for each in (prefixes, news))
    state = kernels.extend(q, k_new, v_new, q_indptr, kv, kernels.plan(slots, indptr), scale)
    for i, (n, m) in enumerate(zip(prefixes, news, strict=True)):
        own, part = slots[indptr[i] : indptr[i + 1]], slice(q_indptr[i], q_indptr[i + 1])
        keys, values = torch.cat([k[own], k_new[part]]), torch.cat([v[own], v_new[part]])
        visible = torch.arange(n + m)[None, :] <= (n + torch.arange(m))[:, None]
        o, lse = oracle(q[part], keys, values, visible)
        assert_close(AttentionState(state.o[part], state.lse[part]), o, lse, dtype)


@backends
@pytest.mark.parametrize(
    ("dtype", "layout", "heads", "group", "dim"),
    [
        (torch.float32, "slot-major", 3, 2, 32),
        (torch.float32, "head-major", 2, 7, 128),
        (torch.bfloat16, "slot-major", 2, 7, 128),
        (torch.bfloat16, "head-major", 1, 1, 64),
        (torch.float16, "slot-major", 1, 16, 256),
        (torch.float16, "head-major", 3, 2, 32),
    ],
)
def test_extend_equals_dense_attention(name, dtype, layout, heads, group, dim):
    """The lengths are mixed. A layout is but strides, so that no shape of a dtype comes up in
    both."""
    torch.manual_seed(heads * 100 + group)
    prefixes, news = [0, 1, 130, 70], [20, 1, 5, 13]
    k, v = make_cache(heads, dim, dtype, layout=layout)
    slots = torch.randperm(2999)[: sum(prefixes)] + 1
    q = torch.randn(sum(news), heads, group, dim).to(dtype)
    k_new, v_new = torch.randn(2, sum(news), heads, dim).to(dtype)
    assert_extends(get_kernels(name), q, k_new, v_new, RaggedKV(k, v), slots, prefixes, news)


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
    heads, group, dim = 2, 3, 32
    news = news[: len(prefixes)]
    kv = RaggedKV(*make_cache(heads, dim, torch.float32))
    starts = [1 + 200 * i for i in range(len(prefixes))]
    slots = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, prefixes, strict=True)])
    q = torch.randn(sum(news), heads, group, dim)
    k_new, v_new = torch.randn(2, sum(news), heads, dim)
    assert_extends(get_kernels(name), q, k_new, v_new, kv, slots, prefixes, news)


@backends
@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize(("new", "length"), [(1, 900), (2, 890)])
def test_few_tokens_over_a_long_prefix_give_dense_attention(name, new, length):
    """A backend may cut the prefix in pieces: the last of eight has few entries, or none."""
    torch.manual_seed(new)
    heads, group, dim = 2, 3, 64
    kv = RaggedKV(*make_cache(heads, dim, torch.float32, slots=length + 1))
    slots = torch.randperm(length) + 1
    q = torch.randn(new, heads, group, dim)
    k_new, v_new = torch.randn(2, new, heads, dim)
    assert_extends(get_kernels(name), q, k_new, v_new, kv, slots, [length], [new])


@backends
@pytest.mark.usefixtures("short_splits")
def test_one_request_of_very_many_entries_spoils_nothing_for_short_and_empty_ones(name):
    torch.manual_seed(7)
    # In the interpreter it would take long.
    longest = 1 << (10 if name == "triton" and not (THOROUGH or torch.cuda.is_available()) else 17)
    prefixes, news = [3, longest, 0, 1, 257], [1, 2, 1, 1, 3]
    kv = RaggedKV(*make_cache(1, 64, torch.float32, slots=sum(prefixes) + 1))
    slots = torch.randperm(sum(prefixes)) + 1
    q = torch.randn(sum(news), 1, 4, 64)
    k_new, v_new = torch.randn(2, sum(news), 1, 64)
    assert_extends(get_kernels(name), q, k_new, v_new, kv, slots, prefixes, news)


@backends
@pytest.mark.parametrize("layout", ["slot-major", "head-major"])
def test_new_tokens_are_written_into_their_slots(name, layout):
    torch.manual_seed(5)
    k, v = make_cache(3, 32, torch.float32, layout=layout)
    new = torch.randn(25, 3, 64)
    slots = torch.randperm(3000)[:25]
    untouched = torch.ones(3000, dtype=torch.bool).index_fill_(0, slots, value=False)
    before = k[untouched].clone(), v[untouched].clone()
    # Rows of one product, as a model has them.
    get_kernels(name).store(new[..., :32], new[..., 32:], RaggedKV(k, v), slots)
    torch.testing.assert_close((k[slots], v[slots]), new.split(32, -1), rtol=0, atol=0)
    torch.testing.assert_close((k[untouched], v[untouched]), before, rtol=0, atol=0)


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
