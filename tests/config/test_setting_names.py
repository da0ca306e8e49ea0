"""The names of settings: one rule for flags, variables and the file, and no name in silence."""

import argparse
import importlib.util
import json
from pathlib import Path

import pytest

from kvtier.config import SECTIONS, SETTINGS, Settings, load_settings
from kvtier.config.loading import add_flags


def _parsed(flags):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    options, rest = parser.parse_known_args(flags)
    assert rest == []
    return load_settings(**vars(options))


# A value for every setting, none of them its default, and what else it wants beside it.
TIER = {"tier.address": "localhost:7311", "retention": 0.5}
REFRESH = {**TIER, "refresh.when": "turn"}
TLS = {
    "tier.address": "tier:7311",
    "tier.ca": "a.pem",
    "tier.certificate": "b.pem",
    "tier.key": "c.pem",
}
EXAMPLES = {
    "head_profile": ("p.json", {}),
    "quality": (0.9, {}),
    "curve": ("c.json", {}),
    "retention": (0.25, {}),
    "share_rule": ("budget-tokens=64", {}),
    "head_budgets": ("adaptive", {"retention": 0.5}),
    "kept_dtype": ("int4", {}),
    "compress_prefill": ("always", {}),
    "reuse_behind_edits": ("off", {}),
    "reuse_least_tokens": (300, {}),
    "nll_stride": (2, {}),
    "memory": ("memories", {}),
    "shadow_share": (0.01, {}),
    "request_log": ("requests.jsonl", {}),
    "kernels": ("reference", {}),
    "force_cpu": (True, {}),
    "data_dir": ("elsewhere", {}),
    "budget.tokens": (4096, {}),
    "budget.bytes": (1 << 20, {}),
    "scorer.name": ("keydiff", {}),
    "scorer.leverage_weight": (0.3, {}),
    "scorer.window_tokens": (64, {}),
    "scorer.pool_width": (3, {}),
    "scorer.file": ("w.npz", {}),
    "locality.sink_tokens": (8, {}),
    "locality.recent_tokens": (512, {}),
    "locality.branch_recent_tokens": (16, {}),
    "locality.compensation": (False, {}),
    "tier.address": ("unix:/run/tier.sock", {}),
    "tier.namespace": ("ada", {}),
    "tier.ca": ("a.pem", TLS),
    "tier.certificate": ("b.pem", TLS),
    "tier.key": ("c.pem", TLS),
    "tier.timeout_s": (2.5, {}),
    "tier.patience_s": (60.0, {}),
    "tier.span_tokens": (64, {}),
    "tier.buffer_bytes": (2 << 20, {}),
    "tier.shared_memory": (False, {}),
    "tier.drain_s": (5.0, {}),
    "refresh.when": ("turn", TIER),
    "refresh.queries": (8, {}),
    "merge.form": ("keepkv", REFRESH),
    "merge.floor": (0.5, {}),
    "calibration.ttl_s": (60, {}),
    "calibration.poll_s": (0.5, {}),
    "redis.url": ("rediss://cache:6380/2", {}),
    "redis.ca": ("a.pem", {"redis.url": "rediss://cache"}),
    "redis.certificate": ("b.pem", {"redis.url": "rediss://cache", "redis.key": "c.pem"}),
    "redis.key": ("c.pem", {"redis.url": "rediss://cache", "redis.certificate": "b.pem"}),
    "redis.timeout_s": (0.25, {}),
}


def _as_name(path):
    """The one rule: section, then key."""
    return path.replace(".", "_")


def _in_file(values):
    """TOML of settings by their paths."""
    lines = [f"{path} = {json.dumps(value)}" for path, value in values.items() if "." not in path]
    for section in SECTIONS:
        lines.append(f"[{section}]")
        for path, value in values.items():
            if path.startswith(f"{section}."):
                lines.append(f"{path.removeprefix(f'{section}.')} = {json.dumps(value)}")
    return "\n".join(lines)


def _as_flags(name, value):
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", str(value)]


def test_every_setting_has_an_example_here_and_names_of_its_own():
    assert [setting.path for setting in SETTINGS] == list(EXAMPLES)
    names = [name for setting in SETTINGS for name in setting.names]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.path)
def test_a_setting_is_reached_by_flag_variable_and_file_by_one_rule(monkeypatch, tmp_path, setting):
    for name in ("a.pem", "b.pem", "c.pem"):
        (tmp_path / name).write_text("")
    value, beside = EXAMPLES[setting.path]
    values = {**beside, setting.path: value}
    flags = [word for path, one in values.items() for word in _as_flags(_as_name(path), one)]
    by_flag = _parsed(flags)
    assert setting.value(by_flag) != setting.value(Settings())
    assert setting.is_given(by_flag)
    assert not setting.is_given(load_settings())
    with monkeypatch.context() as inside:
        for path, one in values.items():
            inside.setenv(f"KVTIER_{_as_name(path).upper()}", str(one))
        by_variable = load_settings()
    with monkeypatch.context() as child:
        for name, text in by_flag.to_env().items():
            child.setenv(name, text)
        assert load_settings() == by_flag
    (tmp_path / "kvtier.toml").write_text(_in_file(values))
    assert by_flag == by_variable == load_settings()


def test_the_page_of_settings_has_a_row_for_every_setting():
    path = Path(__file__).parents[2] / "docs" / "hooks.py"
    spec = importlib.util.spec_from_file_location("hooks", path)
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = hooks.on_page_markdown("<!-- settings -->")
    for setting in SETTINGS:
        flags = " or ".join(f"`{flag}`" for flag in setting.flags)
        assert page.count(f"| `{setting.key}` | {flags} |") == 1
    assert [f"## `[{section}]`" in page for section in SECTIONS] == [True] * len(SECTIONS)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("tier", "tier.address"),
        ("refresh", "refresh.when"),
        ("merge", "merge.form"),
        ("scorer", "scorer.name"),
    ],
)
def test_the_main_setting_of_a_section_goes_by_the_sections_name(monkeypatch, name, path):
    value, beside = EXAMPLES[path]
    rest = [word for other, one in beside.items() for word in _as_flags(_as_name(other), one)]
    short = _parsed([*rest, f"--{name}", value])
    assert short == _parsed([*rest, *_as_flags(_as_name(path), value)])
    monkeypatch.setenv(f"KVTIER_{name.upper()}", value)
    assert _parsed(rest) == short
    monkeypatch.setenv(f"KVTIER_{_as_name(path).upper()}", "overruled")
    assert _parsed(rest) == short


def test_other_variables_with_the_prefix_are_ignored(monkeypatch):
    """Kubernetes sets such ones for services named kvtier, kvtier-tier and kvtier-redis."""
    for name in ("KVTIER_PORT", "KVTIER_TIER_PORT", "KVTIER_REDIS_SERVICE_HOST", "KVTIER_REQUIRE"):
        monkeypatch.setenv(name, "tcp://10.0.0.1:7311")
    assert load_settings() == Settings()
