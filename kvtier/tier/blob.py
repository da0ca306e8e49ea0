"""The bytes of one span's exact KV, and the checksum that says they are what was stored.

A blob is C-contiguous, key and value of every layer:

    payload     [layers, 2 (k, v), tokens, kv_heads, head_dim]
    checksum    xxh3-128 over  key | namespace | meta | payload

The checksum is over the name as well, so that the right bytes under the wrong name do not verify:
a tier that confuses two blobs is found out as surely as one that flips a bit. It guards against
accidents, not against somebody who can write to the tier.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import xxhash

from kvtier.errors import UsageError
from kvtier.tier.keys import KEY_BYTES, check_count

Bytes = bytes | bytearray | memoryview

CHECKSUM_BYTES = 16
DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


@dataclass(frozen=True)
class BlobMeta:
    """What the payload's bytes mean. dtype: one of DTYPE_BYTES, torch's name without `torch.`"""

    dtype: str
    num_layers: int
    num_tokens: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise UsageError("dtype", f"one of {', '.join(DTYPE_BYTES)}", self.dtype)
        for name in ("num_layers", "num_tokens", "num_kv_heads", "head_dim"):
            check_count(name, getattr(self, name))

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Of the payload: layers, k and v, tokens, KV heads, head dim."""
        return self.num_layers, 2, self.num_tokens, self.num_kv_heads, self.head_dim

    @property
    def num_bytes(self) -> int:
        """Of the payload."""
        layers, sides, tokens, heads, dim = self.shape
        return layers * sides * tokens * heads * dim * DTYPE_BYTES[self.dtype]


def checksum(key: bytes, namespace: str, meta: BlobMeta, payload: Sequence[Bytes] | Bytes) -> bytes:
    """16 bytes over a blob's name, meaning and content.

    payload: in one piece or in several that follow each other; never copied.

    Raises UsageError for a key of another length or a payload that `meta` does not describe.
    """
    if len(key) != KEY_BYTES:
        raise UsageError("key", f"{KEY_BYTES} bytes", f"{len(key)}")
    pieces = [payload] if isinstance(payload, Bytes) else payload
    views = [memoryview(piece).cast("B") for piece in pieces]
    if sum(len(view) for view in views) != meta.num_bytes:
        got = f"{sum(len(view) for view in views)}"
        raise UsageError("payload", f"{meta.num_bytes} bytes", got)
    digest = xxhash.xxh3_128(key)
    # Lengths before what has no fixed length, or two names could read as one.
    for text in (namespace, json.dumps(asdict(meta), sort_keys=True)):
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(4, "little"))
        digest.update(encoded)
    for view in views:
        digest.update(view)
    return digest.digest()


def verifies(
    expected: bytes, key: bytes, namespace: str, meta: BlobMeta, payload: Sequence[Bytes] | Bytes
) -> bool:
    """Whether this is, bit by bit, what was stored under this name.

    False for anything else, a payload of another length included.
    """
    try:
        found = checksum(key, namespace, meta, payload)
    except UsageError:
        return False
    return hmac.compare_digest(found, expected)
