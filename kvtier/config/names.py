"""The names of settings. One rule gives every name:

    in the program   settings.tier.span_tokens
    in the file      [tier]
                     span_tokens = 256
    as a variable    KVTIER_TIER_SPAN_TOKENS
    as a flag        --tier-span-tokens

A section may have a main setting. Its variable and its flag are the section's name alone (`--tier`
for tier.address), and the name by the rule (`--tier-address`) means the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, SecretStr
from pydantic.fields import FieldInfo

ENV_PREFIX = "KVTIER_"


class Section(BaseModel):
    """Base of all sections: immutable, without unknown fields, and no value in an error's text.

    main: the field that goes by the section's name alone, as a variable and as a flag.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    main: ClassVar[str | None] = None


@dataclass(frozen=True)
class Setting:
    """One setting with its names. section: "" at the top level."""

    section: str
    key: str
    field: FieldInfo
    is_main: bool = False

    @property
    def path(self) -> str:
        return f"{self.section}.{self.key}" if self.section else self.key

    @property
    def names(self) -> tuple[str, ...]:
        """The setting's names as variables and flags spell them, before prefix and dashes; the
        first one counts where several are given."""
        name = self.path.replace(".", "_")
        return (self.section, name) if self.is_main else (name,)

    @property
    def variables(self) -> tuple[str, ...]:
        return tuple(ENV_PREFIX + name.upper() for name in self.names)

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(flag_of(name) for name in self.names)

    @property
    def is_secret(self) -> bool:
        return SecretStr in get_args(self.field.annotation)

    @property
    def is_switch(self) -> bool:
        return self.field.annotation is bool

    def value(self, settings: BaseModel) -> Any:
        return getattr(self._owner(settings), self.key)

    def is_given(self, settings: BaseModel) -> bool:
        """Return whether the setting was set, rather than left at its default."""
        return self.key in self._owner(settings).model_fields_set

    def _owner(self, settings: BaseModel) -> BaseModel:
        owner: BaseModel = getattr(settings, self.section) if self.section else settings
        return owner


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def sections_of(settings: type[BaseModel]) -> dict[str, type[Section]]:
    """The sections of a model by their names."""
    annotations = {name: field.annotation for name, field in settings.model_fields.items()}
    return {
        name: kind
        for name, kind in annotations.items()
        if isinstance(kind, type) and issubclass(kind, Section)
    }


def settings_of(settings: type[BaseModel]) -> Iterator[Setting]:
    """Every setting of a model: those at the top level first, then section by section."""
    sections = sections_of(settings)
    for name, field in settings.model_fields.items():
        if name not in sections:
            yield Setting("", name, field)
    for section, kind in sections.items():
        for name, field in kind.model_fields.items():
            yield Setting(section, name, field, is_main=name == kind.main)
