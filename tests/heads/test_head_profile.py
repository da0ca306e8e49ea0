"""The profile format: what goes in comes out, and nothing malformed comes in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvtier.errors import HeadProfileError, HeadProfileMismatchError
from kvtier.heads.profile import (
    HeadProfile,
    MeasuredCost,
    ModelShape,
    load_profile,
    random_profile,
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


@given(profile=profiles())
def test_a_saved_profile_loads_equal(
    profile: HeadProfile, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("profile") / "p.json"
    profile.save(path)
    assert load_profile(path) == profile
    assert [file.name for file in path.parent.iterdir()] == ["p.json"], "no staging file is left"


@given(profiles())
def test_ca_and_locality_heads_share_out_every_layer(profile: HeadProfile) -> None:
    everything = list(range(profile.shape.num_kv_heads))
    for layer, anchored in enumerate(profile.ca_heads):
        assert sorted((*anchored, *profile.locality_heads(layer))) == everything
    total = profile.shape.num_layers * profile.shape.num_kv_heads
    assert profile.ca_share == pytest.approx(profile.num_ca_heads / total)


@given(shapes, st.data())
def test_random_profiles_have_their_count_and_repeat(
    shape: ModelShape, data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, shape.num_layers * shape.num_kv_heads))
    seed = data.draw(st.integers(0, 5))
    drawn = random_profile(shape, count, seed)
    assert drawn.num_ca_heads == count
    assert drawn == random_profile(shape, count, seed)


@given(profiles(), profiles())
def test_a_profile_fits_its_own_shape_only(a: HeadProfile, b: HeadProfile) -> None:
    a.check_fits(a.shape, a.revision)
    if a.shape != b.shape:
        with pytest.raises(HeadProfileMismatchError):
            a.check_fits(b.shape)


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
    with pytest.raises(ValidationError):
        HeadProfile.model_validate(good | change)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(good | change))
    with pytest.raises(HeadProfileError, match=r"head_profile: .*bad\.json"):
        load_profile(path)


def test_a_file_that_is_missing_or_no_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(HeadProfileError, match=r"none\.json"):
        load_profile(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("heads: all")
    with pytest.raises(HeadProfileError, match=r"text\.json"):
        load_profile(tmp_path / "text.json")


def test_another_revision_is_refused() -> None:
    profile = window_profile(SHAPE).model_copy(update={"revision": "aa"})
    profile.check_fits(SHAPE, None)
    with pytest.raises(HeadProfileMismatchError, match="revision"):
        profile.check_fits(SHAPE, "bb")


@given(profiles(), st.data())
def test_ranks_share_the_heads_of_a_profile_in_order(profile, data):
    heads = profile.shape.num_kv_heads
    ranks = data.draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    parts = [profile.of_rank(rank, ranks) for rank in range(ranks)]
    width = heads // ranks
    for layer, chosen in enumerate(profile.ca_heads):
        held = [
            rank * width + head for rank, part in enumerate(parts) for head in part.ca_heads[layer]
        ]
        assert tuple(held) == chosen
    for part in parts:
        HeadProfile.model_validate(part.model_dump())
        assert part.shape.group_size == profile.shape.group_size


@given(profiles(), st.integers(2, 3))
def test_with_more_ranks_than_heads_neighbours_hold_the_same_head(profile, copies):
    ranks = copies * profile.shape.num_kv_heads
    for rank in range(ranks):
        part = profile.of_rank(rank, ranks)
        assert part.shape.num_kv_heads == 1
        for layer, chosen in enumerate(profile.ca_heads):
            assert part.ca_heads[layer] == ((0,) if rank // copies in chosen else ())
