"""The profile format: what goes in comes out, and nothing malformed comes in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import HeadProfileError, HeadProfileMismatchError
from kvtier.heads.profile import (
    HeadProfile,
    MeasuredCost,
    ModelShape,
    load_profile,
    window_profile,
)

shapes = st.builds(
    lambda layers, heads, group, dim: ModelShape(
        num_layers=layers, num_kv_heads=heads, num_attention_heads=heads * group, head_dim=dim
    ),
    st.integers(1, 6), st.integers(1, 8), st.integers(1, 4), st.sampled_from([8, 64]),
)  # fmt: skip
costs = st.builds(
    MeasuredCost,
    metric=st.sampled_from(["recall", "nll"]),
    full=st.floats(0, 10),
    profile=st.floats(0, 10),
    samples=st.integers(1, 99),
    context_tokens=st.integers(1, 1 << 20),
)


@st.composite
def profiles(draw: st.DrawFn) -> HeadProfile:
    shape = draw(shapes)
    rows = [draw(st.sets(st.integers(0, shape.num_kv_heads - 1))) for _ in range(shape.num_layers)]
    score = st.tuples(*[st.floats(-5, 5)] * shape.num_kv_heads)
    scores = st.tuples(*[score] * shape.num_layers)
    return HeadProfile(
        model=draw(st.text(min_size=1, max_size=9)),
        revision=draw(st.none() | st.just("0123456789abcdef")),
        shape=shape,
        method="any",
        ca_heads=tuple(tuple(sorted(row)) for row in rows),
        scores=draw(st.none() | scores),
        costs=tuple(draw(st.lists(costs, max_size=2))),
        parameters={"seed": draw(st.integers(0, 9))},
    )


@given(profile=profiles(), other=profiles())
def test_a_saved_profile_loads_equal_and_fits_its_own_shape_only(
    profile: HeadProfile, other: HeadProfile, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("profile") / "p.json"
    profile.save(path)
    assert load_profile(path) == profile
    assert [file.name for file in path.parent.iterdir()] == ["p.json"], "no staging file is left"
    everything = list(range(profile.shape.num_kv_heads))
    for layer, anchored in enumerate(profile.ca_heads):
        assert sorted((*anchored, *profile.locality_heads(layer))) == everything
    total = profile.shape.num_layers * profile.shape.num_kv_heads
    assert profile.ca_share == pytest.approx(profile.num_ca_heads / total)
    profile.check_fits(profile.shape, profile.revision)
    if profile.shape != other.shape:
        with pytest.raises(HeadProfileMismatchError):
            profile.check_fits(other.shape)


SHAPE = ModelShape(num_layers=2, num_kv_heads=3, num_attention_heads=6, head_dim=8)


@pytest.mark.parametrize(
    "change",
    [
        {"ca_heads": ((0,),)},
        {"ca_heads": ((0,), (3,))},
        {"ca_heads": ((0,), (-1,))},
        {"ca_heads": ((1, 0), ())},
        {"ca_heads": ((1, 1), ())},
        {"scores": ((0.0, 0.0, 0.0),)},
        {"scores": ((0.0,), (0.0,))},
        {"schema_version": 2},
        {"surprise": 1},
    ],
)
def test_a_malformed_profile_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    good = window_profile(SHAPE).model_dump(mode="json")
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(good | change))
    with pytest.raises(HeadProfileError, match=r"head_profile: .*bad\.json"):
        load_profile(path)


def test_another_revision_is_refused() -> None:
    profile = window_profile(SHAPE).model_copy(update={"revision": "aa"})
    profile.check_fits(SHAPE, None)
    with pytest.raises(HeadProfileMismatchError, match="revision"):
        profile.check_fits(SHAPE, "bb")


@given(profiles(), st.data())
def test_ranks_share_the_heads_of_a_profile_in_order(profile, data):
    """With more ranks than heads, neighbours hold the same head."""
    heads = profile.shape.num_kv_heads
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    ranks = data.draw(st.sampled_from([*divisors, 2 * heads, 3 * heads]))
    parts = [profile.of_rank(rank, ranks) for rank in range(ranks)]
    width, copies = max(1, heads // ranks), max(1, ranks // heads)
    assert {part.shape.num_kv_heads for part in parts} == {width}
    for layer, chosen in enumerate(profile.ca_heads):
        held = [
            rank // copies * width + head
            for rank, part in enumerate(parts)
            for head in part.ca_heads[layer]
        ]
        assert held == [head for head in chosen for _ in range(copies)]
    for part in parts if copies == 1 else ():
        HeadProfile.model_validate(part.model_dump())
        assert part.shape.group_size == profile.shape.group_size
