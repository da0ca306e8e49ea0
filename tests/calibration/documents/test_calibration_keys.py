"""Key names: every model with a policy, or with a memory's name, has one that can be read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.calibration.keys import (
    UNKNOWN,
    CurveKey,
    curve_key,
    memory_key,
    parse_key,
    profile_key,
    worth_key,
)
from kvtier.errors import UsageError

names = st.text(min_size=1, max_size=20)


@given(names, st.none() | names, names)
def test_keys_round_trip(model, revision, name):
    for key in (
        curve_key(model, revision, name),
        profile_key(model, revision),
        worth_key(model, revision),
        memory_key(model, revision, name),
    ):
        assert parse_key(str(key)) == key
        assert key.revision == (revision or UNKNOWN)


@given(names, names, names, names)
def test_different_names_have_different_keys(model, revision, policy, other):
    if other != model:
        assert str(curve_key(model, revision, policy)) != str(curve_key(other, revision, policy))
        assert str(memory_key("m", revision, model)) != str(memory_key("m", revision, other))
    assert str(memory_key(model, revision, policy)) != str(curve_key(model, revision, policy))


@given(names)
def test_no_part_can_be_read_as_a_pattern_or_a_separator(model):
    _, _, _, encoded, _ = str(profile_key(model, None)).split(":")
    assert not set("*?[]\\/ \n") & set(encoded)


def test_a_hub_id_reads_as_designed():
    assert (
        str(curve_key("org/model:7b", None, "c32"))
        == "kvtier:v1:curve:org%2Fmodel%3A7b:unknown:c32"
    )
    assert str(profile_key("m", "r")) == "kvtier:v1:profile:m:r"
    assert str(memory_key("m", "r", "my tools")) == "kvtier:v1:memory:m:r:my%20tools"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kvtier:v1:",
        "kvtier:v1:curve:a:b",
        "kvtier:v1:curve:a:b:c:d",
        "kvtier:v1:profile:a",
        "kvtier:v1:profile:a:",
        "kvtier:v1:worth:a",
        "kvtier:v1:memory:a:b",
        "kvtier:v1:memory:a:b:",
        "kvtier:v1:memory:a:b:c:d",
        "kvtier:v1:memory:a:b:my tools",
        "kvtier:v1:shape:a:b",
        "kvtier:v2:profile:a:b",
        "other:v1:profile:a:b",
        "kvtier:v1:profile:a/b:c",
        "kvtier:v1:profile:a%2fb:c",
        "kvtier:v1:profile:%61:c",
    ],
)
def test_what_is_no_key_is_refused_by_name(text):
    with pytest.raises(UsageError, match=r"^KEY: expected .*kvtier:v1:memory:MODEL:REVISION:NAME"):
        parse_key(text, "KEY")


@pytest.mark.parametrize("model", ["", "\ud800"])
def test_a_part_that_cannot_be_written_is_named(model):
    with pytest.raises(UsageError, match=r"^model"):
        str(CurveKey(model, "r", "p"))
