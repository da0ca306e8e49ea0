"""Head profiles over tensor parallel ranks, and checkpoints in which they lie evenly."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_llama import VOCAB, tiny_model

from kvtier.cli import main
from kvtier.errors import UnsupportedModelError, UsageError
from kvtier.heads.model.config import weights_revision
from kvtier.heads.parallel.balance import balance, balanced_heads, even_orders, reordered
from kvtier.heads.parallel.checkpoint import permute_checkpoint
from kvtier.heads.profile import HeadProfile, ModelShape, load_profile, random_profile

SHAPE = ModelShape(num_layers=3, num_kv_heads=4, num_attention_heads=8, head_dim=16)
DEMO = Path(__file__).resolve().parents[2] / "models" / "kvtier-demo"
# Rank 0 of two has all CA heads but one.
UNEVEN = HeadProfile(
    model="tiny", shape=SHAPE, method="by hand", ca_heads=((0, 1), (1,), (0, 1, 3)),
    scores=((4, 3, 1, 0), (0, 9, 1, 2), (5, 6, 0, 7)),
)  # fmt: skip


@st.composite
def profiles(draw: st.DrawFn) -> tuple[HeadProfile, int]:
    """A random profile, and ranks that divide its heads."""
    ranks, places, layers = (draw(st.integers(1, most)) for most in (8, 4, 12))
    heads = ranks * places
    shape = ModelShape(
        num_layers=layers, num_kv_heads=heads, num_attention_heads=2 * heads, head_dim=8
    )
    count = draw(st.integers(0, layers * heads))
    return random_profile(shape, count, seed=draw(st.integers(0, 99))), ranks


@given(profiles())
def test_an_even_order_is_as_even_as_whole_heads_can_be(case):
    profile, ranks = case
    orders = even_orders(profile, ranks)
    for order, layer in zip(orders, profile.ca_heads, strict=True):
        assert sorted(order) == list(range(profile.shape.num_kv_heads))
        assert len(layer) == len({order.index(head) for head in layer})
    new = reordered(profile, orders)
    for rank in range(ranks):
        for old, mine in zip(profile.ca_heads, new.of_rank(rank, ranks).ca_heads, strict=True):
            assert len(mine) in (len(old) // ranks, math.ceil(len(old) / ranks))
    held = balance(new, ranks).heads
    assert sum(held) == profile.num_ca_heads
    assert max(held) - min(held) <= 1
    assert balance(new, ranks).slowest <= balance(profile, ranks).slowest


@given(profiles(), st.integers(0, 99))
def test_balanced_heads_are_the_first_of_an_order_as_far_as_ranks_allow(case, seed):
    profile, ranks = case
    shape, count = profile.shape, profile.num_ca_heads
    order = [(layer, h) for layer in range(shape.num_layers) for h in range(shape.num_kv_heads)]
    random.Random(seed).shuffle(order)
    chosen = balanced_heads(order, count, shape, ranks)
    places = shape.num_kv_heads // ranks
    held = Counter(head // places for _, head in chosen)
    assert len(set(chosen)) == len(chosen)
    if places == 1:
        assert len(set(held.values())) == 1, "whole layers"
        assert len(chosen) == ranks * max(1, round(count / ranks))
        return
    assert len(chosen) == count
    assert max(held.values(), default=0) - min(held[rank] for rank in range(ranks)) <= 1
    for rank in range(ranks):
        of_rank = [head for head in order if head[1] // places == rank]
        assert [head for head in chosen if head in set(of_rank)] == of_rank[: held[rank]]


def test_calibrating_for_ranks_says_what_balance_costs(tmp_path, capsys):
    out = tmp_path / "profile.json"
    flags = ["--model-path", str(DEMO), "--method", "attention-mass", "--share", "0.5"]
    flags += ["--len", "600"]
    flags += ["--samples", "2", "--seed", "3", "--out", str(out), "-q", "--format", "table"]
    assert main(["calibrate", "heads", *flags, "--tp", "4"]) == 0
    told = capsys.readouterr().out
    profile = load_profile(out)
    assert balance(profile, 4).heads == (2, 2, 2, 2)
    assert "for 4 ranks: 2 + 2 + 2 + 2 CA heads instead of" in told
    assert "of what the context is worth is kept instead of" in told
    assert profile.parameters["ranks"] == 4
    assert main(["calibrate", "heads", *flags, "--tp", "3"]) == 2
    assert "--tp" in capsys.readouterr().err


def test_what_is_unbalanced_is_told():
    before = balance(UNEVEN, 2)
    # The fullest ranks hold 2, 1 and 2 of 6 CA heads.
    assert before == ((5, 1), 5 / 3)
    after = balance(reordered(UNEVEN, even_orders(UNEVEN, 2)), 2)
    assert after == ((3, 3), 4 / 3)


def test_scores_move_with_their_heads():
    orders = even_orders(UNEVEN, 2)
    new = reordered(UNEVEN, orders)
    for layer, order in enumerate(orders):
        for place, head in enumerate(order):
            assert new.scores[layer][place] == UNEVEN.scores[layer][head]
            assert (place in new.ca_heads[layer]) == (head in UNEVEN.ca_heads[layer])


@pytest.mark.parametrize("ranks", [0, 3, 8])
def test_ranks_that_do_not_divide_the_heads_are_refused(ranks):
    with pytest.raises(UsageError, match="--tp"):
        even_orders(UNEVEN, ranks)


def write(folder: Path, architecture: str = "Llama", **others) -> Path:
    model = tiny_model(architecture, torch.float32, heads=8, kv_heads=4, **others)
    for name, parameter in model.named_parameters():
        # transformers makes biases of zeros and norms of ones, which no order would change.
        if name.endswith(".bias") or "_norm." in name:
            parameter.data += torch.randn_like(parameter) / 4
    model.save_pretrained(folder, max_shard_size="100KB")
    UNEVEN.model_copy(update={"revision": weights_revision(str(folder))}).save(
        folder / "head_profile.json"
    )
    return folder


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    # In float64 the order of a sum hardly matters.
    ids = torch.randint(VOCAB, (2, 60), generator=torch.Generator().manual_seed(1))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize(
    ("architecture", "others"),
    [
        ("Llama", {}),
        ("Llama", {"attention_bias": True, "tie_word_embeddings": True}),
        ("Qwen2", {}),
        ("Qwen3", {}),
        ("Mistral", {}),
    ],
)
def test_a_model_says_the_same_with_its_heads_in_another_order(
    tmp_path, capsys, architecture, others
):
    folder, out = write(tmp_path / "model", architecture, **others), tmp_path / "even"
    flags = ["--model-path", str(folder), "--head-profile", str(folder / "head_profile.json")]
    assert main(["calibrate", "permute", *flags, "--tp", "2", "--out", str(out)]) == 0
    assert "5 + 1, now 3 + 3" in capsys.readouterr().out
    before, after = logits(folder), logits(out)
    assert float((before - after).abs().max()) < 1e-9
    profile = load_profile(out / "head_profile.json")
    profile.check_fits(SHAPE, weights_revision(str(out)))
    assert balance(profile, 2).heads == (3, 3)
    assert len(list(out.glob("*.safetensors"))) == len(list(folder.glob("*.safetensors"))) > 1
    assert profile.model == "even"


def test_a_profile_of_other_weights_is_refused(tmp_path, capsys):
    folder = write(tmp_path / "model")
    UNEVEN.model_copy(update={"revision": "another"}).save(tmp_path / "profile.json")
    flags = ["--model-path", str(folder), "--head-profile", str(tmp_path / "profile.json")]
    assert main(["calibrate", "permute", *flags, "--tp", "2", "--out", str(tmp_path / "even")]) == 2
    assert "another" in capsys.readouterr().err
    assert not (tmp_path / "even").exists()


def test_another_order_of_heads_is_another_model(tmp_path):
    """Were the output projection's columns not moved, or query heads not, the test above fails."""
    folder = write(tmp_path / "model")
    model = tiny_model("Llama", torch.float32, heads=8, kv_heads=4)
    with torch.no_grad():
        attention = model.model.layers[1].self_attn
        for part in (attention.k_proj, attention.v_proj):
            part.weight.copy_(part.weight.unflatten(0, (4, 16))[[1, 0, 2, 3]].flatten(0, 1))
    model.save_pretrained(tmp_path / "broken")
    assert float((logits(folder) - logits(tmp_path / "broken")).abs().max()) > 1e-2


def test_fused_projections_are_refused_and_leave_nothing(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = write(tmp_path / "model")
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        fused = {name.replace("q_proj", "qkv_proj"): tensor for name, tensor in weights.items()}
        save_file(fused, file)
    with pytest.raises(UnsupportedModelError, match="qkv_proj"):
        permute_checkpoint(folder, even_orders(UNEVEN, 2), tmp_path / "even")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_norms_over_all_heads_together_are_refused(tmp_path):
    """As Olmo2's: their weights would have to move with the heads."""
    folder = write(tmp_path / "model", "Olmo2")
    with pytest.raises(UnsupportedModelError, match="norm"):
        permute_checkpoint(folder, even_orders(UNEVEN, 2), tmp_path / "even")


def test_weights_of_other_names_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = write(tmp_path / "model")
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        save_file({name.replace("self_attn", "mixer"): t for name, t in weights.items()}, file)
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.self_attn"):
        permute_checkpoint(folder, even_orders(UNEVEN, 2), tmp_path / "even")


@pytest.mark.parametrize("place", ["model", "nowhere/even"])
def test_a_place_that_cannot_be_written_to_is_refused(tmp_path, place):
    folder = write(tmp_path / "model")
    with pytest.raises(UsageError, match="--out"):
        permute_checkpoint(folder, even_orders(UNEVEN, 2), tmp_path / place)
    assert (folder / "head_profile.json").exists()
