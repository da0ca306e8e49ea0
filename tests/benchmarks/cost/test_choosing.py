"""The benchmark of choosing: a context that gives merging something to do, and honest shares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.cost import choosing
from benchmarks.cost.choosing_context import attend, make_context, merge, select
from kvtier.retention.keepkv import KeepKV
from kvtier.retention.scorers.compactor import Compactor
from kvtier_kernels import RaggedKV
from kvtier_kernels.merging import assign
from kvtier_kernels.reference_backend.kernels import ReferenceKernels


def small_context():
    return make_context(0, 512, torch.float32, "cpu")


def test_choosing_that_is_measured_merges_much_and_keeps_what_it_says():
    context = small_context()
    chosen = select(context, Compactor())
    assert chosen.shape == (8, 128)
    assert merge(context, KeepKV()).shape == (8, 128, 128)
    keys = context.k.transpose(0, 1)
    target = assign(keys, chosen, floor=KeepKV().floor).target
    assert (target >= 0).float().mean() > 0.5


def test_the_attention_that_choosing_is_compared_with_is_the_contexts():
    context = small_context()
    kernels, scale = ReferenceKernels(), context.q.shape[-1] ** -0.5
    plan = kernels.plan(torch.arange(512), [0, 0])
    expected = kernels.extend(
        context.q, context.k, context.v, [0, 512], RaggedKV(context.k, context.v), plan, scale
    ).o
    found = attend(context.q, context.k, context.v, causal=True)
    torch.testing.assert_close(found[0].transpose(0, 1), expected.flatten(1, 2))


@pytest.mark.parametrize(("chunks", "calls"), [(1, 1), (4, 7)])
def test_chunks_attend_to_everything_before_them(chunks, calls, monkeypatch):
    seen = []
    monkeypatch.setattr(
        choosing,
        "attend",
        lambda q, k, v, causal: seen.append(len(q) * (len(k) + causal) / (1 + causal)),
    )
    choosing.measure(small_context(), chunks)
    assert len(seen) == calls
    # Pairs of a query and a key that it may see.
    assert sum(seen) == 512 * 513 / 2


def test_shares_are_medians_of_choosing_over_the_whole_attention():
    measured = {
        "prefill_chunks_s": [10.0, 30.0, 60.0], "selection_s": [9.0, 4.0, 5.0],
        "merge_s": [6.0, 6.0, 1.0],
    }  # fmt: skip
    assert [(bar.name, bar.value, bar.met) for bar in choosing.make_bars(measured)] == [
        ("selection / prefill attention", 0.05, True),
        ("merge / prefill attention", 0.06, True),
        ("selection + merge / prefill attention", 0.11, False),
    ]


def test_a_short_run_writes_what_it_measured(tmp_path: Path, capsys):
    out = tmp_path / "choosing.json"
    code = choosing.main(["--len", "1k", "--chunks", "2", "--kv-heads", "1", "--out", str(out)])
    document = json.loads(out.read_text())
    assert code == (0 if all(bar["met"] for bar in document["bars"]) else 1)
    assert len(document["measured"]["prefill_chunks_s"]) == 2
    assert document["settings"]["context_tokens"] == 1024
    assert "of attention" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong", [["--chunks", "0"], ["--kv-heads", "0"], ["--len", "ten"], ["--seed", "-1"]]
)
def test_bad_input_names_its_argument(wrong, tmp_path, capsys):
    assert choosing.main([*wrong, "--out", str(tmp_path / "x.json")]) == 2
    assert wrong[0] in capsys.readouterr().err
