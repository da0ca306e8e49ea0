"""Every kernel backend against dense float64 attention over the same ragged entries."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import THOROUGH

from kvtier_kernels import (
    AttentionState,
    HeadMap,
    KernelUnavailableError,
    RaggedKV,
    Window,
    available_kernels,
    get_kernels,
    merge_states,
)

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
    return k, v


def oracle(q, k, v, votes, visible):
    """float64: q [rows, heads, group, dim], k, v [entries, heads, dim], visible [rows, entries],
    votes [entries] or [entries, heads, group]."""
    logits = torch.einsum("rhgd,ehd->rhge", q.double(), k.double()) / math.sqrt(q.shape[-1])
    logits = logits + (votes if votes.ndim == 1 else votes.permute(1, 2, 0)).double()
    logits = logits.masked_fill(~visible[:, None, None, :], float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse[..., None]).nan_to_num()
    return torch.einsum("rhge,ehd->rhgd", weights, v.double()), lse


def assert_close(state, o, lse, dtype):
    torch.testing.assert_close(state.o.double(), o, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(
        state.lse.double(), lse, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


def assert_attends(kernels, q, k_new, v_new, kv, slots, bias, prefixes, news):
    """Decoding and extending of requests, each with so many prefix entries and new tokens.

    kv: its k and v count as q's dtype has them; slots: of all entries, in order; bias: log-votes,
    zeros where kv has none.
    """
    dtype, scale = q.dtype, q.shape[-1] ** -0.5
    k, v = kv.k.to(dtype), kv.v.to(dtype)
    indptr, q_indptr = ([0, *itertools.accumulate(each)] for each in (prefixes, news))
    plan = kernels.plan(slots, indptr, kv.log_votes)
    decoded = kernels.decode(q[: len(prefixes)], kv, plan, scale)
    extended = kernels.extend(q, k_new, v_new, q_indptr, kv, plan, scale)
    for i, (n, m) in enumerate(zip(prefixes, news, strict=True)):
        own, part = slots[indptr[i] : indptr[i + 1]], slice(q_indptr[i], q_indptr[i + 1])
        everything = torch.ones(1, n, dtype=torch.bool)
        o, lse = oracle(q[i : i + 1], k[own], v[own], bias[own], everything)
        assert_close(AttentionState(decoded.o[i : i + 1], decoded.lse[i : i + 1]), o, lse, dtype)
        keys, values = torch.cat([k[own], k_new[part]]), torch.cat([v[own], v_new[part]])
        votes_of = torch.cat([bias[own], torch.zeros(m, *bias.shape[1:])])
        visible = torch.arange(n + m)[None, :] <= (n + torch.arange(m))[:, None]
        o, lse = oracle(q[part], keys, values, votes_of, visible)
        assert_close(AttentionState(extended.o[part], extended.lse[part]), o, lse, dtype)


@backends
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("layout", ["slot-major", "head-major"])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(
    ("heads", "group", "dim"), [(1, 1, 64), (3, 2, 32), (2, 7, 128), (1, 16, 256)]
)
def test_decode_equals_dense_attention(name, dtype, layout, per_head, heads, group, dim):
    torch.manual_seed(heads * 100 + group)
    kernels = get_kernels(name)
    k, v = make_cache(heads, dim, dtype, layout=layout)
    lengths = [1, 7, 300, 999]
    slots = torch.randperm(2999)[: sum(lengths)] + 1
    slots[8:308] = torch.arange(1500, 1800)  # one request is a contiguous run
    indptr = [0, 1, 8, 308, 1307]
    votes = torch.zeros(3000, heads, group) if per_head else torch.zeros(3000)
    votes[slots[::11]] = torch.rand(votes[slots[::11]].shape) * 20 - 10
    q = torch.randn(4, heads, group, dim).to(dtype)
    plan = kernels.plan(slots, indptr, votes)
    state = kernels.decode(q, RaggedKV(k, v, votes), plan, dim**-0.5)
    for i in range(4):
        own = slots[indptr[i] : indptr[i + 1]]
        everything = torch.ones(1, len(own), dtype=torch.bool)
        o, lse = oracle(q[i : i + 1], k[own], v[own], votes[own], everything)
        assert_close(type(state)(state.o[i : i + 1], state.lse[i : i + 1]), o, lse, dtype)


@backends
@pytest.mark.parametrize("heads", [(1,), (0, 3), (2, 3, 5), (0, 1, 2, 3, 4, 5)])
@pytest.mark.parametrize("prefix", [0, 900])
def test_a_class_reads_and_writes_its_heads_of_a_layer_in_place(name, heads, prefix):
    torch.manual_seed(prefix + len(heads))
    kernels, dtype = get_kernels(name), torch.float32
    k, v = make_cache(len(heads), 32, dtype)
    kv = RaggedKV(k, v, torch.rand(3000))
    every = HeadMap(heads, torch.tensor(heads))
    q_indptr, indptr = [0, 5, 25], [0, prefix, prefix + 70]
    plan = kernels.plan(torch.randperm(2999)[: indptr[-1]] + 1, indptr, kv.log_votes)
    q, k_new, v_new = torch.randn(25, 6, 2, 32), *torch.randn(2, 25, 6, 32)
    ours = (every.select(x) for x in (q, k_new, v_new))
    others = [head for head in range(6) if head not in heads]

    out = torch.full_like(q, 7.0)
    kernels.extend_heads(q, k_new, v_new, q_indptr, kv, plan, 0.2, every, out)
    state = kernels.extend(*ours, q_indptr, kv, plan, 0.2)
    torch.testing.assert_close(every.select(out), state.o, rtol=0, atol=0)
    assert (out[:, others] == 7.0).all()

    out = torch.full_like(q[:2], 7.0)
    kernels.decode_heads(q[:2], kv, plan, 0.2, every, out)
    state = kernels.decode(every.select(q[:2]), kv, plan, 0.2)
    torch.testing.assert_close(every.select(out), state.o, rtol=0, atol=0)
    assert (out[:, others] == 7.0).all()

    slots = torch.randperm(3000)[:25]
    untouched = torch.ones(3000, dtype=torch.bool).index_fill_(0, slots, value=False)
    before = k[untouched].clone(), v[untouched].clone()
    kernels.store(k_new, v_new, kv, slots, every)
    torch.testing.assert_close(k[slots], every.select(k_new), rtol=0, atol=0)
    torch.testing.assert_close(v[slots], every.select(v_new), rtol=0, atol=0)
    torch.testing.assert_close((k[untouched], v[untouched]), before, rtol=0, atol=0)


@backends
def test_a_request_without_entries_gets_the_empty_state(name):
    kernels = get_kernels(name)
    k, v = make_cache(2, 32, torch.float32)
    plan = kernels.plan(torch.tensor([5, 6], dtype=torch.int64), [0, 0, 2])
    state = kernels.decode(torch.randn(2, 2, 2, 32), RaggedKV(k, v), plan, 1.0)
    assert torch.isinf(state.lse[0]).all()
    assert (state.o[0] == 0).all()
    assert torch.isfinite(state.lse[1]).all()


@backends
@settings(max_examples=25 if THOROUGH else 8)
@given(
    prefixes=st.lists(st.integers(0, 700), min_size=1, max_size=4),
    news=st.lists(st.integers(1, 90), min_size=4, max_size=4),
    per_head=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_extend_equals_dense_attention_over_prefix_and_causal_tail(
    name, prefixes, news, per_head, seed
):
    torch.manual_seed(seed)
    kernels, dtype = get_kernels(name), torch.float32
    heads, group, dim = 2, 3, 32
    news = news[: len(prefixes)]
    k, v = make_cache(heads, dim, dtype)
    starts = [1 + 700 * i for i in range(len(prefixes))]
    rows = [torch.arange(s, s + n) for s, n in zip(starts, prefixes, strict=True)]
    slots, indptr, q_indptr = torch.cat(rows), [0], [0]
    for n, m in zip(prefixes, news, strict=True):
        indptr.append(indptr[-1] + n)
        q_indptr.append(q_indptr[-1] + m)
    votes = torch.zeros(3000, heads, group) if per_head else torch.zeros(3000)
    votes[1] = math.log(17.0)
    votes[100:150:7] = torch.randn(votes[100:150:7].shape)
    q = torch.randn(q_indptr[-1], heads, group, dim)
    k_new, v_new = torch.randn(2, q_indptr[-1], heads, dim)
    plan = kernels.plan(slots, indptr, votes)
    state = kernels.extend(q, k_new, v_new, q_indptr, RaggedKV(k, v, votes), plan, dim**-0.5)
    for i, (n, m) in enumerate(zip(prefixes, news, strict=True)):
        part = slice(q_indptr[i], q_indptr[i + 1])
        keys = torch.cat([k[rows[i]], k_new[part]])
        values = torch.cat([v[rows[i]], v_new[part]])
        bias = torch.cat([votes[rows[i]], torch.zeros(m, *votes.shape[1:])])
        visible = torch.arange(n + m)[None, :] <= (n + torch.arange(m))[:, None]
        o, lse = oracle(q[part], keys, values, bias, visible)
        assert_close(type(state)(state.o[part], state.lse[part]), o, lse, dtype)


@backends
@pytest.mark.parametrize("layout", ["slot-major", "head-major"])
@pytest.mark.parametrize("votes", ["none", "per entry", "per head"])
def test_half_precision_with_and_without_a_prefix(name, votes, layout):
    """What backends have kernels of their own for: decoding and extending of mixed lengths."""
    torch.manual_seed(11)
    kernels, dtype = get_kernels(name), torch.bfloat16
    heads, group, dim = 2, 4, 128
    prefixes, news = [0, 1, 2000, 130], [70, 1, 5, 33]
    k, v = make_cache(heads, dim, dtype, layout=layout)
    slots = torch.randperm(2999)[: sum(prefixes)] + 1
    # Small ones: the reference rounds them to bfloat16.
    bias = torch.rand(3000, heads, group) * 6 - 3
    bias = {"none": torch.zeros(3000), "per entry": bias[:, 0, 0], "per head": bias}[votes]
    kv = RaggedKV(k, v, None if votes == "none" else bias)
    q = torch.randn(sum(news), heads, group, dim).to(dtype)
    k_new, v_new = torch.randn(2, sum(news), heads, dim).to(dtype)
    assert_attends(kernels, q, k_new, v_new, kv, slots, bias, prefixes, news)


@backends
@settings(max_examples=25 if THOROUGH else 8)
@given(
    settled=st.integers(0, 300),
    fresh=st.integers(0, 400),
    new=st.integers(1, 1200 if THOROUGH else 700),
    sink=st.integers(0, 40),
    recent=st.integers(1, 200),
    seed=st.integers(0, 1000),
)
def test_streaming_extend_sees_settled_entries_sinks_and_the_window(
    name, settled, fresh, new, sink, recent, seed
):
    torch.manual_seed(seed)
    kernels, dtype = get_kernels(name), torch.float32
    heads, group, dim = 2, 2, 32
    prefix = settled + fresh
    k, v = make_cache(heads, dim, dtype)
    slots, positions = torch.arange(1, prefix + 1), torch.arange(prefix)
    window = Window(sink, recent, [prefix], positions, positions < settled)
    q = torch.randn(new, heads, group, dim)
    k_new, v_new = torch.randn(2, new, heads, dim)
    plan = kernels.plan(slots, [0, prefix])
    state = kernels.extend(q, k_new, v_new, [0, new], RaggedKV(k, v), plan, dim**-0.5, window)
    t, p = torch.arange(prefix + new)[None, :], (prefix + torch.arange(new))[:, None]
    visible = (t <= p) & ((t < settled) | (t < sink) | (t > p - recent))
    keys, values = torch.cat([k[slots], k_new]), torch.cat([v[slots], v_new])
    o, lse = oracle(q, keys, values, torch.zeros(prefix + new), visible)
    assert_close(state, o, lse, dtype)


@backends
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(("new", "length"), [(1, 9001), (5, 9001), (3, 2048)])
def test_few_tokens_over_a_long_prefix_give_dense_attention(name, new, length, per_head):
    """Where a backend may cut the prefix in pieces."""
    torch.manual_seed(new)
    kernels = get_kernels(name)
    heads, group, dim = 2, 3, 64
    k, v = make_cache(heads, dim, torch.float32, slots=length + 1)
    slots = torch.randperm(length) + 1
    votes = torch.rand(length + 1, heads, group) if per_head else torch.rand(length + 1)
    votes = votes * 20 - 10
    q = torch.randn(new, heads, group, dim)
    k_new, v_new = torch.randn(2, new, heads, dim)
    plan = kernels.plan(slots, [0, length], votes)
    kv = RaggedKV(k, v, votes)
    state = kernels.extend(q, k_new, v_new, [0, new], kv, plan, dim**-0.5)
    visible = torch.arange(length + new)[None, :] <= (length + torch.arange(new))[:, None]
    bias = torch.cat([votes[slots], torch.zeros(new, *votes.shape[1:])])
    o, lse = oracle(q, torch.cat([k[slots], k_new]), torch.cat([v[slots], v_new]), bias, visible)
    assert_close(state, o, lse, torch.float32)


@backends
def test_one_request_of_very_many_entries_spoils_nothing_for_short_and_empty_ones(name):
    torch.manual_seed(7)
    kernels = get_kernels(name)
    heads, group, dim = 1, 4, 64
    # In the interpreter it would take long.
    longest = 1 << (15 if name == "triton" and not (THOROUGH or torch.cuda.is_available()) else 17)
    lengths = [3, longest, 0, 1, 257]
    total = sum(lengths)
    k, v = make_cache(heads, dim, torch.float32, slots=total + 1)
    slots = torch.randperm(total) + 1
    indptr = [0, *itertools.accumulate(lengths)]
    q = torch.randn(len(lengths), heads, group, dim)
    state = kernels.decode(q, RaggedKV(k, v), kernels.plan(slots, indptr), dim**-0.5)
    for i, length in enumerate(lengths):
        own = slots[indptr[i] : indptr[i + 1]]
        everything = torch.ones(1, length, dtype=torch.bool)
        o, lse = oracle(q[i : i + 1], k[own], v[own], torch.zeros(length), everything)
        assert_close(type(state)(state.o[i : i + 1], state.lse[i : i + 1]), o, lse, torch.float32)


@backends
def test_a_class_in_which_no_request_has_entries_gives_empty_states(name):
    kernels = get_kernels(name)
    k, v = make_cache(2, 32, torch.float32)
    nothing = torch.empty(0, dtype=torch.int64)
    state = kernels.decode(
        torch.randn(3, 2, 2, 32), RaggedKV(k, v), kernels.plan(nothing, [0] * 4), 1.0
    )
    assert torch.isinf(state.lse).all()
    assert (state.o == 0).all()


@backends
@settings(max_examples=20)
@given(rows=st.integers(1, 40), gaps=st.integers(0, 3), seed=st.integers(0, 1000))
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
