"""Choosing on CUDA asks for no value: the host never waits for the device.

Over tensors of a device that need not be there and that hold nothing (torch's fake tensors), a
question for a value raises. Kernels are not run.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from kvtier.retention.keepkv import KeepKV, QueryWindow
from kvtier.retention.refreshing import RefreshRule
from kvtier.retention.scorers import Span, select
from kvtier.retention.scorers.compactor import Compactor
from kvtier_kernels.scores import Rotation
from kvtier_kernels.triton_backend.merging.segments import segment_sum

HEADS, TOKENS, DIM = 2, 5000, 64


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the kernels that would run."""
    names: list[str] = []

    def record(kernel: object, *arguments: object, **options: object) -> None:
        names.append(kernel.fn.__name__)  # type: ignore[attr-defined]

    monkeypatch.setattr(type(segment_sum), "run", record)
    with FakeTensorMode():
        yield names


def cuda(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def test_a_question_for_a_value_would_raise() -> None:
    with pytest.raises(DataDependentOutputException):
        bool(cuda(3).any())


def test_compactor_selects() -> None:
    rotation = Rotation(*(cuda(TOKENS, DIM // 2, dtype=torch.float32) for _ in range(2)))
    mass = cuda(HEADS, 1, TOKENS, dtype=torch.float32)
    span = Span(cuda(HEADS, TOKENS, DIM), mass, 0, rotation)
    chosen = select(Compactor().score(span), 1000)
    assert chosen.shape == (HEADS, 1000)


@pytest.mark.parametrize("merges", [False, True])
def test_a_refresh_chooses_and_merges(merges: bool, launched: list[str]) -> None:
    window = QueryWindow(cuda(32, HEADS, 4, DIM), 0.125)
    rule = RefreshRule(KeepKV(), merges=merges)
    chosen = rule.choose(cuda(HEADS, TOKENS, DIM), cuda(HEADS, TOKENS, DIM), 1000, window)
    assert chosen.k.shape == (HEADS, 1000 + merges, DIM)
    assert chosen.k.device.type == "cuda"
    wanted = {"mean_of_queries", "nearest_home", "segment_softmax", "segment_sum"}
    assert not merges or wanted <= set(launched)
