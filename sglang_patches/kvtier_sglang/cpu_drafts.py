"""The functions of indices that SGLang's n-gram drafts need, for a CPU: SGLang has these few for
GPUs, and for CPUs in a build of its kernels that package indexes lack.

Each does what the function of SGLang that it stands for does, with the same arguments.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvtier_sglang.versions import sglang_version

_WORKER = "sglang.srt.speculative.ngram_worker"
_UTILS = "sglang.srt.speculative.spec_utils"
_EAGLE = "sglang.srt.speculative.eagle_utils"
# The first version of SGLang that calls these functions.
FIRST_VERSION = (0, 5, 23)


def make_importable() -> None:
    """Let SGLang's n-gram worker be imported where its kernels cannot be."""
    try:
        importlib.import_module("sgl_kernel.speculative")
    except ImportError:
        module = types.ModuleType("sgl_kernel.speculative")
        module.reconstruct_indices_from_tree_mask = links_of_tree  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module


def functions() -> dict[str, Callable[..., Any]]:
    """Return the function here that stands for each of SGLang's, by where SGLang calls it from;
    none where SGLang calls others."""
    if sglang_version() < FIRST_VERSION:
        return {}
    return {
        f"{_WORKER}.reconstruct_indices_from_tree_mask_func": links_of_tree,
        f"{_UTILS}.fill_front_out_cache_loc_func": slots_in_front,
        f"{_UTILS}.fill_accept_out_cache_loc_func": accepted_slots,
        f"{_EAGLE}.verify_tree_greedy_func": accept_greedily,
        f"{_EAGLE}._verify_uses_greedy": verifies_greedily,
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func": write_rows,
    }


def verifies_greedily(
    *, is_all_greedy: bool, is_cpu: bool, is_hip: bool, is_xpu: bool, use_rejection_sampling: bool
) -> bool:
    """Return True, whatever requests ask for: so does SGLang on a CPU, which has no tree
    sampling."""
    return True


def links_of_tree(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Positions, first children and next siblings of drafts, from who is whose ancestor. A missing
    one is -1."""
    count = draft_token_num
    step = torch.arange(count)
    above = tree_mask.view(batch_size, count, count) & (step < step[:, None])
    positions.view(batch_size, count).copy_(above.sum(-1) + verified_seq_len[:, None])
    retrieve_index.copy_(torch.arange(batch_size * count).view(batch_size, count))
    parent = torch.where(above, step, -1).amax(-1)
    later = step[:, None] > step
    is_child = above & later
    is_sibling = (parent[:, :, None] == parent[:, None, :]) & (parent >= 0)[:, None, :] & later
    for found, target in ((is_child, retrieve_next_token), (is_sibling, retrieve_next_sibling)):
        first = torch.where(found, step[:, None], count).amin(1)
        target.copy_(torch.where(first < count, first, -1))


def accept_greedily(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept from each root down the draft that the model itself says next, as long as there is
    one."""
    links = retrieve_next_token.tolist(), retrieve_next_sibling.tolist()
    drafts, wanted, index = candidates.tolist(), target_predict.tolist(), retrieve_index.tolist()
    most = accept_index.shape[1]
    for request, row in enumerate(index):
        node, accepted = 0, [row[0]]
        for child in _path(request, links, drafts[request], wanted[request]):
            if len(accepted) == most:
                break
            predicts[row[node]] = wanted[request][node]
            node = child
            accepted.append(row[node])
        predicts[row[node]] = wanted[request][node]
        accept_index[request, : len(accepted)] = torch.tensor(accepted)
        accept_token_num[request] = len(accepted) - 1
    return predicts, accept_index, accept_token_num


def _path(
    request: int,
    links: tuple[list[list[int]], list[list[int]]],
    drafts: list[int],
    wanted: list[int],
) -> Iterator[int]:
    """The drafts below a request's root that are what the model says after those before."""
    children, siblings = (link[request] for link in links)
    node = 0
    while True:
        child = children[node]
        while child != -1 and drafts[child] != wanted[node]:
            child = siblings[child]
        if child == -1:
            return
        node = child
        yield node


def slots_of_drafts(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> torch.Tensor:
    """The slots [start, end) of each request's row, one after another."""
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    return torch.cat([req_to_token[row, begin:end] for row, begin, end in rows]).to(torch.int64)


def write_rows(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write slots into [start, end) of each request's row, one after another."""
    at = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, begin, end in rows:
        assert end <= req_to_token.shape[1], "a row without room for what is reserved ahead"
        new = out_cache_loc[at : at + end - begin]
        req_to_token[row, begin:end] = new.to(req_to_token.dtype)
        at += end - begin


def slots_in_front(
    num_front: torch.Tensor, out_cache_loc: torch.Tensor, front_out_cache_loc: torch.Tensor
) -> None:
    """The first so many slots of each request's drafts, one after another."""
    windows = out_cache_loc.view(num_front.numel(), -1)
    front = torch.cat([w[:count] for w, count in zip(windows, num_front.tolist(), strict=True)])
    front_out_cache_loc[: front.numel()] = front


def accepted_slots(
    accept_index: torch.Tensor,
    out_cache_loc: torch.Tensor,
    accept_out_cache_loc: torch.Tensor,
    size: int,
) -> None:
    """The slots of accepted drafts, one after another. accept_index: -1 where there is none."""
    accepted = accept_index[accept_index >= 0]
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted.long()]
