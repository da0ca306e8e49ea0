"""Others' kernels get what ours have: checked by stand-ins that do what theirs say they do."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
import torch

from benchmarks.common.peer_kernels import (
    COMPACTOR_FILE,
    KVPRESS_FILE,
    PAGE_TOKENS,
    CompactorVllm,
    Held,
    Kvpress,
    decode_classes,
    load_peer,
    to_masked,
    to_pages,
)
from benchmarks.cost import masked
from benchmarks.gpu.check import __main__ as gpu_check
from benchmarks.gpu.check.claims import make_bars
from kvtier_kernels import RaggedKV, get_kernels

SCALE = 0.2
# As compactor-vllm describes its arguments.
PAGED_DECODE = """
import torch
def num_splits_heuristic(total_mblocks, max_seq_len, num_sms, max_splits):
    return 1
def head_sparse_decode_attention(
    q, k, v, lengths, table, batch_mapping, heads, page, scale, key_split
):
    out = torch.zeros_like(q)
    group = q.shape[1] // heads
    for b in range(len(q)):
        for h in range(heads):
            at = torch.arange(int(lengths[b, h]))
            rows = table[batch_mapping[b], h][at // page].long() * page + at % page
            own = slice(h * group, (h + 1) * group)
            out[b, own] = (q[b, own] @ k[rows].T * scale).softmax(-1) @ v[rows]
    return out
"""
# What kvpress's keys that no query sees amount to.
MASKING = """
import torch
def attention_patch(func):
    def wrapper(module, query, key, value, attention_mask, dropout, **kwargs):
        seen = torch.ones(key.shape[:3], dtype=torch.bool)
        seen[module.masked_key_indices] = False
        mask = seen.repeat_interleave(module.num_key_value_groups, 1).unsqueeze(2)
        return func(module, query, key, value, mask, dropout, **kwargs)
    return wrapper
"""


@pytest.fixture
def peers(tmp_path: Path) -> Path:
    for file, text in ((COMPACTOR_FILE, PAGED_DECODE), (KVPRESS_FILE, MASKING)):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(text)
    return tmp_path


def make_classes(lengths: list[list[int]], heads: list[int], dim: int = 16) -> list[Held]:
    """lengths: of each class, by request. Slots lie anywhere in a larger pool."""
    made = []
    for own, count in zip(lengths, heads, strict=True):
        pool = sum(own) + 7
        k, v = (torch.randn(pool, count, dim) for _ in "kv")
        slots = torch.tensor(random.sample(range(pool), sum(own)))
        made.append(Held(RaggedKV(k, v), slots, [0, *itertools.accumulate(own)]))
    return made


def by_reference(q: torch.Tensor, classes: list[Held]) -> torch.Tensor:
    kernels = get_kernels("reference")
    plans = [kernels.plan(one.slots, one.indptr) for one in classes]
    return decode_classes(kernels, q, [one.kv for one in classes], plans, SCALE)


def test_pages_hold_each_heads_entries(peers: Path) -> None:
    longest = 3 * PAGE_TOKENS
    classes = make_classes([[longest, 1, PAGE_TOKENS, 200], [5, 1, 77, 130]], [2, 3])
    paged = to_pages(classes, seed=1)
    q = torch.randn(4, 5, 2, 16)
    peer = CompactorVllm(load_peer(peers, COMPACTOR_FILE), paged, multiprocessors=4)
    torch.testing.assert_close(peer.decode(q, paged, SCALE), by_reference(q, classes))
    used = {
        int(page)
        for b, h in itertools.product(range(4), range(5))
        for page in paged.table[b, h, : -(-int(paged.lengths[b, h]) // PAGE_TOKENS)]
    }
    assert len(used) * PAGE_TOKENS == len(paged.k), "a page is shared, or no head's"


def test_a_dense_cache_masks_what_its_heads_dropped(peers: Path) -> None:
    classes = make_classes([[300], [40]], [1, 3])
    dense = to_masked(classes, 300)
    q = torch.randn(1, 4, 2, 16)
    peer = Kvpress(load_peer(peers, KVPRESS_FILE))
    torch.testing.assert_close(peer.decode(q, dense, SCALE), by_reference(q, classes))
    assert len(dense.dropped[0]) == 3 * 260


def test_a_peer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="sparse_decode_kernel"):
        load_peer(tmp_path, COMPACTOR_FILE)


def test_a_short_run_says_how_masking_compares(peers: Path, capsys) -> None:
    out = peers / "masked.json"
    arguments = ["--len", "2k", "--rounds", "2", "--peers", str(peers), "--out", str(out)]
    assert masked.main(arguments) == 0
    document = json.loads(out.read_text())
    rounds = {name: len(rounds) for name, rounds in document["step_s"].items()}
    assert rounds == dict.fromkeys(("full", "full, kvtier", "masked", "kvtier"), 2)
    assert document["ratios"]["masked"] > 0
    assert "over kvtier's" in capsys.readouterr().out


def test_outputs_that_differ_are_a_bar_that_is_missed(peers: Path, capsys) -> None:
    (peers / KVPRESS_FILE).write_text("def attention_patch(func):\n    return func\n")
    out = peers / "masked.json"
    arguments = ["--len", "2k", "--rounds", "1", "--peers", str(peers), "--out", str(out)]
    assert masked.main(arguments) == 1
    capsys.readouterr()


@pytest.mark.parametrize(
    "wrong",
    [["--len", "1k"], ["--ca-heads", "8"], ["--rounds", "0"], ["--seed", "-1"], ["--peers", "/x"]],
)
def test_bad_input_names_its_argument(wrong, peers, capsys):
    arguments = ["--peers", str(peers), "--out", str(peers / "x.json"), *wrong]
    assert masked.main(arguments) == 2
    assert wrong[0] in capsys.readouterr().err


def test_peers_are_bars_and_one_that_did_not_run_is_not_met():
    row = {"shape": "batch 1", "difference": 1e-3, "ours_s": 2.0, "theirs_s": 1.0}
    document = {
        "peers": {"compactor_vllm": [row], "missing": {"kvpress": "FileNotFoundError: x"}},
        "failures": {},
    }
    assert {bar.name: bar.met for bar in make_bars(document)} == {
        "batch 1: compactor-vllm's kernel, largest difference": True,
        "batch 1: compactor-vllm's kernel, our time / its": False,
        "kvpress did not run: FileNotFoundError: x": False,
    }


def test_parts_that_were_not_asked_for_are_left_out():
    asked = gpu_check.Asked(0, flashinfer=False, peers=None)
    assert [name for name in gpu_check.PARTS if asked.leaves_out(name)] == ["peers", "flashinfer"]
    everything = gpu_check.Asked(0, flashinfer=True, peers=Path("x"))
    assert not [name for name in gpu_check.PARTS if everything.leaves_out(name)]
