"""The settings of child processes: whatever they are, children get the same ones through their
environment."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config import load_settings


@pytest.mark.parametrize(
    ("memory", "folder"),
    [("store", None), ("./store", Path("store")), ("store/", Path("store")), ("a", Path("a"))],
)
def test_a_directory_of_memories_that_is_called_store_is_not_the_store(monkeypatch, memory, folder):
    sent = load_settings(memory=memory)
    assert sent.memory_folder == folder
    monkeypatch.setenv("KVTIER_MEMORY", sent.to_env()["KVTIER_MEMORY"])
    assert load_settings().memory_folder == folder


_texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
_VALUES = {
    "head_profile": _texts.map(lambda text: f"./{text}"),
    "memory": st.just("store") | _texts.map(lambda text: f"./{text}"),
    "share_rule": _texts,
    "nll_stride": st.integers(1, 2**40),
    "shadow_share": st.floats(0, 1),
    "force_cpu": st.booleans(),
    "tier_address": _texts.map(lambda text: f"unix:/{text}"),
    "calibration_poll_s": st.floats(0, 1e300, exclude_min=True),
    "redis_url": st.from_regex(
        r"\Arediss?://(\w*:\w+@)?[a-z]+(:[1-9][0-9]{3})?(/\d)?\Z", fullmatch=True
    ),
}


@given(st.fixed_dictionaries({}, optional=_VALUES))
def test_any_value_survives_the_trip_through_the_environment(values):
    """One setting of each kind; test_setting_names.py sends every setting."""
    sent = load_settings(**values)
    with pytest.MonkeyPatch.context() as patch:
        for name, text in sent.to_env().items():
            patch.setenv(name, text)
        received = load_settings()
    assert received == sent
    assert received.to_env() == sent.to_env()
