"""The options of a store: a frozen dataclass whose fields are flags of `kvtier tier`.

    @dataclass(frozen=True)
    class MemoryOptions(StoreOptions):
        kind: ClassVar[str] = "memory"

        memory_bytes: Annotated[int, Flag("--memory", "at the start", SIZE, least=1)] = 4 << 30

A field that is no flag is set by programs only. Stores share flags by inheriting options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, get_type_hints

from kvtier.errors import UsageError
from kvtier.sizes import format_size, parse_count, parse_size


class ValueType(NamedTuple):
    """A type of values that are typed on the command line.

    parse: of what was typed and the flag's name, which its errors name; raises KvtierError.
    show:  the inverse.
    """

    parse: Callable[[str, str], Any]
    show: Callable[[Any], str] = str
    metavar: str | None = None


TEXT = ValueType(lambda text, flag: text)
NUMBER = ValueType(parse_count)
DIRECTORY = ValueType(lambda text, flag: Path(text), metavar="DIRECTORY")
# 4096, 4k, 1m, 2g
SIZE = ValueType(parse_size, format_size, "BYTES")
SIZE_OR_ZERO = ValueType(
    lambda text, flag: 0 if text == "0" else parse_size(text, flag), format_size, "BYTES"
)


@dataclass(frozen=True)
class Flag:
    """A flag of the command line.

    help:    may say %(default)s.
    least:   smaller values are refused.
    default: as it would be typed, None for none; the field's, which `StoreOptions.flags` fills in.
    """

    name: str
    help: str
    type: ValueType = TEXT
    least: int | None = None
    default: str | None = None


@dataclass(frozen=True)
class StoreOptions:
    """The options of one kind of store. kind: its name, for --store.

    Raises UsageError, naming the flag, for values that no store of this kind can have.
    """

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        for name, flag in self.flags().items():
            value = getattr(self, name)
            if flag.least is not None and value is not None and value < flag.least:
                raise UsageError(flag.name, f"at least {flag.least}", value)

    @classmethod
    def flags(cls) -> dict[str, Flag]:
        """The flags, by the fields' names."""
        flags = {}
        hints = get_type_hints(cls, include_extras=True)
        for one in fields(cls):
            for flag in getattr(hints[one.name], "__metadata__", ()):
                default = None if one.default is None else flag.type.show(one.default)
                flags[one.name] = replace(flag, default=default)
        return flags

    @classmethod
    def parse(cls, typed: Mapping[str, str | None]) -> Self:
        """typed: by the flags' names; None: the field's default.

        Raises UsageError naming the flag.
        """
        values = {}
        for name, flag in cls.flags().items():
            text = typed[flag.name]
            if text is not None:
                values[name] = flag.type.parse(text, flag.name)
        return cls(**values)
