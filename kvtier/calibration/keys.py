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
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from kvtier.errors import UsageError
from kvtier.heads.profile import HeadProfile
from kvtier.retention.locality import LocalityRule

if TYPE_CHECKING:
    from kvtier.retention.scorers.base import TokenScorer


PREFIX = "kvtier:v1:"
UNKNOWN = "unknown"
"""Revision of a model whose weights have none."""

DETAILS = {"curve": "policy", "profile": None, "worth": None, "memory": "name"}
"""The part that a name has beside model and revision, if any, by kind of document."""


@dataclass(frozen=True)
class Key:
    """The name of a document.

    kind:   one of DETAILS
    detail: the digest of a curve's retention policy, or what its operator calls a prefix memory
    """

    kind: str
    model: str
    revision: str
    detail: str | None = None

    @classmethod
    def of(cls, kind: str, model: str, revision: str | None, detail: str | None = None) -> Key:
        """The key of a model's document; weights without a revision are UNKNOWN."""
        return cls(kind, model, revision or UNKNOWN, detail)

    @property
    def policy(self) -> str | None:
        return self.detail if self.kind == "curve" else None

    @property
    def name(self) -> str | None:
        return self.detail if self.kind == "memory" else None

    def __str__(self) -> str:
        encoded = []
        for name, part in zip(_parts(self.kind), astuple(self)[1:], strict=False):
            try:
                encoded.append(quote(part, safe=""))
            except UnicodeEncodeError as error:
                raise UsageError(name, "text that UTF-8 can hold", part) from error
            if not part:
                raise UsageError(name, "some text", part)
        return PREFIX + ":".join((self.kind, *encoded))


def parse_key(text: str, argument: str = "key") -> Key:
    """Return the key of which the text is `str(key)`. Raises UsageError naming `argument` for
    anything else."""
    kind, *parts = text.removeprefix(PREFIX).split(":") if text.startswith(PREFIX) else ("",)
    values = [unquote(part) for part in parts]
    known = kind in DETAILS and len(values) == len(_parts(kind)) and all(values)
    key = Key(kind, *values) if known else None
    # A second spelling of a name would be a second place for the same document.
    if key is None or str(key) != text:
        spelt = [":".join((kind, *map(str.upper, _parts(kind)))) for kind in DETAILS]
        raise UsageError(argument, " or ".join(PREFIX + one for one in spelt), text)
    return key


def _parts(kind: str) -> list[str]:
    """Return the names of the parts that keys of a kind have."""
    return [part for part in ("model", "revision", DETAILS[kind]) if part is not None]


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
