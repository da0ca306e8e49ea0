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

from platformdirs import user_data_path
from pydantic import (
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from kvtier.addresses.redis import parse_address
from kvtier.addresses.tier import DEFAULT, default_address, socket_path
from kvtier.errors import ConfigurationError, UsageError

ENV_PREFIX = "KVTIER_"
DEFAULT_CONFIG_FILE = "kvtier.toml"
HIDDEN = "**********"


class Settings(BaseSettings):
    """What a context keeps, and how the pools are cut."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", hide_input_in_errors=True
    )

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
    quality: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Quality target: every context keeps the share that its calibration curve "
        "allows under it. None: CA heads keep everything.",
    )
    curve: Path | None = Field(
        None, description="Calibration curve file (JSON). None: the store's, for --quality."
    )
    retention: float | None = Field(
        None, gt=0, le=1, description="Share of every context that CA heads keep, instead."
    )
    budget_tokens: int | None = Field(
        None, ge=1, description="CA entries that a session's prompts may hold, instead."
    )
    budget_bytes: int | None = Field(
        None, ge=1, description="The same in bytes of one session's CA entries, instead."
    )
    share_rule: str | None = Field(
        None,
        description="Any share rule by its name, as NAME=NUMBER: how much CA heads keep, instead.",
    )
    session_retention: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Expected share that CA heads keep; sizes the pools. None: `retention`, or 1.",
    )
    nll_stride: int = Field(
        4, ge=1, description="Every how many prompt tokens the model's surprise is measured."
    )
    scorer: str = Field(
        "compactor", description="Which tokens CA heads keep: compactor, keydiff, streaming-llm, …"
    )
    leverage_weight: float = Field(
        1.0, ge=0, description="Weight of key leverage beside attention (compactor)."
    )
    score_window_tokens: int = Field(
        256, ge=2, description="Tokens that attend to each other when scored (compactor)."
    )
    score_pool_width: int = Field(
        5, ge=1, description="Neighbouring tokens that share their score; odd (compactor)."
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
    kernels: str = Field(
        "auto",
        description="Attention kernels: reference, triton, flashinfer, or auto (triton on a GPU).",
    )
    force_cpu: bool = Field(
        False, description="Activate kvtier's CPU platform even where CUDA is available."
    )
    redis_url: SecretStr | None = Field(
        None,
        description="Redis that holds calibrations: redis://, rediss:// or unix://, with user and "
        "password. None: an embedded server in data_dir.",
    )
    redis_ca: Path | None = Field(
        None,
        description="Certificate authorities to trust for rediss:// (PEM). None: the system's.",
    )
    redis_timeout_s: float = Field(
        0.5,
        gt=0,
        le=60,
        description="Longest wait for a connection or an answer of Redis. Reading or writing one "
        "document has a deadline of four times this over all it does, a list of twenty times.",
    )
    calibration_ttl_s: int = Field(
        90 * 86400, ge=1, description="Seconds that a stored calibration lives."
    )
    calibration_poll_s: float = Field(
        5.0, gt=0, description="Seconds between looks for a changed calibration while serving."
    )
    refresh: str = Field(
        "off",
        pattern=r"^(off|turn|[1-9][0-9]*)$",
        description="off, turn or a number of tokens. turn: when a turn begins, CA heads choose "
        "again what they keep, with its own questions, from the exact KV in the tier; a number: "
        "and again after that many generated tokens.",
    )
    refresh_moved: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Refresh again once attention over what is kept has moved by this much (total "
        "variation). None: it is not looked at.",
    )
    refresh_by: Literal["fetch", "near-data"] = Field(
        "fetch",
        description="fetch: the exact KV comes back and is chosen from here. near-data: the tier "
        "chooses where it can, and only what is kept comes.",
    )
    merge: Literal["off", "keepkv", "beta", "paper"] = Field(
        "off",
        description="What a refresh does with tokens that are not kept: drop them, or merge them "
        "into those that are: keepkv, in the form of real votes (beta) or the paper's.",
    )
    merge_floor: float = Field(
        0.9, ge=-1, le=1, description="Cosine similarity of keys up to which nothing is merged."
    )
    refresh_queries: int = Field(
        32, ge=1, description="Newest queries that choose what a refresh keeps."
    )
    tier: str | None = Field(
        None,
        description="KV tier that keeps exact KV: host:port, unix:/path, or default, where `kvtier "
        "tier` listens by default. None: no tier.",
    )
    tier_namespace: str = Field(
        "default",
        min_length=1,
        max_length=200,
        description="Whose KV it is in the tier; with TLS the common name of tier_certificate.",
    )
    tier_ca: Path | None = Field(
        None,
        description="Certificate authority of the tier (PEM); with it the tier is spoken "
        "to over mutual TLS.",
    )
    tier_certificate: Path | None = Field(None, description="This server's certificate (PEM).")
    tier_key: Path | None = Field(None, description="Key of tier_certificate (PEM).")
    tier_timeout_s: float = Field(
        1.0,
        gt=0,
        le=60,
        description="Longest wait for an answer of the tier that carries no KV; KV gets more.",
    )
    tier_span_tokens: int = Field(
        256, ge=16, description="Tokens of one blob in the tier; at most recent_tokens."
    )
    tier_buffer_bytes: int = Field(
        1 << 30, ge=1 << 20, description="Host memory for KV on its way to and from the tier."
    )
    tier_shared_memory: bool = Field(
        True, description="Move KV through shared memory where the tier is on this host."
    )
    drain_s: float = Field(
        10.0,
        ge=0,
        le=12,
        description="Seconds that a server which is asked to end waits for KV on its way to the "
        "tier. SGLang kills its scheduler 15 s after the last request ended.",
    )
    data_dir: Path = Field(
        default_factory=lambda: user_data_path("kvtier", appauthor=False),
        description="What kvtier keeps between runs: the embedded Redis and local copies.",
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

    @field_validator("redis_url")
    @classmethod
    def _is_a_redis_url(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None:
            try:
                parse_address(url.get_secret_value())
            except ValueError as error:
                raise PydanticCustomError("redis_url", str(error)) from None
        return url

    @field_validator("redis_ca")
    @classmethod
    def _is_used_by_tls(cls, ca: Path | None, info: ValidationInfo) -> Path | None:
        if ca is None:
            return None
        url: SecretStr | None = info.data.get("redis_url")
        if url is None or parse_address(url.get_secret_value()).scheme != "rediss":
            # A user who names an authority means to be encrypted.
            raise PydanticCustomError("redis_ca", "a rediss:// redis_url beside it")
        if not ca.is_file():
            raise PydanticCustomError("redis_ca", "an existing PEM file")
        return ca

    @field_validator("tier")
    @classmethod
    def _is_an_address(cls, tier: str | None) -> str | None:
        if tier == DEFAULT:
            tier = default_address()
        if tier is not None:
            try:
                path = socket_path(tier, "tier")
            except UsageError as error:
                raise PydanticCustomError("tier", error.expected) from None
            if path is None and not tier:
                raise PydanticCustomError("tier", "host:port, unix:/path or default")
        return tier

    @model_validator(mode="after")
    def _one_retention_rule(self) -> Settings:
        rules = ("quality", "retention", "budget_tokens", "budget_bytes", "share_rule")
        given = [name for name in rules if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"only one of {', '.join(given)}")
        if self.score_pool_width % 2 == 0:
            raise ValueError(f"score_pool_width must be odd, got {self.score_pool_width}")
        return self

    @model_validator(mode="after")
    def _a_tier_that_can_work(self) -> Settings:
        if self.merge != "off" and self.refresh == "off":
            raise ValueError("merge needs refresh: merging is done from the tier's exact KV")
        if self.refresh_moved is not None and self.refresh == "off":
            raise ValueError("refresh_moved needs refresh")
        if self.refresh != "off" and not (self.tier is not None and self.compacts):
            raise ValueError(
                "refresh needs a tier, and a share of the context to choose: quality, retention "
                "or a budget"
            )
        if self.tier is None:
            return self
        if self.tier_span_tokens > self.recent_tokens:
            # A span may end a turn later than it began: until then the device has its exact KV.
            raise ValueError(
                f"tier_span_tokens must be at most recent_tokens ({self.recent_tokens}), "
                f"got {self.tier_span_tokens}"
            )
        tls = (self.tier_ca, self.tier_certificate, self.tier_key)
        if any(tls) and not all(tls):
            raise ValueError("tier_ca, tier_certificate and tier_key come together")
        for name, path in zip(("tier_ca", "tier_certificate", "tier_key"), tls, strict=True):
            if path is not None and not path.is_file():
                raise ValueError(f"{name} must be an existing PEM file, got {path}")
        return self

    @property
    def compacts(self) -> bool:
        """Whether CA heads may keep less than the whole context."""
        numbers = (self.quality, self.retention, self.budget_tokens, self.budget_bytes)
        return self.share_rule is not None or any(number is not None for number in numbers)

    def keeping_everything(self) -> Settings:
        """The same settings without any share of the context asked for, and so without a tier to
        choose it from."""
        names = ("quality", "curve", "retention", "budget_tokens", "budget_bytes", "share_rule")
        nothing = dict.fromkeys((*names, "session_retention", "tier"))
        off = {"refresh": "off", "merge": "off", "refresh_moved": None}
        return self.model_copy(update=nothing | off)

    @property
    def refresh_every_tokens(self) -> int | None:
        """After how many generated tokens there is another refresh, if there is."""
        return int(self.refresh) if self.refresh.isdigit() else None

    @property
    def refreshes_while_generating(self) -> bool:
        return self.refresh_every_tokens is not None or self.refresh_moved is not None

    @property
    def expected_retention(self) -> float:
        """The share that pools are sized for."""
        return self.session_retention or self.retention or 1.0

    def to_env(self) -> dict[str, str]:
        """The settings as KVTIER_* variables for child processes, secrets in clear; unset ones are
        left out."""
        values = self.model_dump(mode="json", exclude_none=True)
        secrets = {
            name: value.get_secret_value()
            for name in values
            if isinstance(value := getattr(self, name), SecretStr)
        }
        return {
            ENV_PREFIX + name.upper(): str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in (values | secrets).items()
        }

    def shown(self) -> dict[str, Any]:
        """The settings for people: passwords hidden, the rest of their URLs not."""
        values = self.model_dump(mode="json")
        if self.redis_url is not None:
            values["redis_url"] = str(parse_address(self.redis_url.get_secret_value()))
        return values


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
        raise ConfigurationError(name, first["msg"], _printable(name, first["input"])) from error


def _printable(name: str, value: Any) -> Any:
    """A rejected value as an error may show it: a URL can hold a password, also under a name that
    was mistyped, and the input of the whole object holds every setting."""
    if isinstance(value, dict):
        return {key: _printable(key, one) for key, one in value.items()}
    hidden = name == "redis_url" or "://" in str(value)
    return HIDDEN if hidden else value
