"""Settings: precedence, files, passwords, and sizes."""

import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cli import main
from kvtier.config import load_settings
from kvtier.errors import ConfigurationError, SizeError
from kvtier.sizes import format_size, parse_size


def test_flags_beat_environment_beats_file_beats_defaults(monkeypatch, tmp_path):
    (tmp_path / "kvtier.toml").write_text(
        "nll_stride = 5\n[locality]\nsink_tokens = 1\nrecent_tokens = 2\nbranch_recent_tokens = 3\n"
    )
    monkeypatch.setenv("KVTIER_LOCALITY_RECENT_TOKENS", "20")
    monkeypatch.setenv("KVTIER_LOCALITY_BRANCH_RECENT_TOKENS", "30")
    settings = load_settings(locality_branch_recent_tokens=300)
    locality = settings.locality
    windows = locality.sink_tokens, locality.recent_tokens, locality.branch_recent_tokens
    assert windows == (1, 20, 300)
    assert (settings.nll_stride, settings.kernels, locality.compensation) == (5, "auto", True)


def test_a_configuration_file_that_cannot_be_read_is_named(monkeypatch, tmp_path):
    for content in (b"nll_stride = = 3", b"\xff\xfe"):
        (tmp_path / "kvtier.toml").write_bytes(content)
        with pytest.raises(ConfigurationError, match="KVTIER_CONFIG: expected a readable TOML"):
            load_settings()
    monkeypatch.setenv("KVTIER_CONFIG", "nowhere.toml")
    with pytest.raises(ConfigurationError, match="KVTIER_CONFIG: expected an existing"):
        load_settings()


def test_a_command_whose_packages_are_not_there_names_the_extra_that_brings_them():
    script = (
        "import sys\n"
        "sys.modules['lmdb'] = None\n"
        "from kvtier.cli import main\n"
        "sys.exit(main(['tier', '--store', 'memory']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("kvtier: error: ")
    assert done.stderr.endswith("pip install 'kvtier[tier]' brings what this command needs\n")


SECRET_URL = "rediss://ada:s3cr3t@cache:6380/2"


def test_a_redis_password_reaches_child_processes_and_nothing_else(monkeypatch, tmp_path, capsys):
    (tmp_path / "ca.pem").write_text("")
    sent = load_settings(redis_url=SECRET_URL, redis_ca=tmp_path / "ca.pem", redis_timeout_s=0.25)
    for name, value in sent.to_env().items():
        monkeypatch.setenv(name, value)
    received = load_settings()
    assert received == sent
    assert received.redis.url.get_secret_value() == SECRET_URL
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    assert "rediss://ada:***@cache:6380/2" in shown
    for text in (shown, repr(sent), str(sent), sent.model_dump_json(), str(sent.shown())):
        assert "s3cr3t" not in text


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"redis_url": "http://ada:s3cr3t@cache"}, "redis_url"),
        ({"redis_uri": "redis://ada:s3cr3t@cache"}, "redis_uri"),
        ({"redis_url": SECRET_URL, "nll_stride": -1}, "nll_stride"),
        ({"nll_stride": SECRET_URL}, "nll_stride"),
        ({"redis_password": "s3cr3t"}, "redis_password"),
        ({"redis_url": SECRET_URL, "redis_ca": "nowhere.pem"}, "redis_ca"),
        ({"redis_url": "redis://ada:s3cr3t@cache", "redis_ca": "kvtier.toml"}, "redis_ca"),
        ({"redis_ca": "kvtier.toml"}, "redis_ca"),
        ({"redis_url": SECRET_URL, "redis_key": "nowhere.pem"}, "redis_key"),
        ({"redis_certificate": "kvtier.toml", "redis_key": "kvtier.toml"}, "redis_certificate"),
        ({"redis_timeout_s": 0}, "redis_timeout_s"),
        ({"calibration_ttl_s": 0}, "calibration_ttl_s"),
        ({"calibration_poll_s": 0}, "calibration_poll_s"),
    ],
)
def test_a_bad_store_setting_is_named_without_its_password(flags, name, tmp_path):
    (tmp_path / "kvtier.toml").write_text("")
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ConfigurationError, match=f"^{flag}: expected") as caught:
        load_settings(**flags)
    told = "".join(traceback.format_exception(caught.value))
    assert "cr3t" not in told


def test_settings_that_do_not_go_together_hide_the_password_too(monkeypatch):
    """The input of a rule over all settings is all settings."""
    monkeypatch.setenv("KVTIER_REDIS_URL", SECRET_URL)
    with pytest.raises(ConfigurationError, match=r"^--retention: expected only one of") as caught:
        load_settings(quality=0.9, retention=0.5)
    assert "cr3t" not in "".join(traceback.format_exception(caught.value))


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
    """Whatever they are: one setting of each kind; test_setting_names.py sends every setting."""
    sent = load_settings(**values)
    with pytest.MonkeyPatch.context() as patch:
        for name, text in sent.to_env().items():
            patch.setenv(name, text)
        received = load_settings()
    assert received == sent
    assert received.to_env() == sent.to_env()


def test_data_live_in_the_users_folder_unless_told(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert load_settings().data_dir == tmp_path / "kvtier"
    assert load_settings(data_dir="elsewhere").data_dir == Path("elsewhere")


@given(st.integers(1, 2**40))
def test_sizes_round_trip(value):
    assert parse_size(format_size(value)) == value


@pytest.mark.parametrize("text", ["", "k", "-1", "0", "1.5", "12q", "4 k", "1e3"])
def test_what_is_not_a_size_is_refused_by_name(text):
    with pytest.raises(SizeError, match=r"^--len: expected"):
        parse_size(text, "--len")
