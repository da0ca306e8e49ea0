"""KV that goes to a tier and comes back is the same to the bit, in every dtype, on both paths."""

import pytest
import torch
from packed_checks import SHAPE
from tierd.live_tier import in_process, key_of
from waiting import SAFETY_S

from kvtier.tier.client import Blob, Landing, TierClient
from kvtier_sglang.pool.kv_pool import HeadPagedKVPool
from kvtier_sglang.tier.codec import SpanCodec

SLOTS, TOKENS = 60, 20
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def make_pool(dtype: torch.dtype, *, state_width: int | None) -> HeadPagedKVPool:
    return HeadPagedKVPool(SLOTS, shape=SHAPE, dtype=dtype, device="cpu", state_width=state_width)


def bits(pool: HeadPagedKVPool, slots: torch.Tensor) -> list[torch.Tensor]:
    """Return what every head of every layer holds of these tokens, as bytes."""
    found = [side[slots].contiguous().view(torch.uint8) for layer in pool.kv for side in layer]
    return found + [seen[:, slots].contiguous().view(torch.uint8) for seen in pool.state or ()]


@pytest.fixture(scope="module")
def tier(tmp_path_factory):
    with in_process(shared_directory=tmp_path_factory.mktemp("memory")) as live:
        yield live


@pytest.mark.parametrize("state_width", [None, 0, 2])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_a_round_trip_is_bit_exact(tier, dtype, shared, state_width):
    generator = torch.Generator().manual_seed(DTYPES.index(dtype))
    left, right = (make_pool(dtype, state_width=state_width) for _ in range(2))
    # Any bits at all: infinities, denormals and several kinds of NaN among them.
    for layer in left.kv:
        for side in layer:
            noise = torch.randint(256, (*side.shape, side.element_size()), generator=generator)
            side.copy_(noise.to(torch.uint8).view(side.dtype).squeeze(-1))
    for seen in left.state or ():
        seen.copy_(torch.randn(seen.shape, generator=generator))
    there, here = (torch.randperm(SLOTS, generator=generator)[:TOKENS] + 1 for _ in range(2))
    codec = SpanCodec(left)
    gathered = codec.gather(there, 1)
    if gathered.ready is not None:
        gathered.ready()
    (payload,) = gathered.rows
    layout = codec.layout(TOKENS)
    landed = bytearray(layout.num_bytes)
    with TierClient(
        tier.address, f"{dtype}-{shared}-{state_width}", shared=shared, timeout_s=SAFETY_S
    ) as client:
        client.connect()
        assert client.shares_memory is shared
        client.put(Blob(key_of(1), layout.encode(), [memoryview(payload.numpy())]))
        outcome = client.get([key_of(1)], lambda offer: memoryview(landed), layout.num_bytes)
    assert outcome == [Landing.LANDED]
    SpanCodec(right).scatter(torch.frombuffer(landed, dtype=torch.uint8), TOKENS, 0, here)
    for ours, theirs in zip(bits(right, here), bits(left, there), strict=True):
        assert torch.equal(ours, theirs)
