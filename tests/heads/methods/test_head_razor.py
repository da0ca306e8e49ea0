"""RazorAttention: masses against eager attention, the paper's rule, and orders beyond it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_llama import HEADS, LAYERS, RULE, SHAPE, VOCAB, make_ids
from torch.utils._python_dispatch import TorchDispatchMode

from kvtier.errors import UsageError
from kvtier.heads.methods import Target
from kvtier.heads.methods.base import best_heads
from kvtier.heads.methods.razor import Razor, RazorScores
from kvtier.heads.probes.context import HeadProbe
from kvtier.heads.probes.copies import RepeatMasses, plain_tokens, repeat_masses
from kvtier.heads.samples.questions import CalibrationSample, Question

PERIOD, REPEATS = 12, 4
BASE = list(range(10, 10 + PERIOD))


def eager_masses(model: Any) -> tuple[list[Any], list[Any]]:
    """Echo and induction mass of every head, from whole attention matrices."""
    ids = BASE * REPEATS
    before = model.config._attn_implementation
    model.config._attn_implementation = "eager"
    try:
        with torch.inference_mode():
            attentions = model(
                torch.tensor([ids]), use_cache=False, output_attentions=True
            ).attentions
    finally:
        model.config._attn_implementation = before
    rows = range(PERIOD, len(ids))
    found: tuple[list[Any], list[Any]] = ([], [])
    for weights in attentions:
        for behind, layers in enumerate(found):
            total = torch.zeros(HEADS, dtype=weights.dtype)
            for row in rows:
                copies = [t for t in range(row) if ids[t] == ids[row]]
                total += weights[0, :, row, [t + behind for t in copies]].sum(-1)
            layers.append((total / len(rows)).tolist())
    return found


@pytest.mark.parametrize("chunk", [5, 12, 17, 64])
def test_masses_are_those_of_eager_attention(model: Any, chunk: int) -> None:
    masses = repeat_masses(model, BASE, REPEATS, chunk_tokens=chunk)
    echo, induction = eager_masses(model)
    for layer in range(LAYERS):
        assert masses.echo[layer] == pytest.approx(echo[layer], abs=1e-5)
        assert masses.induction[layer] == pytest.approx(induction[layer], abs=1e-5)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any computed tensor had."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("tiled", [True, False])
def test_no_tensor_is_ever_tokens_by_tokens(
    model: Any, tiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.heads.reference.attention._has_tiled_kernel", lambda _: tiled)
    monkeypatch.setattr("kvtier.heads.reference.attention.KEY_BLOCK", 32)
    with LargestTensor() as largest:
        repeat_masses(model, list(range(90)), REPEATS, chunk_tokens=32)
    assert 0 < largest.numel < (90 * REPEATS) ** 2 / 4


masses = st.integers(1, 3).flatmap(
    lambda group: st.integers(1, 4).flatmap(
        lambda kv_heads: st.lists(
            st.tuples(*[st.tuples(st.floats(0, 1), st.floats(0, 1))] * (group * kv_heads)),
            min_size=1, max_size=4,
        ).map(
            lambda layers: (
                group,
                RepeatMasses(
                    tuple(tuple(echo for echo, _ in row) for row in layers),
                    tuple(tuple(induction for _, induction in row) for row in layers),
                ),
            )
        )
    )
)  # fmt: skip


def scored(razor: Razor, group: int, found: RepeatMasses) -> tuple[RazorScores, list[Any]]:
    """Return what `score` makes of masses, and a batch of such a model."""
    mean = tuple(tuple(1 / a for a in row) for row in razor.admissions(found, group))
    shape = SimpleNamespace(
        num_layers=len(mean), num_kv_heads=len(mean[0]), group_size=group,
        num_attention_heads=group * len(mean[0]),
    )  # fmt: skip
    full = ((True,) * len(mean[0]),) * len(mean)
    batch = SimpleNamespace(shape=shape, probe=SimpleNamespace(full=lambda: full))
    return RazorScores(mean=mean, masses=found, random_tokens=9), [batch]


def chosen(ca_heads: Any) -> set[tuple[int, int]]:
    return {(layer, head) for layer, row in enumerate(ca_heads) for head in row}


@given(masses, st.floats(0.01, 0.6), st.floats(0.01, 0.3))
def test_the_rule_protects_groups_of_the_best_heads_by_either_score(
    case: tuple[int, RepeatMasses], induction_share: float, echo_share: float
) -> None:
    group, found = case
    razor = Razor(induction_share=induction_share, echo_share=echo_share)
    total = sum(map(len, found.echo))
    wanted = {
        (layer, head // group)
        for scores, share in ((found.induction, induction_share), (found.echo, echo_share))
        for layer, head in best_heads(scores, max(1, round(share * total)))
    }
    scores, batches = scored(razor, group, found)
    assert chosen(razor.select(scores, batches, Target()).ca_heads) == wanted


@given(masses)
def test_shares_are_nested_and_pass_through_the_rule(case: tuple[int, RepeatMasses]) -> None:
    group, found = case
    razor = Razor()
    scores, batches = scored(razor, group, found)
    own = chosen(razor.select(scores, batches, Target()).ca_heads)
    total = sum(map(len, scores.mean))
    before: set[tuple[int, int]] = set()
    for count in range(1, total + 1):
        heads = chosen(razor.select(scores, batches, Target(share=count / total)).ca_heads)
        assert len(heads) == count
        assert before < heads
        before = heads
        if count == len(own):
            assert heads == own


def test_it_scores_a_model_without_looking_at_samples(model: Any) -> None:
    probe = HeadProbe(model, RULE, chunk_tokens=64)
    sample = CalibrationSample(tuple(make_ids(40)), (Question((1,), (2,)),))
    batch = probe.prepare(sample)
    razor = Razor()
    first, again = razor.score([batch]), razor.score([batch])
    assert first == again
    # Fewer plain tokens than 2500, and four times as many fit into the context of 512.
    assert first.random_tokens == len(plain_tokens(model))
    assert Razor(random_tokens=20).score([batch]).random_tokens == 20
    assert Razor(random_tokens=2500, repeats=128).score([batch]).random_tokens == 512 // 128
    assert Razor(seed=1).score([batch]) != first
    selection = razor.select(first, [batch], Target(share=0.5))
    assert sum(map(len, selection.ca_heads)) == SHAPE.num_layers * SHAPE.num_kv_heads // 2
    json.dumps(selection.parameters)


def test_special_tokens_are_not_plain(model: Any, tmp_path: Path) -> None:
    special = {model.config.bos_token_id, model.config.eos_token_id}
    assert plain_tokens(model) == [i for i in range(VOCAB) if i not in special]
    document = {
        "added_tokens": [{"id": 5, "special": True}, {"id": 6, "special": False}],
        "model": {"vocab": {f"w{i}": i for i in range(40)}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    named = SimpleNamespace(config=model.config, name_or_path=str(tmp_path))
    wanted = [i for i in range(40) if i not in special | {5}]
    assert plain_tokens(named) == wanted
    document["model"] = {"vocab": [[f"w{i}", -1.0] for i in range(40)]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    assert plain_tokens(named) == wanted


@pytest.mark.parametrize(
    "bad", [{"random_tokens": 1}, {"repeats": 1}, {"induction_share": 0}, {"echo_share": 1.5}]
)
def test_errors_name_the_argument(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(bad))):
        Razor(**bad)


def test_too_short_a_context_is_named(model: Any) -> None:
    batch: Any = SimpleNamespace(probe=HeadProbe(model, RULE))
    with pytest.raises(UsageError, match="random_tokens"):
        Razor(repeats=400).score([batch])
