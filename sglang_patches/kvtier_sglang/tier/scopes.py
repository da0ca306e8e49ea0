"""The scopes of KV: contexts of equal tokens share it that have the same extra key, adapter and
cache salt.

SGLang appends an adapter's id to a request's extra key, so a request without an adapter whose extra
key is that id would find the adapter's KV. Under kvtier every request's `extra_key` says which is
which; SGLang's tree and all that is derived from it then use that:

    no adapter, no extra key     None
    extra key "tenant"           "e" + "tenant"
    adapter 7f3…, "tenant"       "a6:" + "tenant" + "7f3…"      6: the length of the extra key
    keeping at most a tenth      "s0.1:" + what it would be without
    behind a prefix memory       "m" + its digest + what it would be without
"""

from __future__ import annotations

from typing import Any

DIGEST_DIGITS = 16


def separate_adapters(req: Any) -> None:
    """Give a new request the `extra_key` of this module. req: the request as SGLang's constructor
    leaves it."""
    extra, lora_id = req.extra_key or "", req.lora_id
    if lora_id is not None:
        extra = extra[: len(extra) - len(lora_id)]
    req.extra_key = joined(extra, lora_id)


def joined(extra_key: str, lora_id: str | None) -> str | None:
    """Return the extra key by which SGLang's tree knows both; None where there is neither."""
    if lora_id is not None:
        return f"a{len(extra_key)}:{extra_key}{lora_id}"
    return f"e{extra_key}" if extra_key else None


def with_memory(extra_key: str | None, digest: str) -> str:
    """Return the extra key by which SGLang's tree knows a request that a prefix memory answers.
    digest: DIGEST_DIGITS characters."""
    assert len(digest) == DIGEST_DIGITS, "not a memory's digest"
    return f"m{digest}{extra_key or ''}"


def memory_in(extra_key: str | None) -> str | None:
    """Return the digest of the memory in an extra key of this module's; None where there is
    none."""
    if not extra_key or extra_key[0] != "m":
        return None
    return extra_key[1 : 1 + DIGEST_DIGITS]


def without_memory(extra_key: str | None) -> str | None:
    """Return an extra key as it would be without the memory."""
    if memory_in(extra_key) is None:
        return extra_key
    assert extra_key is not None, "a memory in no extra key"
    return extra_key[1 + DIGEST_DIGITS :] or None


def with_share(extra_key: str | None, share: float) -> str:
    """Return the extra key of a request whose session keeps at most that share."""
    return f"s{share!r}:{extra_key or ''}"


def share_in(extra_key: str | None) -> float | None:
    """Return the share in an extra key of this module's; None where there is none."""
    text = without_memory(extra_key)
    if not text or text[0] != "s":
        return None
    return float(text[1:].partition(":")[0])


def without_share(extra_key: str | None) -> str | None:
    """Return an extra key without a memory as it would be without the share."""
    if not extra_key or extra_key[0] != "s":
        return extra_key
    return extra_key.partition(":")[2] or None


def separated(text: str | None) -> tuple[str, str | None]:
    """Return the extra key and the adapter's id of what `joined` gave."""
    if not text:
        return "", None
    kind, rest = text[0], text[1:]
    if kind == "e":
        return rest, None
    assert kind == "a", "an extra key that kvtier has not seen"
    length, _, rest = rest.partition(":")
    return rest[: int(length)], rest[int(length) :]
