"""A setting that does not validate is named as its user wrote it."""

import traceback

import pytest

from kvtier.config import load_settings
from kvtier.errors import ConfigurationError


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"locality_sink_tokens": -1}, "--locality-sink-tokens"),
        ({"locality_recent_tokens": 0}, "--locality-recent-tokens"),
        ({"head_budgets": "unequal"}, "--head-budgets"),
        ({"kept_dtype": "int5"}, "--kept-dtype"),
        ({"kept_dtype": "int4", "head_budgets": "equal"}, "--kept-dtype"),
        ({"kept_dtype": "int4", "head_profile": "p.json"}, "--kept-dtype"),
        ({"compress_prefill": "often"}, "--compress-prefill"),
        ({"reuse_behind_edits": "often"}, "--reuse-behind-edits"),
        ({"reuse_least_tokens": 63}, "--reuse-least-tokens"),
        ({"no_such_setting": 1}, "--no-such-setting"),
        ({"memory": ""}, "--memory"),
        ({"scorer_pool_width": 2}, "--scorer-pool-width"),
        ({"tier": ""}, "--tier"),
        ({"tier_address": f"unix:{'x' * 200}"}, "--tier-address"),
        ({"quality": 0.9, "budget_bytes": 5}, "--budget-bytes"),
        ({"merge": "keepkv"}, "--merge"),
        ({"refresh": "turn"}, "--refresh"),
        ({"refresh": "turn", "retention": 0.5}, "--refresh"),
        ({"refresh": "turn", "tier": "local:7311", "head_budgets": "equal"}, "--refresh"),
        ({"refresh": "sometimes"}, "--refresh"),
        ({"tier": "local:7311", "tier_ca": __file__}, r"tier\.certificate"),
        (
            {"tier": "local:7311", "tier_ca": "x", "tier_key": "x", "tier_certificate": "x"},
            "--tier-ca",
        ),
        ({"redis_url": "rediss://cache", "redis_key": __file__}, r"redis\.certificate"),
        ({"redis_url": "rediss://cache", "redis_certificate": __file__}, r"redis\.key"),
    ],
)
def test_a_bad_setting_is_named(flags, name):
    with pytest.raises(ConfigurationError, match=f"^{name}: expected") as caught:
        load_settings(**flags)
    assert "Value error" not in str(caught.value)


def test_a_bad_setting_is_named_as_its_user_wrote_it(monkeypatch, tmp_path):
    (tmp_path / "kvtier.toml").write_text("[tier]\nspan_tokens = 1\n")
    with pytest.raises(ConfigurationError, match=r"^tier\.span_tokens: expected .*, got 1$"):
        load_settings()
    monkeypatch.setenv("KVTIER_TIER_SPAN_TOKENS", "2")
    with pytest.raises(ConfigurationError, match=r"^KVTIER_TIER_SPAN_TOKENS: expected .*'2'$"):
        load_settings()
    with pytest.raises(ConfigurationError, match=r"^--tier-span-tokens: expected .*'3'$"):
        load_settings(tier_span_tokens="3")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no_such_setting = 1", "no_such_setting: expected the name of a setting"),
        ("[tier]\nspan = 1", "tier.span: expected the name of a setting"),
        ("[spans]\ntokens = 1", "spans: expected the name of a setting"),
        ("tier = 'default'", "tier: expected a table [tier], got 'default'"),
        ("redis = 'redis://:s3cr3t@cache'", "redis: expected a table [redis], got '***"),
        ("redis_password = 's3cr3t'", "redis_password: expected the name of a setting"),
        ("[redis]\npassword = 's3cr3t'", "redis.password: expected the name of a setting"),
        ("redis_url = 'redis://:s3cr3t@cache'", "redis_url: expected the name of a setting"),
        ("[redis.url]\nx = 'redis://:s3cr3t@cache'", "redis.url: expected"),
    ],
)
def test_what_a_file_may_not_say_is_named(tmp_path, text, message):
    (tmp_path / "kvtier.toml").write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        load_settings()
    assert str(caught.value).startswith(message)
    assert "cr3t" not in "".join(traceback.format_exception(caught.value))
