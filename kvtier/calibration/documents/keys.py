"""Names of calibration documents in the store.

    kvtier:v1:curve:{model}:{revision}:{policy}
    kvtier:v1:profile:{model}:{revision}

Parts are percent-encoded, so that a hub id may contain `/` or `:`, and no part can hold a character
that Redis would read as a pattern.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import quote, unquote

from kvtier.errors import UsageError

PREFIX = "kvtier:v1:"
UNKNOWN = "unknown"
"""Revision of a model whose weights have none."""


@dataclass(frozen=True)
class CurveKey:
    """Name of the calibration curve of one retention policy; `policy` is its digest."""

    kind: ClassVar[str] = "curve"

    model: str
    revision: str
    policy: str

    def __str__(self) -> str:
        return _join(self.kind, model=self.model, revision=self.revision, policy=self.policy)


@dataclass(frozen=True)
class ProfileKey:
    """Name of a head profile."""

    kind: ClassVar[str] = "profile"

    model: str
    revision: str

    def __str__(self) -> str:
        return _join(self.kind, model=self.model, revision=self.revision)


Key = CurveKey | ProfileKey


def curve_key(model: str, revision: str | None, policy: str) -> CurveKey:
    """The key of the curve of `policy` on a model; weights without a revision are UNKNOWN."""
    return CurveKey(model, revision or UNKNOWN, policy)


def profile_key(model: str, revision: str | None) -> ProfileKey:
    """The key of the head profile of a model; weights without a revision are UNKNOWN."""
    return ProfileKey(model, revision or UNKNOWN)


def parse_key(text: str, argument: str = "key") -> Key:
    """What `str(key)` came from. Raises UsageError naming `argument` for anything else."""
    kind, *parts = text.removeprefix(PREFIX).split(":") if text.startswith(PREFIX) else ("",)
    names = [unquote(part) for part in parts]
    key: Key | None = None
    if kind == CurveKey.kind and len(names) == 3 and all(names):
        key = CurveKey(*names)
    elif kind == ProfileKey.kind and len(names) == 2 and all(names):
        key = ProfileKey(*names)
    # A second spelling of a name would be a second place for the same document.
    if key is None or str(key) != text:
        expected = f"{PREFIX}curve:MODEL:REVISION:POLICY or {PREFIX}profile:MODEL:REVISION"
        raise UsageError(argument, expected, text)
    return key


def _join(kind: str, **parts: str) -> str:
    encoded = []
    for name, part in parts.items():
        try:
            encoded.append(quote(part, safe=""))
        except UnicodeEncodeError as error:
            raise UsageError(name, "text that UTF-8 can hold", part) from error
        if not part:
            raise UsageError(name, "some text", part)
    return PREFIX + ":".join((kind, *encoded))
