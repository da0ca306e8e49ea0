"""Drafted tokens: what they go together with, who sees whom, and SGLang's functions of indices as
they are on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plugin import TIERED, server_args

from kvtier.config import load_settings
from kvtier.errors import IncompatibleFlagError
from kvtier.heads.profile import ModelShape
from kvtier_kernels import CellKV, ListTables, get_kernels
from kvtier_sglang import compat, cpu_drafts
from kvtier_sglang.attention import drafts
from kvtier_sglang.attention.drafts import fold, over_branches, tree_masks, unfold
from kvtier_sglang.pool.kv_pool import HeadPagedKVPool


def test_what_does_not_go_together_with_drafts_is_refused():
    arguments = server_args(speculative_algorithm="NGRAM")
    compat.check_server_args(arguments, load_settings(**TIERED, refresh="turn", merge="keepkv"))
    expected = "^--speculative-algorithm: expected none together with kvtier and --refresh N"
    with pytest.raises(IncompatibleFlagError, match=expected):
        compat.check_server_args(arguments, load_settings(**TIERED, refresh="8"))


@st.composite
def trees(draw, most: int = 9) -> list[int]:
    """Each draft's parent, the root's -1."""
    count = draw(st.integers(1, most))
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, count))]


def mask_of(parents: list[int]) -> torch.Tensor:
    """Return which drafts each draft sees: itself and those above."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def padded(some: list[list[int]]) -> list[list[int]]:
    """Trees of one size, as SGLang's are: more children of the root at the end."""
    most = max(map(len, some))
    return [[*one, *[0] * (most - len(one))] for one in some]


cpu_drafts.make_importable()
several = st.lists(trees(), min_size=1, max_size=4).map(padded)


@given(parents=several, seed=st.integers(0, 1000))
def test_both_of_sglangs_masks_say_who_sees_whom(parents, seed):
    masks = torch.stack([mask_of(one) for one in parents])
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 7, (len(parents),), generator=generator)
    whole = [
        torch.cat([torch.ones(len(mask), int(length), dtype=torch.bool), mask], dim=1).flatten()
        for mask, length in zip(masks, lengths, strict=True)
    ]
    for form in (torch.cat(whole), masks.flatten()):
        info = SimpleNamespace(draft_token_num=len(parents[0]), custom_mask=form)
        batch = SimpleNamespace(spec_info=info, seq_lens=lengths)
        assert torch.equal(tree_masks(batch), masks)


@settings(max_examples=15)
@given(
    parents=several,
    name=st.sampled_from(["reference", "triton"]),
    most=st.sampled_from([3, 128]),
    seed=st.integers(0, 1000),
)
def test_a_draft_sees_its_prefix_and_its_branch(parents, name, most, seed):
    torch.manual_seed(seed)
    kernels, (heads, group, dim) = get_kernels(name), (2, 2, 32)
    masks = torch.stack([mask_of(one) for one in parents])
    requests, count = masks.shape[:2]
    lengths = torch.randint(1, 40, (requests,)).tolist()
    # A column of 208 cells for each head.
    k, v = torch.randn(2, heads, 208, dim)
    kv = CellKV(k.flatten(0, 1), v.flatten(0, 1), 208)
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    slots = [torch.randperm(199)[:length] + 1 for length in lengths]
    table = torch.zeros(requests, 40, dtype=torch.int32)
    for row, own in zip(table, slots, strict=True):
        row[: len(own)] = own
    nothing = torch.zeros(requests, heads, dtype=torch.int64)
    tables = ListTables(nothing, nothing.int(), table)
    q = torch.randn(requests * count, heads, group, dim)
    new_k, new_v = torch.randn(2, requests * count, heads, dim)
    plan = kernels.lists.plan(tables, torch.arange(requests), torch.tensor(lengths), 1, heads)
    scale = dim**-0.5
    folded = fold(q, count)
    with patch.object(drafts, "MOST_ROWS", most):
        prefix = drafts.over_prefixes(
            lambda rows: kernels.lists.decode(rows, kv, plan, 0, scale), folded
        )
    branch = over_branches(folded, new_k, new_v, masks, scale)
    out = unfold(kernels.merge_states(prefix, branch).o, count)
    for request, own in enumerate(slots):
        for draft in range(count):
            row = request * count + draft
            seen = request * count + masks[request, draft].nonzero().flatten()
            keys, values = torch.cat([k[own], new_k[seen]]), torch.cat([v[own], new_v[seen]])
            logits = torch.einsum("hgd,ehd->hge", q[row], keys) * scale
            expected = torch.einsum("hge,ehd->hgd", logits.softmax(-1), values)
            torch.testing.assert_close(out[row], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_an_accepted_draft_is_moved_in_all_heads(dtype):
    shape = ModelShape(num_layers=3, num_kv_heads=3, num_attention_heads=6, head_dim=4)
    pool = HeadPagedKVPool(30, shape=shape, dtype=dtype, device="cpu")
    sides = [side for layer in pool.kv for side in layer.sides]
    for side in sides:
        side.copy_(torch.randint(0, 99, side.shape))
    held = [side.clone() for side in sides]
    # Drafts 8 and 9 go where 7 and 8 were; the rest of SGLang's list is its padding slot.
    target, source = torch.tensor([6, 7, 8, 0, 0]), torch.tensor([6, 8, 9, 0, 0])
    pool.move_kv_cache(target, source)
    for side, was in zip(sides, held, strict=True):
        expected = was.clone()
        expected[target[:3]] = was[source[:3]]
        assert torch.equal(side, expected)


@given(parents=several, lengths=st.lists(st.integers(1, 50), min_size=4, max_size=4))
def test_links_of_a_tree_are_those_that_sglang_derives_on_its_host(parents, lengths):
    from sglang.srt.speculative.ngram_worker import _derive_tree_links

    masks = torch.stack([mask_of(one) for one in parents])
    requests, count = masks.shape[:2]
    held = torch.tensor(lengths[:requests])
    positions = torch.empty(requests * count, dtype=torch.int64)
    index, child, sibling = torch.empty(3, requests, count, dtype=torch.int64)
    cpu_drafts.links_of_tree(
        masks.flatten(), held, positions, index, child, sibling, requests, count
    )
    children, siblings = _derive_tree_links(masks.numpy(), requests, count)
    assert torch.equal(child, children)
    assert torch.equal(sibling, siblings)
    assert torch.equal(index.flatten(), torch.arange(requests * count))
    depth = masks.sum(-1) - 1
    assert torch.equal(positions.view(requests, count), depth + held[:, None])


@given(parents=several, data=st.data())
def test_the_branch_that_the_model_says_is_accepted(parents, data):
    """The test finds what is accepted by trying every branch from its root."""
    masks = torch.stack([mask_of(one) for one in parents])
    requests, count = masks.shape[:2]
    token = st.integers(0, 2)
    drawn = [[data.draw(token) for _ in range(count)] for _ in range(requests)]
    candidates = torch.tensor(drawn)
    wanted = torch.tensor([[data.draw(token) for _ in range(count)] for _ in range(requests)])
    positions = torch.empty(requests * count, dtype=torch.int64)
    index, child, sibling = torch.empty(3, requests, count, dtype=torch.int64)
    held = torch.ones(requests, dtype=torch.int64)
    cpu_drafts.links_of_tree(
        masks.flatten(), held, positions, index, child, sibling, requests, count
    )
    predicts = torch.zeros(requests * count, dtype=torch.int32)
    accepted = torch.full((requests, count), -1, dtype=torch.int32)
    number = torch.empty(requests, dtype=torch.int32)
    cpu_drafts.accept_greedily(
        predicts, accepted, number, candidates, index, child, sibling, wanted
    )
    for request in range(requests):
        node, path = 0, [0]
        while True:
            below = [n for n in range(count) if parents[request][n] == node]
            right = [n for n in below if candidates[request, n] == wanted[request, node]]
            if not right:
                break
            node = right[0]
            path.append(node)
        found = accepted[request][accepted[request] >= 0].tolist()
        assert found == [request * count + n for n in path]
        assert int(number[request]) == len(path) - 1
        said = [int(predicts[request * count + n]) for n in path]
        assert said == [int(wanted[request, n]) for n in path]


def test_slots_of_drafts_are_found_and_written_where_sglang_wants_them():
    rows = torch.arange(40, dtype=torch.int32).view(4, 10)
    requests, begins = torch.tensor([3, 1]), torch.tensor([2, 5])
    found = cpu_drafts.slots_of_drafts(
        req_pool_indices=requests, req_to_token=rows, start_offset=begins,
        end_offset=begins + 3, batch_size=2, draft_token_num=3, device="cpu",
    )  # fmt: skip
    assert found.tolist() == [32, 33, 34, 15, 16, 17]
    ends = torch.tensor([4, 8])
    cpu_drafts.write_rows(requests, rows, begins, ends, torch.tensor([91, 92, 93, 94, 95]), 2)
    assert rows[3, 2:4].tolist() == [91, 92]
    assert rows[1, 5:8].tolist() == [93, 94, 95]
    front, moved = torch.zeros(2, 6, dtype=torch.int64)
    cpu_drafts.slots_in_front(torch.tensor([2, 1]), found, front)
    assert front.tolist() == [32, 33, 15, 0, 0, 0]
    cpu_drafts.accepted_slots(torch.tensor([[0, 2, -1], [4, -1, -1]]), found, moved, 6)
    assert moved.tolist() == [32, 34, 16, 0, 0, 0]


@pytest.mark.parametrize("target", cpu_drafts.functions())
def test_what_stands_for_a_function_of_sglangs_takes_its_arguments(target):
    import inspect
    import pkgutil

    ours = cpu_drafts.functions()[target]
    theirs = pkgutil.resolve_name(target)
    original = getattr(theirs, "__wrapped__", theirs)
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(original).parameters)
