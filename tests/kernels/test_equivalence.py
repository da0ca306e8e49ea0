"""Every kernel backend against dense float64 attention over the same ragged entries."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_kernels import (
    KernelUnavailableError,
    RaggedKV,
    Window,
    available_kernels,
    get_kernels,
)
from kvtier_kernels.slots import plan_request

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}

backends = pytest.mark.parametrize("name", available_kernels())


def make_cache(heads, dim, dtype, slots=3000, layout="slot-major"):
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
def test_a_request_without_entries_gets_the_empty_state(name):
    kernels = get_kernels(name)
    k, v = make_cache(2, 32, torch.float32)
    plan = kernels.plan(torch.tensor([5, 6], dtype=torch.int64), [0, 0, 2])
    state = kernels.decode(torch.randn(2, 2, 2, 32), RaggedKV(k, v), plan, 1.0)
    assert torch.isinf(state.lse[0]).all()
    assert (state.o[0] == 0).all()
    assert torch.isfinite(state.lse[1]).all()


@backends
@settings(max_examples=25, deadline=None)
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
@settings(max_examples=25, deadline=None)
@given(
    settled=st.integers(0, 300),
    fresh=st.integers(0, 400),
    new=st.integers(1, 1200),
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


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=0, max_size=60, unique=True), st.integers(2, 6))
def test_a_plan_covers_every_slot_once_and_leaves_votes_out_of_runs(slots, min_run):
    table = torch.tensor(slots, dtype=torch.int64)
    votes = torch.zeros(61)
    votes[::7] = 2.0
    plan = plan_request(table, votes, min_run)
    covered = [s for a, b in plan.runs for s in range(a, b)]
    loose = [] if plan.scattered is None else plan.scattered.tolist()
    assert sorted(covered + loose) == sorted(slots)
    assert all(votes[s] == 0 for s in covered)
    assert all(b - a >= min_run for a, b in plan.runs)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_without_a_tiled_operator_is_the_same_in_blocks(monkeypatch, causal):
    from kvtier_kernels import reference

    q, k, v = torch.randn(3, 1, 2, 70, 16)
    mask = None if causal else torch.randn(1, 1, 70, 70)
    expected = reference._flash(q, k, v, 0.3, causal, mask)
    monkeypatch.setattr(reference, "BLOCK_LOGITS", 2 * 70 * 16)
    got = reference._blockwise(q, k, v, 0.3, causal, mask)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_an_unknown_backend_lists_the_valid_ones():
    with pytest.raises(KernelUnavailableError, match="reference"):
        get_kernels("magic")
