"""The settings of child processes: whatever they are, children get the same ones through their
environment."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config import SETTINGS, load_settings


@pytest.mark.parametrize(
    ("memory", "folder"),
    [("store", None), ("./store", Path("store")), ("store/", Path("store")), ("a", Path("a"))],
)
def test_a_directory_of_memories_that_is_called_store_is_not_the_store(monkeypatch, memory, folder):
    sent = load_settings(memory=memory)
    assert sent.memory_folder == folder
    monkeypatch.setenv("KVTIER_MEMORY", sent.to_env()["KVTIER_MEMORY"])
    assert load_settings().memory_folder == folder


_shares = st.floats(0, 1, exclude_min=True)
_texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
_paths = _texts.map(lambda text: f"./{text}")
_counts = st.integers(1, 2**40)
_RULES = ("quality", "retention", "share_rule", "budget_tokens", "budget_bytes")
_LOOSE = {
    "head_profile": _paths,
    "curve": _paths,
    "compress_prefill": st.sampled_from(["auto", "always", "never"]),
    "reuse_behind_edits": st.sampled_from(["auto", "on", "off"]),
    "reuse_least_tokens": st.integers(64, 1000),
    "nll_stride": _counts,
    "memory": st.just("store") | _paths,
    "shadow_share": st.floats(0, 1),
    "request_log": _paths,
    "kernels": st.sampled_from(["auto", "reference", "triton", "flashinfer"]),
    "force_cpu": st.booleans(),
    "data_dir": _paths,
    "scorer_name": _texts,
    "scorer_leverage_weight": st.floats(0, 1e300),
    "scorer_window_tokens": st.integers(2, 2**40),
    "scorer_pool_width": _counts.map(lambda count: 2 * count - 1),
    "scorer_file": _paths,
    "locality_sink_tokens": st.integers(0, 2**40),
    "locality_recent_tokens": st.integers(256, 2**40),
    "locality_branch_recent_tokens": st.integers(0, 2**40),
    "locality_compensation": st.booleans(),
    "tier_address": _texts.map(lambda text: f"unix:/{text}"),
    "tier_namespace": _texts,
    "tier_timeout_s": st.floats(0, 60, exclude_min=True),
    "tier_patience_s": st.floats(0, 3600, exclude_min=True),
    "tier_span_tokens": st.integers(16, 256),
    "tier_buffer_bytes": st.integers(1 << 20, 2**50),
    "tier_shared_memory": st.booleans(),
    "tier_drain_s": st.floats(0, 12),
    "refresh_by": st.sampled_from(["fetch", "near-data"]),
    "refresh_queries": _counts,
    "merge_floor": st.floats(-1, 1),
    "calibration_ttl_s": _counts,
    "calibration_poll_s": st.floats(0, 1e300, exclude_min=True),
    "redis_url": st.from_regex(
        r"\Arediss?://(\w*:\w+@)?[a-z]+(:[1-9][0-9]{3})?(/\d)?\Z", fullmatch=True
    ),
    "redis_timeout_s": st.floats(0, 60, exclude_min=True),
}
_RETENTION_RULES = st.one_of(
    st.fixed_dictionaries({"quality": _shares}),
    st.fixed_dictionaries({"retention": _shares}),
    st.fixed_dictionaries({"share_rule": _texts}),
    st.fixed_dictionaries({"budget_tokens": _counts}),
    st.fixed_dictionaries({"budget_bytes": _counts}),
)
_REFRESHING = st.fixed_dictionaries(
    {
        "tier_address": _LOOSE["tier_address"],
        "refresh_when": st.one_of(st.just("turn"), _counts.map(str)),
    },
    optional={
        "refresh_moved": st.floats(0, 1, exclude_min=True, exclude_max=True),
        "merge_form": st.sampled_from(["off", "keepkv"]),
    },
)
_TLS_FILES = dict.fromkeys(("tier_ca", "tier_certificate", "tier_key"), Path(__file__))

_REDIS_TLS_FILES = dict.fromkeys(("redis_ca", "redis_certificate", "redis_key"), Path(__file__))


@st.composite
def _valid_settings(draw):
    values = draw(st.fixed_dictionaries({}, optional=_LOOSE))
    values |= draw(st.one_of(st.just({}), _RETENTION_RULES))
    if any(rule in values for rule in _RULES):
        values |= draw(st.one_of(st.just({}), _REFRESHING))
        near_data = "refresh_when" in values and values.get("refresh_by") == "near-data"
        if not near_data and not values.keys() & {"quality", "head_profile"}:
            competing = {"head_budgets": "adaptive"}
            coded = {**competing, "kept_dtype": "int4"}
            values |= draw(st.sampled_from([{}, competing, coded]))
    values |= draw(st.sampled_from([{}, _TLS_FILES]))
    if values.get("redis_url", "").startswith("rediss:"):
        values |= draw(st.sampled_from([{}, {"redis_ca": Path(__file__)}, _REDIS_TLS_FILES]))
    return values


@given(_valid_settings())
def test_any_settings_survive_the_trip_through_the_environment(values):
    sent = load_settings(**values)
    with pytest.MonkeyPatch.context() as patch:
        for name, text in sent.to_env().items():
            patch.setenv(name, text)
        received = load_settings()
    assert received == sent
    assert received.to_env() == sent.to_env()


def test_generated_settings_are_of_every_kind():
    drawn = {*_LOOSE, *_TLS_FILES, *_REDIS_TLS_FILES, "refresh_when", "refresh_moved", "merge_form"}
    drawn |= {"head_budgets", "kept_dtype"}
    drawn |= set(_RULES)
    assert drawn == {setting.path.replace(".", "_") for setting in SETTINGS}
