"""Names of calibration documents in the store.

    kvtier:v1:curve:{model}:{revision}:{policy}
    kvtier:v1:profile:{model}:{revision}
    kvtier:v1:worth:{model}:{revision}
    kvtier:v1:memory:{model}:{revision}:{name}

Parts are percent-encoded, so that a hub id may contain `/` or `:`, and no part can hold a character
that Redis would read as a pattern.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import quote, unquote

from kvtier.errors import UsageError
from kvtier.heads.profile import HeadProfile
from kvtier.retention.locality import LocalityRule

if TYPE_CHECKING:
    from kvtier.retention.scorers.base import TokenScorer


PREFIX = "kvtier:v1:"
UNKNOWN = "unknown"
"""Revision of a model whose weights have none."""


@dataclass(frozen=True)
class _Named:
    """The part that all names share."""

    kind: ClassVar[str]

    model: str
    revision: str

    def __str__(self) -> str:
        encoded = []
        for name, part in asdict(self).items():
            try:
                encoded.append(quote(part, safe=""))
            except UnicodeEncodeError as error:
                raise UsageError(name, "text that UTF-8 can hold", part) from error
            if not part:
                raise UsageError(name, "some text", part)
        return PREFIX + ":".join((self.kind, *encoded))


@dataclass(frozen=True)
class CurveKey(_Named):
    """Name of the calibration curve of one retention policy; `policy` is its digest."""

    kind: ClassVar[str] = "curve"

    policy: str


@dataclass(frozen=True)
class ProfileKey(_Named):
    """Name of a head profile."""

    kind: ClassVar[str] = "profile"


@dataclass(frozen=True)
class WorthKey(_Named):
    """Name of what a model's tokens are worth."""

    kind: ClassVar[str] = "worth"


@dataclass(frozen=True)
class MemoryKey(_Named):
    """Name of a published prefix memory; `name` is what its operator calls it."""

    kind: ClassVar[str] = "memory"

    name: str


Key = CurveKey | ProfileKey | WorthKey | MemoryKey
KINDS: dict[str, type[Key]] = {
    kind.kind: kind for kind in (CurveKey, ProfileKey, WorthKey, MemoryKey)
}


def curve_key(model: str, revision: str | None, policy: str) -> CurveKey:
    """The key of the curve of `policy` on a model; weights without a revision are UNKNOWN."""
    return CurveKey(model, revision or UNKNOWN, policy)


def profile_key(model: str, revision: str | None) -> ProfileKey:
    """The key of the head profile of a model; weights without a revision are UNKNOWN."""
    return ProfileKey(model, revision or UNKNOWN)


def worth_key(model: str, revision: str | None) -> WorthKey:
    """The key of what a model's tokens are worth; weights without a revision are UNKNOWN."""
    return WorthKey(model, revision or UNKNOWN)


def memory_key(model: str, revision: str | None, name: str) -> MemoryKey:
    """The key of a model's published memory; weights without a revision are UNKNOWN."""
    return MemoryKey(model, revision or UNKNOWN, name)


def parse_key(text: str, argument: str = "key") -> Key:
    """Return the key of which the text is `str(key)`. Raises UsageError naming `argument` for
    anything else."""
    name, *parts = text.removeprefix(PREFIX).split(":") if text.startswith(PREFIX) else ("",)
    kind, values = KINDS.get(name), [unquote(part) for part in parts]
    key: Key | None = None
    if kind is not None and len(values) == len(fields(kind)) and all(values):
        key = kind(*values)
    # A second spelling of a name would be a second place for the same document.
    if key is None or str(key) != text:
        raise UsageError(argument, " or ".join(map(_pattern, KINDS.values())), text)
    return key


def _pattern(kind: type[Key]) -> str:
    """Return the spelling of a kind's keys, for people."""
    return PREFIX + ":".join((kind.kind, *(field.name.upper() for field in fields(kind))))


DIGEST_CHARACTERS = 16
# The version of what scores and shares mean; it counts up whenever an old curve would be misread.
SEMANTICS = 2


def policy_digest(profile: HeadProfile, rule: LocalityRule, scorer: TokenScorer) -> str:
    """Equal for policies that keep the same entries of every context; 16 hexadecimal digits.

    The branching window is left out: it decides who may share a context, not what is kept.
    """
    policy = {
        "semantics": SEMANTICS,
        "ca_heads": profile.ca_heads,
        "sink_tokens": rule.sink_tokens,
        "recent_tokens": rule.recent_tokens,
        **({} if rule.recent_of == 1 else {"recent_of": rule.recent_of}),
        "compensation": rule.compensation,
        scorer.name: scorer.parameters(),
    }
    text = json.dumps(policy, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]
