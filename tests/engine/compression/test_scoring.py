"""The notes of the engine in a prefill, what is decided by them, and how keys are un-rotated."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers.rotary_embedding import get_rope

from kvtier.retention.shares import FixedShare, Turn
from kvtier_kernels.scores import unrotate
from kvtier_sglang.compression.retention import MIN_ASKED, Retention, mean_nll, observe_nll
from kvtier_sglang.compression.selection import PrefillRows
from kvtier_sglang.metrics import RetentionMetrics


def test_surprise_is_the_cross_entropy_of_the_next_token():
    torch.manual_seed(0)
    hidden, head = torch.randn(6, 4), torch.randn(10, 4)
    ids, nll = torch.tensor([1, 7, 3, 9, 0, 2]), torch.full((9,), torch.nan)
    # Asked are rows 0 and 3: their positions are even, and a token of their request follows.
    rows = PrefillRows((0, 2, 6), (0, 3), torch.arange(8, 2, -1))
    observe_nll(lambda h: h @ head.T, hidden, ids, rows, 2, nll)
    logits = torch.log_softmax(hidden.double() @ head.double().T, -1)
    expected = -torch.stack([logits[3, 0], logits[0, 7]])
    assert (~nll.isnan()).nonzero().flatten().tolist() == [5, 8]
    torch.testing.assert_close(nll[[5, 8]].double(), expected, rtol=1e-5, atol=1e-5)
    observe_nll(lambda h: h @ head.T, hidden[-1:], ids, rows, 2, nll.fill_(torch.nan))
    assert nll.isnan().all()


def test_too_few_asked_tokens_say_nothing():
    few = torch.full((100,), torch.nan)
    few[: MIN_ASKED - 1] = 2.0
    assert mean_nll(few) is None
    few[MIN_ASKED - 1] = 2.0
    assert mean_nll(few) == pytest.approx(2.0)
    few[50] = torch.inf
    assert mean_nll(few) is None


class FullDisk:
    """A metric that cannot be written."""

    tried = 0

    def __call__(self, *labels: str) -> None:
        self.tried += 1
        raise OSError("No space left on device")


def test_metrics_that_fail_are_off_and_the_turn_is_decided_all_the_same(caplog):
    metrics = RetentionMetrics("a model", None)
    metrics._turns = disk = FullDisk()
    retention = Retention(FixedShare(0.5), metrics=metrics)
    assert [retention.choose(Turn(1000, 600)).kept_tokens for _ in range(3)] == [112] * 3
    assert disk.tried == 1
    assert retention.report()["reasons"] == {"share": 3}
    assert caplog.text.count("metrics failed") == 1


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
