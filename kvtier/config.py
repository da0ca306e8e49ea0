"""Settings: one frozen object, validated once, read nowhere else from the environment.

Precedence: flags (constructor arguments) > KVTIER_* environment variables > the file named by
KVTIER_CONFIG (or ./kvtier.toml) > the defaults below. SGLang runs its scheduler in a child
process; `Settings.to_env` is how the settings reach it.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from kvtier.errors import ConfigurationError

ENV_PREFIX = "KVTIER_"
DEFAULT_CONFIG_FILE = "kvtier.toml"


class Settings(BaseSettings):
    """What a context keeps, and how the pools are cut."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    head_profile: Path | None = Field(
        None, description="Head profile file (JSON). None: every head keeps the whole context."
    )
    sink_tokens: int = Field(
        128, ge=0, description="First tokens of a context that locality heads always keep."
    )
    recent_tokens: int = Field(
        256, ge=1, description="Last tokens of each turn's prompt that locality heads keep."
    )
    branch_recent_tokens: int = Field(
        128,
        ge=0,
        description="A request may leave a compressed node inside its recent window as long as "
        "this many recent tokens stay before the branch.",
    )
    compensation: bool = Field(
        True, description="Represent a node's dropped tokens by one voted entry (RazorAttention)."
    )
    prefill: Literal["exact", "streaming"] = Field(
        "exact",
        description="exact: prefill attends to everything, then compresses. streaming: locality "
        "heads see sink + recent already during prefill, so their peak memory falls too.",
    )
    session_tokens: int = Field(
        32768, ge=1, description="Expected context length of a session; sizes the two pools."
    )
    turn_tokens: int = Field(
        1024, ge=1, description="Expected tokens a session adds in all its turns; sizes the pools."
    )
    locality_slots: int | None = Field(
        None, ge=1, description="Slots of the locality pool. None: derived from the KV budget."
    )
    kernels: str = Field("reference", description="Attention kernel backend.")
    force_cpu: bool = Field(
        False, description="Activate kvtier's CPU platform even where CUDA is available."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        toml = TomlConfigSettingsSource(settings_cls, toml_file=config_file())
        return init_settings, env_settings, toml

    def to_env(self) -> dict[str, str]:
        """The settings as KVTIER_* variables for child processes; unset ones are left out."""
        values = self.model_dump(mode="json", exclude_none=True)
        return {
            ENV_PREFIX + name.upper(): str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in values.items()
        }


def config_file() -> Path | None:
    """The configuration file in force, if any.

    Raises ConfigurationError when KVTIER_CONFIG names a file that does not exist.
    """
    named = os.environ.get("KVTIER_CONFIG")
    if named is not None:
        path = Path(named)
        if not path.is_file():
            raise ConfigurationError("KVTIER_CONFIG", "an existing TOML file", named)
        return path
    default = Path(DEFAULT_CONFIG_FILE)
    return default if default.is_file() else None


def load_settings(**flags: Any) -> Settings:
    """Settings from flags, environment, file and defaults; flags that are None are not given.

    Raises ConfigurationError naming the first setting that does not validate.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return Settings(**given)
    except (tomllib.TOMLDecodeError, OSError) as error:
        raise ConfigurationError(
            "KVTIER_CONFIG", f"a readable TOML file ({error})", str(config_file())
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "settings"
        raise ConfigurationError(name, first["msg"], first.get("input")) from error
