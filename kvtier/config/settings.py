"""All settings, and the rules between their sections."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from platformdirs import user_data_path
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from kvtier.addresses import parse_address
from kvtier.config.names import sections_of, settings_of
from kvtier.config.sections import (
    BudgetSettings,
    CalibrationSettings,
    LocalitySettings,
    MergeSettings,
    RedisSettings,
    RefreshSettings,
    ScorerSettings,
    TierSettings,
    refusal,
)

PrefillCompression = Literal["auto", "always", "never"]

STORE = "store"
"""The value of `memory` that means what is published in the calibration store."""


class Settings(BaseModel):
    """The settings of retention. `Settings()` are the defaults; those that a user chose come from
    `load_settings`."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    head_profile: Path | None = Field(
        None,
        description="Head profile file (JSON). None: the calibration store's; without one there, "
        "every head is context-anchored.",
    )
    quality: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Quality target: every context keeps the share that its calibration curve "
        "allows under it. None: CA heads keep everything.",
    )
    curve: Path | None = Field(
        None, description="Calibration curve file (JSON). None: the store's, for `quality`."
    )
    retention: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of every context that CA heads keep, instead of `quality`. None: 0.25 "
        "where heads compete and nothing else says how much, or everything.",
    )
    share_rule: str | None = Field(
        None,
        description="Any share rule by its name, as NAME=NUMBER: how much CA heads keep, instead.",
    )
    head_budgets: Literal["equal", "adaptive"] | None = Field(
        None,
        description="equal: every CA head keeps as much. adaptive: the best entries of all KV "
        "heads stay, however many a head has; it takes a scorer whose scores compare across heads "
        "(reconstruction), and no head profile. None: adaptive with a calibrated model, unless "
        "what else is asked for excludes it.",
    )
    kept_dtype: Literal["int8", "int4", "int3"] | None = Field(
        None,
        description="What the entries that heads which compete keep of a finished turn are coded "
        "to; first, newest and generated tokens stay as they are. None: the KV cache's dtype.",
    )
    compress_prefill: PrefillCompression = Field(
        "auto",
        description="Whether a prompt is compressed while it is prefilled, chunk by chunk. auto: "
        "one that would not fit the KV pool otherwise. always: every one, which takes less memory; "
        "what is computed over a compressed beginning is less exact. never: a prompt that does not "
        "fit is refused.",
    )
    reuse_behind_edits: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Whether what stood behind an edited text is taken from where it stood, its "
        "keys turned to their new positions, instead of computed again. auto: where heads "
        "compete.",
    )
    reuse_least_tokens: int = Field(
        256, ge=64, description="Fewer equal tokens behind an edit are computed again."
    )
    nll_stride: int = Field(
        4,
        ge=1,
        description="Every how many prompt tokens the model's surprise is measured, "
        "where a quality is asked for.",
    )
    memory: str | None = Field(
        None,
        min_length=1,
        description="Directory of a prefix memory, or of several, that requests are answered from "
        "(`kvtier memory build`). store: those that are published for the model "
        "(`kvtier memory publish`); a directory of that name is ./store.",
    )
    shadow_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of the requests that are computed a second time over exact KV when "
        "nothing else is under way, to count how many tokens agree.",
    )
    request_log: Path | None = Field(
        None,
        description="File that a line is appended to for each request that ended: lengths, keyed "
        "hashes of blocks, times, and why tokens were computed again, but no text "
        "(`kvtier trace explain`). With --dp-size a file for each replica, FILE.1.jsonl for the "
        "second. None: no log.",
    )
    kernels: str = Field(
        "auto",
        description="Attention kernels: reference, triton, or auto (triton on a GPU).",
    )
    force_cpu: bool = Field(
        False, description="Activate kvtier's CPU platform even where CUDA is available."
    )
    data_dir: Path = Field(
        default_factory=lambda: user_data_path("kvtier", appauthor=False),
        description="What kvtier keeps between runs: calibrations, or copies of those in a Redis.",
    )
    budget: BudgetSettings = BudgetSettings()
    scorer: ScorerSettings = ScorerSettings()
    locality: LocalitySettings = LocalitySettings()
    tier: TierSettings = TierSettings()
    refresh: RefreshSettings = RefreshSettings()
    merge: MergeSettings = MergeSettings()
    calibration: CalibrationSettings = CalibrationSettings()
    redis: RedisSettings = RedisSettings()

    @model_validator(mode="after")
    def _one_retention_rule(self) -> Self:
        given = list(self._retention_rules())
        if len(given) > 1:
            last = given[-1]
            raise refusal(last, f"only one of {', '.join(given)}", self._retention_rules()[last])
        return self

    @model_validator(mode="after")
    def _adaptive_budgets_have_nothing_beside_them(self) -> Self:
        if self.competes and self.head_profile is not None:
            expected = "none beside head_budgets = adaptive"
            raise refusal("head_profile", expected, self.head_profile)
        return self

    @model_validator(mode="after")
    def _a_refresh_has_what_it_needs(self) -> Self:
        if self.merge.is_on and not self.refresh.is_on:
            expected = "a refresh beside it: merging is done from the tier's exact KV"
            raise refusal("merge.form", expected, self.merge.form)
        # A calibrated model keeps a quarter where no share is named.
        chooses = self.compacts or self.heads_may_compete
        if self.refresh.is_on and not (self.tier.address is not None and chooses):
            expected = (
                "a tier, and a share of the context to choose: quality, retention or a budget"
            )
            raise refusal("refresh.when", expected, self.refresh.when)
        return self

    def _retention_rules(self) -> dict[str, float | str]:
        """Return the settings that say how much CA heads keep, by name; at most one in valid
        settings."""
        rules: dict[str, float | str | None] = {
            "quality": self.quality,
            "retention": self.retention,
            "budget.tokens": self.budget.tokens,
            "budget.bytes": self.budget.bytes,
            "share_rule": self.share_rule,
        }
        return {name: value for name, value in rules.items() if value is not None}

    @model_validator(mode="after")
    def _codes_have_nothing_beside_them(self) -> Self:
        is_equal = self.head_profile is not None or self.head_budgets == "equal"
        if self.kept_dtype is not None and is_equal:
            raise refusal("kept_dtype", "none without head_budgets = adaptive", self.kept_dtype)
        return self

    @property
    def kept_bits(self) -> int | None:
        """Bits of a number of what is kept; None where it stays as it is."""
        return None if self.kept_dtype is None else int(self.kept_dtype.removeprefix("int"))

    @property
    def compacts(self) -> bool:
        """Return whether CA heads may keep less than the whole context."""
        return bool(self._retention_rules())

    @property
    def heads_may_compete(self) -> bool:
        """Return whether no setting excludes adaptive budgets."""
        return self.head_budgets in (None, "adaptive") and self.head_profile is None

    @property
    def competes(self) -> bool:
        """Return whether heads compete for the entries that are kept."""
        return self.head_budgets == "adaptive"

    @property
    def memory_folder(self) -> Path | None:
        """The directory that `memory` names; None where it names none."""
        return None if self.memory is None or self.memory == STORE else Path(self.memory)

    def keeping_everything(self) -> Settings:
        """The same settings without any share of the context asked for, and so without a tier to
        choose it from."""
        return self.model_copy(
            update={
                "quality": None,
                "curve": None,
                "retention": None,
                "share_rule": None,
                "head_budgets": "equal",
                "kept_dtype": None,
                "budget": BudgetSettings(),
                "tier": self.tier.model_copy(update={"address": None}),
                "refresh": self.refresh.model_copy(update={"when": "off"}),
                "merge": self.merge.model_copy(update={"form": "off"}),
            }
        )

    def to_env(self) -> dict[str, str]:
        """The settings as KVTIER_* variables for child processes, secrets in clear; unset ones are
        left out."""
        values = {setting.variables[0]: setting.value(self) for setting in SETTINGS}
        return {name: _text(value) for name, value in values.items() if value is not None}

    def shown(self) -> dict[str, Any]:
        """The settings for people, such as tier.span_tokens: 256. Passwords are hidden, the rest of
        their URLs is not."""
        values = {setting.path: setting.value(self) for setting in SETTINGS}
        if self.redis.url is not None:
            values["redis.url"] = str(parse_address(self.redis.url.get_secret_value()))
        return values


SECTIONS = sections_of(Settings)
SETTINGS = tuple(settings_of(Settings))


def _text(value: Any) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return str(value).lower() if isinstance(value, bool) else str(value)
