"""The notes of the engine in a prefill: which tokens are asked, and how keys are un-rotated."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.layers.rotary_embedding import get_rope

from kvtier_kernels.scores import unrotate
from kvtier_sglang.compression.prompt_nll import measure_nll, sampled_rows
from kvtier_sglang.compression.retention import MIN_ASKED, mean_nll
from kvtier_sglang.compression.selection import PrefillRows


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 60)), min_size=1, max_size=4),
    st.integers(1, 20),
)
def test_asked_rows_are_strided_positions_whose_successor_is_in_the_pass(requests, stride):
    bounds = [0]
    for _, length in requests:
        bounds.append(bounds[-1] + length)
    starts = tuple(start for start, _ in requests)
    rows = PrefillRows(tuple(bounds), starts, torch.arange(bounds[-1]))
    expected = [
        bounds[i] + t
        for i, (start, length) in enumerate(requests)
        for t in range(length - 1)
        if (start + t) % stride == 0
    ]
    assert sampled_rows(rows, stride).tolist() == expected


def test_surprise_is_the_cross_entropy_of_the_next_token():
    torch.manual_seed(0)
    hidden, head = torch.randn(6, 4), torch.randn(10, 4)
    ids, asked = torch.tensor([1, 7, 3, 9, 0, 2]), torch.tensor([0, 3, 4])
    got = measure_nll(lambda h: h @ head.T, hidden, ids, asked)
    logits = torch.log_softmax(hidden.double() @ head.double().T, -1)
    expected = -torch.stack([logits[0, 7], logits[3, 0], logits[4, 2]])
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_too_few_asked_tokens_say_nothing():
    few = torch.full((100,), torch.nan)
    few[: MIN_ASKED - 1] = 2.0
    assert mean_nll(few) is None
    few[MIN_ASKED - 1] = 2.0
    assert mean_nll(few) == pytest.approx(2.0)
    few[50] = torch.inf
    assert mean_nll(few) is None


SCALINGS = {
    "plain": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_sglangs_rotary_embeddings_are_undone(scaling, neox, partial):
    torch.manual_seed(0)
    rope = get_rope(
        32, int(32 * partial), 1024, 10000.0, neox, SCALINGS[scaling], torch.float32
    ).cpu()
    keys, positions = torch.randn(40, 3, 32), torch.arange(500, 540)
    _, rotated = rope.forward_native(
        positions, torch.randn(40, 3 * 32), keys.reshape(40, -1).clone()
    )
    cos, sin = rope.cos_sin_cache[500:540].chunk(2, dim=-1)
    back = unrotate(
        rotated.view(40, 3, 32).transpose(0, 1), cos, sin, interleaved=not rope.is_neox_style
    )
    torch.testing.assert_close(back, keys.transpose(0, 1), rtol=1e-4, atol=1e-4)
