"""What a calibration computes: what is counted, against PyTorch's own count and against sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_head_probe import CONTEXT, QUESTIONS
from tiny_llama import RULE, SHAPE
from torch.utils.flop_counter import FlopCounterMode

from kvtier.heads.probes.context import HeadProbe
from kvtier.heads.probes.gates import gate_gradient
from kvtier.heads.samples.questions import CalibrationSample
from kvtier.heads.work import LARGER, Work, counted, layer_weights, work_lines

SAMPLE = CalibrationSample(CONTEXT, QUESTIONS)


def matrix_products(counter: FlopCounterMode) -> int:
    """Of the layers, without attention and the output head."""
    counts = counter.get_flop_counts()
    head = counts.get("LlamaForCausalLM.lm_head", {})
    products = (torch.ops.aten.mm, torch.ops.aten.addmm)
    return sum(counts["Global"].get(op, 0) - head.get(op, 0) for op in products)


def test_a_prefill_is_counted_as_pytorch_counts_it(model: Any) -> None:
    probe = HeadProbe(model, RULE, chunk_tokens=16)
    with counted(model) as work, FlopCounterMode(display=False) as counter:
        probe.prepare(SAMPLE)
    tokens = len(CONTEXT)
    assert work == Work(tokens, tokens * (tokens + 1) // 2)
    without_attention = Work(work.tokens, 0).flops(SHAPE, layer_weights(model))
    # Norms are weights that multiply nothing.
    assert without_attention == pytest.approx(matrix_products(counter), rel=0.01)


def test_gradients_count_three_times(model: Any) -> None:
    batch = HeadProbe(model, RULE).prepare(SAMPLE)
    with counted(model) as work, FlopCounterMode(display=False) as counter:
        gate_gradient(batch, torch.full((3, 2), 0.5))
    asked = sum(len(q.prompt_ids) + len(q.answer_ids) - 1 for q in QUESTIONS)
    assert work.tokens == 3 * asked
    counts = counter.get_flop_counts()["Global"]
    products = sum(counts.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    head = 2 * 2 * 97 * 64 * asked  # forward and backward, at most
    most = Work(work.tokens, 0).flops(SHAPE, layer_weights(model))
    # The gradient ends at the first layer's gates: its own input's is not wanted.
    assert 0.75 * most < products < most + head


def test_the_work_of_a_larger_model() -> None:
    shape, weights = LARGER["Llama-3.1-8B"]
    assert weights == pytest.approx(6.98e9, rel=0.01)
    assert LARGER["Llama-3.1-70B"][1] == pytest.approx(68.5e9, rel=0.01)
    work = Work(tokens=1000, pairs=10_000)
    expected = 2 * weights * 1000 + 4 * 32 * 128 * 32 * 10_000
    assert work.flops(shape, weights) == expected
    assert work.h100_seconds(shape, weights) == pytest.approx(expected / 989e12 / 0.4)
    lines = work_lines(Work(2_000_000, 10_000), shape, weights)
    assert "2000.0k tokens" in lines[0]
    assert "70.6 s for Llama-3.1-8B, 12 min for Llama-3.1-70B" in lines[1]
