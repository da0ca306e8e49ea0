"""The bytes of one span's exact KV, and the checksum that says they are what was stored.

A span's payload is C-contiguous, key and value of every layer, then what the writer's policy knows
about those tokens (scores), if anything:

    payload     [layers, 2 (k, v), tokens, kv_heads, head_dim] | score_bytes
    checksum    xxh3-128 over  key | namespace | layout | payload

The checksum is over the name as well, so that the right bytes under the wrong name do not verify:
a tier that confuses two blobs is found out as surely as one that flips a bit. It guards against
accidents, not against an attacker who can write to the tier.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kvtier.errors import UsageError
from kvtier.tier.blobs.keys import KEY_BYTES
from kvtier.v1 import tier_pb2

Bytes = bytes | bytearray | memoryview

CHECKSUM_BYTES = 16
MAX_LAYOUT_BYTES = 4096
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True)
class SpanLayout:
    """The layout of a span's bytes. dtype: one of DTYPE_BYTES, torch's name without `torch.`

    score_bytes: behind the KV; 0 where the writer has no scores.
    """

    dtype: str
    num_layers: int
    num_tokens: int
    num_kv_heads: int
    head_dim: int
    score_bytes: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise UsageError("dtype", f"one of {', '.join(DTYPE_BYTES)}", self.dtype)
        for name in ("num_layers", "num_tokens", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise UsageError(name, "at least 1", getattr(self, name))
        if self.score_bytes < 0:
            raise UsageError("score_bytes", "at least 0", self.score_bytes)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """The shape of the KV: layers, k and v, tokens, KV heads, head dim."""
        return self.num_layers, 2, self.num_tokens, self.num_kv_heads, self.head_dim

    @property
    def kv_bytes(self) -> int:
        layers, sides, tokens, heads, dim = self.shape
        return layers * sides * tokens * heads * dim * DTYPE_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        """The size of the payload."""
        return self.kv_bytes + self.score_bytes

    def encode(self) -> bytes:
        """The serialized kvtier.v1.Layout that is stored beside the payload."""
        kv = tier_pb2.KvLayout(
            dtype=self.dtype,
            num_layers=self.num_layers,
            num_tokens=self.num_tokens,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            score_bytes=self.score_bytes,
        )
        return tier_pb2.Layout(kv=kv).SerializeToString(deterministic=True)


def record_layout(schema: str) -> bytes:
    """The layout of a JSON document of the given schema."""
    record = tier_pb2.RecordLayout(schema=schema)
    return tier_pb2.Layout(record=record).SerializeToString(deterministic=True)


class Digest:
    """A checksum under way: name and layout first, then the payload piece by piece.

    Raises UsageError for a key of another length than KEY_BYTES.
    """

    def __init__(self, key: bytes, namespace: str, layout: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise UsageError("key", f"{KEY_BYTES} bytes", f"{len(key)}")
        self._state = xxhash.xxh3_128(key)
        # Lengths before what has no fixed length, or two names could read as one.
        for part in (namespace.encode(), layout):
            self._state.update(len(part).to_bytes(4, "little"))
            self._state.update(part)

    def update(self, piece: Bytes) -> None:
        self._state.update(piece)

    def value(self) -> bytes:
        """CHECKSUM_BYTES bytes."""
        return self._state.digest()


def checksum(key: bytes, namespace: str, layout: bytes, payload: Sequence[Bytes] | Bytes) -> bytes:
    """CHECKSUM_BYTES bytes over a blob's name, meaning and content.

    payload: in one piece or in several that follow each other; never copied.

    Raises UsageError for a key of another length than KEY_BYTES.
    """
    digest = Digest(key, namespace, layout)
    for piece in [payload] if isinstance(payload, Bytes) else payload:
        digest.update(memoryview(piece).cast("B"))
    return digest.value()


def verifies(
    expected: bytes, key: bytes, namespace: str, layout: bytes, payload: Sequence[Bytes] | Bytes
) -> bool:
    """Return whether this is, bit by bit, what was stored under this name."""
    return hmac.compare_digest(checksum(key, namespace, layout, payload), expected)
