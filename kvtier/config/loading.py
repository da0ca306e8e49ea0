"""The sources of settings: flags > KVTIER_* variables > the file named by KVTIER_CONFIG (or
./kvtier.toml) > defaults.

SGLang runs its scheduler in a child process; `Settings.to_env` is how the settings reach it.

Only variables that a setting has are looked at. Others with the same prefix may be anyone's: a
Kubernetes service named kvtier-tier gives every pod a KVTIER_TIER_PORT.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvtier.config.names import flag_of
from kvtier.config.sections import REFUSAL
from kvtier.config.settings import SECTIONS, SETTINGS, Settings
from kvtier.errors import ConfigurationError

CONFIG_VARIABLE = "KVTIER_CONFIG"
DEFAULT_CONFIG_FILE = "kvtier.toml"
HIDDEN = "**********"

_BY_PATH = {setting.path: setting for setting in SETTINGS}
_BY_NAME = {name: setting for setting in SETTINGS for name in setting.names}


class Given(NamedTuple):
    """A value, and what its user called it: --tier, KVTIER_TIER or tier.address."""

    written: str
    value: Any


def load_settings(**flags: Any) -> Settings:
    """Settings from flags, environment, file and defaults.

    flags: by their names without dashes, such as tier or tier_span_tokens; those that are None are
    not given. Raises ConfigurationError naming the first setting that does not validate.
    """
    given = _from_file(config_file()) | _from_environment(os.environ) | _from_flags(flags)
    try:
        return Settings.model_validate(_as_tables(given))
    except ValidationError as error:
        raise _refused(error.errors()[0], given) from error


def config_file() -> Path | None:
    """The configuration file in force, if any.

    Raises ConfigurationError when KVTIER_CONFIG names a file that does not exist.
    """
    named = os.environ.get(CONFIG_VARIABLE)
    if named is not None:
        path = Path(named)
        if not path.is_file():
            raise ConfigurationError(CONFIG_VARIABLE, "an existing TOML file", named)
        return path
    default = Path(DEFAULT_CONFIG_FILE)
    return default if default.is_file() else None


def _from_file(path: Path | None) -> dict[str, Given]:
    if path is None:
        return {}
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except (OSError, ValueError) as error:
        expected = f"a readable TOML file ({error})"
        raise ConfigurationError(CONFIG_VARIABLE, expected, str(path)) from error
    entries: dict[str, Any] = {}
    for key, value in document.items():
        if key not in SECTIONS:
            entries[key] = value
        elif isinstance(value, dict):
            entries |= {f"{key}.{name}": one for name, one in value.items()}
        else:
            raise ConfigurationError(key, f"a table [{key}]", _printable(value))
    for name in entries:
        if name not in _BY_PATH:
            raise _unknown(name)
    return {name: Given(name, value) for name, value in entries.items()}


def _from_environment(environment: Mapping[str, str]) -> dict[str, Given]:
    # A variable in small letters is the same, as in other programs' settings.
    texts = {name.upper(): text for name, text in environment.items()}
    return {
        setting.path: Given(variable, texts[variable])
        for setting in SETTINGS
        for variable in reversed(setting.variables)
        if variable in texts
    }


def _from_flags(flags: Mapping[str, Any]) -> dict[str, Given]:
    given = {}
    for name, value in flags.items():
        if name not in _BY_NAME:
            raise _unknown(flag_of(name))
        if value is not None:
            given[_BY_NAME[name].path] = Given(flag_of(name), value)
    return given


def _unknown(written: str) -> ConfigurationError:
    """Return the error that refuses a name. It shows no value: under a mistyped name that can be a
    password."""
    return ConfigurationError(written, "the name of a setting", written)


def _as_tables(given: Mapping[str, Given]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for path, one in given.items():
        section, _, key = path.rpartition(".")
        table = values.setdefault(section, {}) if section else values
        table[key] = one.value
    return values


def _refused(first: ErrorDetails, given: Mapping[str, Given]) -> ConfigurationError:
    parts = [str(part) for part in first["loc"]]
    context = first.get("ctx", {})
    if first["type"] == REFUSAL:
        parts.append(context["field"])
    path = ".".join(parts)
    rejected = given.get(path, Given(path, None))
    value = context["got"] if first["type"] == REFUSAL else rejected.value
    secret = path in _BY_PATH and _BY_PATH[path].is_secret
    return ConfigurationError(
        rejected.written,
        first["msg"].removeprefix("Input should be "),
        HIDDEN if secret else _printable(value),
    )


def _printable(value: Any) -> Any:
    """A rejected value as an error may show it: a URL can hold a password."""
    return HIDDEN if "://" in str(value) else value


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every setting, section by section. What is parsed is for `load_settings`."""
    groups = {
        name: parser.add_argument_group(name, kind.__doc__) for name, kind in SECTIONS.items()
    }
    for setting in SETTINGS:
        group = groups.get(setting.section, parser)
        about = setting.field.description
        if setting.is_switch:
            switch = argparse.BooleanOptionalAction
            group.add_argument(*setting.flags, action=switch, default=None, help=about)
        else:
            group.add_argument(*setting.flags, metavar="VALUE", help=about)
