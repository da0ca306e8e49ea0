"""The benchmark of coding: what it times is a turn's kept entries, all of them."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.cost import coding
from kvtier_kernels.codes import recoded


@pytest.mark.parametrize("bits", [8, 4, 3])
def test_what_is_encoded_is_what_is_decoded(bits):
    calls, kept, coded = coding.make_calls(bits, 4096, 0)
    calls["move"]()
    calls["round"]()
    keys, values = calls["decode"]()
    assert keys.shape == values.shape == (8 * 1024, 128)
    assert kept / coded == pytest.approx({8: 1.77, 4: 3.5, 3: 3.9}[bits], rel=0.05)
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(8 * (2 * 4096 + 16), 128, generator=generator).bfloat16() for _ in "kv")
    first = torch.randperm(4096, generator=generator)[:1024].sort().values
    expected = recoded(k[None, first].float(), v[None, first].float(), bits)
    for found, one in zip((keys, values), expected, strict=True):
        assert torch.equal(found[:1024], one[0])
    calls["encode"]()
    keys_again, values_again = calls["decode"]()
    assert torch.equal(values_again, values)
    assert not torch.equal(keys_again, keys)


def test_it_writes_what_it_measured(tmp_path):
    out = tmp_path / "out.json"
    assert coding.main(["--len", "4k", "--rounds", "1", "--out", str(out)]) == 0
    found = json.loads(out.read_text())["codes"]
    assert set(found) == {"int8", "int4", "int3"}
    for one in found.values():
        assert one["launches"]["encode"] > one["launches"]["round"] > one["launches"]["move"] > 0
        assert all(speed > 0 for speed in one["gb_per_s"].values())
