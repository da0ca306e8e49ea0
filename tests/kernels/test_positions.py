"""Positions found on a CPU by NumPy are PyTorch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier_kernels.reference_backend.slots import positions_of


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32])
@given(values=st.lists(st.integers(0, 2), max_size=50))
def test_they_are_those_of_pytorch(dtype, values):
    x = torch.tensor(values, dtype=dtype)
    with torch.inference_mode():
        found = positions_of(x)
    assert found.dtype == torch.int64
    assert found.tolist() == torch.nonzero(x).flatten().tolist()
