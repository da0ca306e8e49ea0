"""Drafted tokens: what they go together with, who sees whom, and SGLang's functions of indices as
they are on a CPU. That answers are those without drafts is in test_drafted_answers.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_plugin import TIERED, server_args

from kvtier.config import load_settings
from kvtier_sglang import compat, cpu_drafts
from kvtier_sglang.attention.drafts import tree_masks


def test_drafts_go_together_with_refreshes_that_merge():
    arguments = server_args(speculative_algorithm="NGRAM")
    compat.check_server_args(arguments, load_settings(**TIERED, refresh="turn", merge="keepkv"))


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


@pytest.mark.parametrize("target", cpu_drafts.functions())
def test_what_stands_for_a_function_of_sglangs_takes_its_arguments(target):
    import inspect
    import pkgutil

    ours = cpu_drafts.functions()[target]
    theirs = pkgutil.resolve_name(target)
    original = getattr(theirs, "__wrapped__", theirs)
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(original).parameters)
