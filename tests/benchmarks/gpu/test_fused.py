"""The pack's fused kernels beside SGLang's own forms of the same layers, which PyTorch computes."""

from __future__ import annotations

import warnings

import pytest
import torch

from benchmarks.gpu.fused import operators, plugin
from kvtier_kernels.triton_backend.launching import is_interpreted

# Importing the engine warns about hardware it does not find; that is not what we test.
with warnings.catch_warnings(action="ignore"):
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

DEVICE = "cpu" if is_interpreted() else "cuda"
# float16 shows that numbers are rounded where PyTorch rounds them: Triton's interpreter cuts off
# what bfloat16 has no room for, a GPU rounds.
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# The shapes are of tokens, and of numbers: the second is no power of two, and more than a block.
SHAPES = [(1, 128), (7, 96), (3, 1300)]
POSITIONS = 50


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).mul(3).to(dtype).to(DEVICE)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that both are the same to a rounding: the order of a sum, and exp, are not the
    same."""
    assert found.dtype == expected.dtype
    rtol = {torch.bfloat16: 2**-6, torch.float16: 2**-10, torch.float32: 2e-6}[found.dtype]
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-6)


def norm(dim: int, dtype: torch.dtype, **more: object) -> RMSNorm:
    layer = RMSNorm(dim, eps=1e-5, weight_dtype=dtype, **more).to(DEVICE)
    layer.weight.data = numbers(dim, dtype=dtype, seed=2)
    return layer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "dim"), SHAPES)
def test_rms_norm_is_sglangs(tokens: int, dim: int, dtype: torch.dtype) -> None:
    layer, x = norm(dim, dtype), numbers(tokens, 2 * dim, dtype=dtype)[:, :dim]
    before = x.clone()
    assert_same(plugin.rms_norm(layer, x), layer.forward_native(x))
    residual = numbers(tokens, dim, dtype=dtype, seed=1)
    found, added = plugin.rms_norm(layer, x, residual, None)
    expected, expected_added = layer.forward_native(x, residual)
    assert_same(found, expected)
    assert_same(added, expected_added)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "dim"), SHAPES)
def test_silu_and_mul_is_sglangs(tokens: int, dim: int, dtype: torch.dtype) -> None:
    layer, x = SiluAndMul(), numbers(tokens, 2 * dim, dtype=dtype)
    assert_same(plugin.silu_and_mul(layer, x), layer.forward_native(x))


def rotation(dim: int, rotated: int, dtype: torch.dtype, *, halves: bool = True) -> RotaryEmbedding:
    layer = RotaryEmbedding(dim, rotated, POSITIONS, 10000, halves, dtype)
    # SGLang has the cache so on a GPU.
    layer.cos_sin_cache = layer._compute_cos_sin_cache().to(DEVICE)
    return layer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "rotated"), [(1, (9, 3), 64, 64), (7, (4, 1), 96, 32)]
)
def test_rotating_in_place_is_sglangs(
    tokens: int, heads: tuple[int, int], dim: int, rotated: int, dtype: torch.dtype
) -> None:
    layer = rotation(dim, rotated, dtype)
    widths = [count * dim for count in (*heads, heads[1])]
    # The parts lie where a projection left them, side by side.
    qkv = numbers(tokens, sum(widths), dtype=dtype)
    q, k, v = qkv.split(widths, dim=-1)
    positions = torch.arange(tokens, device=DEVICE) * 5 + 3
    expected = layer.forward_native(positions, q, k)
    value = v.clone()
    found = plugin.rotate(layer, positions, q, k)
    for one, other in zip(found, expected, strict=True):
        if dtype == torch.float16:
            assert torch.equal(one, other)
        else:
            # The part that is cut off of both products shows in their difference.
            rtol, atol = (2**-6, 0.05) if dtype == torch.bfloat16 else (2e-6, 1e-6)
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
    assert found[0].data_ptr() == qkv.data_ptr()
    assert torch.equal(v, value)


def test_what_the_kernels_were_not_written_for_is_pytorchs(monkeypatch) -> None:
    for name in operators.__all__:
        monkeypatch.delattr(operators, name)
    x = numbers(2, 32, dtype=torch.float32)
    cast = norm(32, torch.float32, cast_x_before_out_mul=True)
    assert torch.equal(plugin.rms_norm(cast, x), cast.forward_native(x))
    plain = norm(32, torch.float32)
    found, added = plugin.rms_norm(plain, x, x, x)
    assert torch.equal(added, 3 * x)
    assert torch.equal(found, plain.forward_native(3 * x))
    assert plugin.rms_norm(plain, x[None]).shape == (1, 2, 32)
    assert plugin.silu_and_mul(SiluAndMul(), x[None]).shape == (1, 2, 16)
    other, positions = rotation(16, 16, torch.float32, halves=False), torch.arange(2, device=DEVICE)
    expected = other.forward_native(positions, x, x)
    assert torch.equal(plugin.rotate(other, positions, x, x)[0], expected[0])

    class Doubled(SiluAndMul):
        def forward_native(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward_native(x)

    assert torch.equal(plugin.silu_and_mul(Doubled(), x), 2 * SiluAndMul().forward_native(x))


def test_every_operator_that_is_hooked_is_one_of_sglangs() -> None:
    named = {path.rpartition(".")[2] for path in plugin.FORWARDS}
    assert named == {one.__name__ for one in (BaseFusedOp, RMSNorm, SiluAndMul, RotaryEmbedding)}
